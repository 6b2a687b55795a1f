"""Where settings come from: defaults < config.yaml < ``CTL_*`` environment variables < flags.

A layer is what one of these says. It holds what to call each value in a message, so that whatever
is wrong is said of the file, variable or flag that has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic.fields import FieldInfo

from ctl_core.errors import SetupError, one_line, reason
from ctl_core.files import written_whole
from ctl_core.settings import SETTINGS, WORDS, Config, kind_of, label, nearest, shown

ENV_PREFIX = "CTL_"
# Settings of where and how long a run is trained, which change none of its values.
OF_PLACE = (
    *("run_name", "runs_dir", "callbacks", "listener", "debug", "profile"),
    *("workers", "strategy", "virtual_devices"),
    *("max_restarts", "max_time", "ckpt_every", "keep_best"),
)


class _Loader(yaml.SafeLoader):
    """Reads YAML in which 1e-3 is a number and a date is a text, and each name stands once."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > 60:  # before Python's own end, which takes seconds to reach
            raise yaml.YAMLError("nested too deeply")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        before = set()
        for name in (name for name, _ in node.value if isinstance(name, yaml.ScalarNode)):
            if (name.tag, name.value) in before:  # of which PyYAML would take the last one
                why = f"{name.value} stands there twice"
                raise yaml.MarkedYAMLError(problem=why, problem_mark=name.start_mark)
            before.add((name.tag, name.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return str(node.value)  # what looks like a number and is none, such as 0x_, is a text


class Word(str):
    """The value of a flag as written, for an hparam that may be a text."""


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads back as it was."""


# What is not printable, such as other line ends than PyYAML's own, comes back from quotes only.
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)
for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*\.?|\.[0-9])[0-9_]*[eE][-+]?[0-9]+\Z"),
        list("-+.0123456789"),
    )


# What one source says: name -> (what to call it in a message, value).
Layer = dict[str, tuple[str, Any]]


def load_config(path: str | Path, **overrides: Any) -> Config:
    """Reads a config file, with keyword arguments on top: the settings for ``ctl_core.train``.

    Raises:
        SetupError: the file is missing or wrong, or a setting is.
    """
    for name in overrides:
        if name not in SETTINGS:
            raise SetupError(f"unknown setting {name!r}{nearest(name, SETTINGS)}")
    given: Layer = {name: (name, value) for name, value in overrides.items()}
    checked(given)
    return merge([read_file(Path(path))], [given], str(path))


def load_yaml(text: str) -> Any:
    """Reads YAML.

    Raises:
        ValueError: it is none; with where and why.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{line}no valid YAML: {one_line(problem, 120)}") from error


def read_value(text: str) -> Any:
    """Reads the text of a flag or variable as YAML; what is none is a text."""
    with contextlib.suppress(ValueError):
        return load_yaml(text) if text else ""
    return str(text)


def read_text(setting: FieldInfo, text: Any) -> Any:
    """Reads what a flag or variable says of a setting."""
    if text == "null" and type(None) in get_args(setting.annotation):
        return None  # as in a file
    if kind_of(setting) in (int, float, bool, dict) and isinstance(text, str):
        value = read_value(text)
        return text if value is None else value
    return text


def read_file(path: Path, required: bool = True) -> Layer:
    """Reads one YAML file of settings; a missing file that was not asked for is an empty one."""
    where = label(path)
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise SetupError(f"{where}: there is no such settings file.") from None
        return {}
    except UnicodeDecodeError as error:
        raise SetupError(f"{where}: cannot be read as a settings file: {error}") from error
    except OSError as error:
        raise SetupError(f"{where}: cannot be read as a settings file: {reason(error)}.") from error
    except ValueError as error:
        raise SetupError(f"{where}: {error}.") from error
    of_run = (path.parent / "train.log").exists()
    if not (content and isinstance(content, dict)) and of_run:
        raise SetupError(
            f"{where}: is damaged, so that the settings of this run are not known; remove it and "
            "start the run with all of them (its command is in env.json), or put back a copy."
        )
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SetupError(
            f"{where}: expected lines of the form 'name: value', got {shown(content)}."
        )
    if of_run:  # of an earlier engine, which its checkpoints will tell
        content = {key: value for key, value in content.items() if key in SETTINGS}
    for key in content:
        if key not in SETTINGS:
            raise SetupError(f"{where}: unknown setting {shown(key)}{nearest(str(key), SETTINGS)}")
    return _with_hparams(
        {
            str(name): (f"{where}: {name}", value)
            for name, value in content.items()
            if value is not None
        }
    )


def environment(environ: Mapping[str, str]) -> tuple[Layer, list[str] | None]:
    """Reads the ``CTL_*`` variables; one that is empty says nothing.

    Returns:
        What they say, and the settings files that they name.
    """
    layer: Layer = {}
    files = None
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or not text:
            continue
        key = name[len(ENV_PREFIX) :].lower()
        if key == "config":
            url = re.match(r"[A-Za-z][\w+.-]*://", text)
            files = [text] if url else [path for path in text.split(os.pathsep) if path]
        elif key not in SETTINGS:
            known = [known.upper() for known in (*SETTINGS, "config")]
            hint = nearest(key.upper(), known, ENV_PREFIX)
            raise SetupError(f"unknown setting {label(name)} in the environment{hint}")
        else:
            if kind_of(SETTINGS[key]) is bool:  # what others write for a switch
                text = {"0": "false", "1": "true"}.get(text, text)
            layer[key] = (name, read_text(SETTINGS[key], text))
    return _with_hparams(layer), files


def _with_hparams(layer: Layer) -> Layer:
    """Refuses hparams that are no names with values, before they are laid over others."""
    checked({key: layer[key] for key in ("hparams",) if key in layer})
    return layer


def checked(layer: Layer) -> Config:
    """Checks values; a complaint says where the wrong one comes from."""
    try:
        return Config(**{name: value for name, (_, value) in layer.items()})
    except SetupError as error:
        name, colon, words = str(error).partition(": ")
        where = layer[name][0] if name in layer else name
        raise SetupError(f"{where}{colon}{words}") from error.__cause__


def merge(
    files: Sequence[Layer], above: Sequence[Layer], file: str, others: Sequence[Layer] = ()
) -> Config:
    """Lays later values over earlier ones; hparams are merged name by name, at any depth.

    ``--epochs 3`` over ``steps: 600`` in a file means three epochs, not a conflict. What is above
    the files does not change the type of an hparam, and has no names that no file has, unless no
    file has any.

    Args:
        files: what settings files say
        above: what variables and flags say
        file: the name of the one that a new hparam is to be written into
        others: files of which only the names of hparams count, as the project's for a run that has
            settings of its own

    Raises:
        SetupError: a value is wrong, or an hparam unknown.
    """
    merged: Layer = {}
    hparams: dict[str, Any] = {}
    known: dict[str, Any] = {}
    for layer in (*others, *files):
        known = laid_over(known, layer.get("hparams", ("", {}))[1], "")
    for number, layer in enumerate((*files, *above)):
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if one in layer and other not in layer:
                merged.pop(other, None)
        merged |= layer
        if "hparams" in layer:
            where, over = layer["hparams"]
            if number >= len(files):
                _refuse_unknown(known, over, where, file)
            hparams = laid_over(hparams, over, where, typed=number >= len(files))
    return checked(merged | {"hparams": ("hparams", hparams)})


def laid_over(
    below: Mapping[str, Any], over: Mapping[str, Any], where: str, typed: bool = False
) -> dict[str, Any]:
    """Lays one dict over another, name by name, also in the dicts within.

    Args:
        below: what is there
        over: what is laid over it
        where: what to call ``over`` in a message
        typed: whether values have the types of those that they replace

    Raises:
        SetupError: a value has another type.
    """
    merged = dict(below)
    for name, value in over.items():
        inner, old = f"{where}.{name}", below.get(name)
        if typed:
            value = _like(old, value, inner)
        if isinstance(value, dict):
            value = laid_over(old if isinstance(old, dict) else {}, value, inner, typed)
        merged[name] = value
    return merged


def _refuse_unknown(
    known: Mapping[str, Any], over: Mapping[str, Any], where: str, file: str
) -> None:
    """Refuses names that are not among others, where there are any; also in the dicts within.

    Raises:
        SetupError: a name is unknown: with it, a run would be trained with the old value.
    """
    for name, value in over.items() if known else ():
        if name not in known:
            others = [str(other) for other in known]
            near = nearest(str(name), others) or f" (there: {one_line(', '.join(others), 100)})."
            raise SetupError(
                f"{label(f'{where}.{name}')}: is not among the hparams of {label(file)}{near} "
                "A new one is to be written there first."
            )
        if isinstance(value, dict) and isinstance(known[name], dict):
            _refuse_unknown(known[name], value, f"{where}.{name}", file)


def _like(old: Any, value: Any, where: str) -> Any:
    """Returns a value with the type of the one that it replaces; null has none.

    Raises:
        SetupError: it has another.
    """
    if isinstance(value, Word):
        read = read_value(value)
        value = read if read is None or type(old) is not str or type(read) is str else str(value)
    sort, other = (list if type(each) is tuple else type(each) for each in (old, value))
    if old is None or value is None or sort is other:
        return value
    with contextlib.suppress(OverflowError):
        if {sort, other} == {int, float} and sort(value) == value:
            return sort(value)
    raise SetupError(
        f"{label(where)}: expected {WORDS[sort]}, as the settings file has it "
        f"({shown(old, 40)}), got {shown(value)}."
    )


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Returns values by name, those of hparams by names like hparams.width."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = flat(value, f"{above}{name}.") if isinstance(value, dict) else {}
        found |= inner or {f"{above}{name}": value}
    return found


def write_config(config: Config, path: Path) -> None:
    """Writes the settings as resolved, whole or not at all."""
    text = yaml.dump(
        dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")
