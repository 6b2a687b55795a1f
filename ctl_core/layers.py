"""Layers of settings: defaults < config.yaml < ``CTL_*`` environment variables < flags.

A layer is what one of these says. A mistake is said of the file, variable or flag that has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from ctl_core.errors import SetupError, one_line, reason
from ctl_core.files import written_whole
from ctl_core.settings import SETTINGS, Config, label, nearest, shown

ENV_PREFIX = "CTL_"


class _Loader(yaml.SafeLoader):
    """Reads YAML in which 1e-3 is a number, and each name stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            why = f"{twice[0]} stands there twice"
            raise yaml.MarkedYAMLError(problem=why, problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads back as it was."""


for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*\.?|\.[0-9])[0-9_]*[eE][-+]?[0-9]+\Z"),
        list("-+.0123456789"),
    )


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one source says.

    Attributes:
        values: the settings, by name
        place: what stands before a setting's name in a message
    """

    values: dict[str, Any]
    place: str = ""

    def where(self, name: str) -> str:
        """Names a setting as this source has it."""
        return self.place + (name.upper() if self.place == ENV_PREFIX else name)

    def only(self, names: Container[str]) -> Layer:
        """Returns these of its settings alone."""
        return Layer({name: self.values[name] for name in self.values if name in names}, self.place)

    @property
    def hparams(self) -> tuple[Any, str]:
        """The values of hparams, and how they are named."""
        return self.values.get("hparams") or {}, self.where("hparams")


def load_config(path: str | Path, **overrides: Any) -> Config:
    """Reads a config file, with keyword arguments on top: the settings for ``ctl_core.train``.

    Raises:
        SetupError: the file is missing or wrong, or a setting is.
    """
    return merge([read_file(Path(path))], [Layer(overrides)], reads=False)


def read_value(text: str) -> Any:
    """Reads the text of a flag or variable as YAML; what is none is a text."""
    with contextlib.suppress(yaml.YAMLError, ValueError):
        return yaml.load(text, Loader=_Loader)
    return text


def read_file(path: Path, required: bool = True) -> Layer:
    """Reads one YAML file of settings; a missing file that was not asked for is an empty one.

    Raises:
        SetupError: it cannot be read, or has a setting that is none.
    """
    where = label(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader) or {}
    except FileNotFoundError:
        if not required:
            return Layer({})
        raise SetupError(f"{where}: there is no such settings file.") from None
    except OSError as error:
        raise SetupError(f"{where}: cannot be read: {reason(error)}.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SetupError(f"{where}: no valid YAML: {one_line(error, 200)}.") from error
    if not isinstance(content, dict):
        raise SetupError(f"{where}: expected lines of the form 'name: value'.")
    if (path.parent / "train.log").exists():  # of an earlier engine, as its checkpoints will tell
        content = {name: value for name, value in content.items() if name in SETTINGS}
    for name in content:
        if name not in SETTINGS:
            near = nearest(str(name), SETTINGS)
            raise SetupError(f"{where}: unknown setting {shown(name)}{near}")
    return Layer(content, f"{where}: ")


class _Variables(EnvSettingsSource):
    """Reads ``CTL_*`` variables; ``CTL_HPARAMS`` is YAML, ``CTL_HPARAMS__WIDTH`` one of them."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return read_value(value)


def read_environment() -> Layer:
    """Reads the ``CTL_*`` variables but ``CTL_CONFIG``; one that is empty says nothing.

    Raises:
        SetupError: one is no setting.
    """
    known = [f"{ENV_PREFIX}{name.upper()}" for name in (*SETTINGS, "config")]
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name.split("__")[0] not in known:
            near = nearest(name, known)
            raise SetupError(f"unknown setting {label(name)} in the environment{near}")
    fields: dict[str, Any] = {name: (each.annotation, each) for name, each in SETTINGS.items()}
    source = _Variables(
        create_model("Variables", __base__=BaseSettings, **fields),
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        env_parse_none_str="null",
    )
    return Layer(source(), ENV_PREFIX)


def resolve(layers: Sequence[Layer]) -> Config:
    """Lays later values over earlier ones; a complaint says where the wrong one comes from.

    ``--epochs 3`` over ``steps: 600`` in a file means three epochs, not a conflict.

    Raises:
        SetupError: a value is wrong.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if layer.values.get(one) is not None:
                merged.pop(other, None)
        merged |= layer.values
    try:
        return Config(**merged)
    except SetupError as error:
        name, colon, words = str(error).partition(": ")
        places = (layer.where(name) for layer in reversed(layers) if name in layer.values)
        raise SetupError(f"{next(places, name)}{colon}{words}") from error.__cause__


def merge(
    files: Sequence[Layer], above: Sequence[Layer], others: Sequence[Layer] = (), reads: bool = True
) -> Config:
    """Merges layers; hparams name by name, at any depth.

    What is above the files does not change the type of an hparam, and has no names that no file
    has, unless no file has any: a slip would train with the old value.

    Args:
        files: what settings files say
        above: what variables and flags say
        others: files of which only the names of hparams count, as the project's for a run that has
            settings of its own
        reads: whether texts above the files are numbers, true, false where the files have these

    Raises:
        SetupError: a value is wrong, or an hparam unknown.
    """
    known: dict[str, Any] = {}
    hparams: dict[str, Any] = {}
    for layer in (*others, *files):
        known = lay_over(known, *layer.hparams)
    for layer in files:
        hparams = lay_over(hparams, *layer.hparams)
    for layer in above:
        hparams = lay_over(hparams, *layer.hparams, known, reads)
    return resolve([*files, *above, Layer({"hparams": hparams})])


def lay_over(
    below: Mapping[str, Any],
    over: Any,
    where: str,
    known: Mapping[str, Any] | None = None,
    reads: bool = False,
) -> dict[str, Any]:
    """Lays hparams over others, name by name, also in the dicts within.

    Args:
        below: what is there
        over: what is laid over it
        where: what to call ``over`` in a message
        known: names that there may be, all if it is empty; values keep the type of what is there.
            None: whatever is said is taken
        reads: whether texts may be read as other values

    Raises:
        SetupError: a name is unknown, or a value has another type.
    """
    if not isinstance(over, dict):
        raise SetupError(f"{where}: expected names with values, got {shown(over)}.")
    merged = dict(below)
    for name, value in over.items():
        inner, old, inside = f"{where}.{name}", below.get(name), None
        if known and name not in known:
            there = [str(each) for each in known]
            near = nearest(str(name), there) or f" (there: {one_line(', '.join(there), 100)})."
            raise SetupError(
                f"{label(inner)}: no settings file has it{near} A new one is to be written there "
                "first."
            )
        if known is not None:
            value, inside = _convert(value, old, inner, reads), known.get(name)
            inside = inside if isinstance(inside, dict) else {}
        if isinstance(value, dict):
            value = lay_over(old if isinstance(old, dict) else {}, value, inner, inside, reads)
        merged[name] = value
    return merged


def _convert(value: Any, old: Any, where: str, reads: bool) -> Any:
    """Returns a value with the type of the one that it replaces; null has none.

    Raises:
        SetupError: it has another.
    """
    if reads and isinstance(value, str):
        read = read_value(value)
        value = value if isinstance(old, str) and not isinstance(read, str | None) else read
    sort, other = type(old), type(value)
    if old is None or value is None or sort is other:
        return value
    if {sort, other} == {int, float} and sort(value) == value:
        return sort(value)
    raise SetupError(
        f"{label(where)}: expected a value such as {shown(old, 40)}, which a settings file has, "
        f"got {shown(value)}."
    )


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Returns values by name, those of hparams by names like hparams.width."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = flatten(value, f"{above}{name}.") if isinstance(value, dict) else {}
        found |= inner or {f"{above}{name}": value}
    return found


def write_config(config: Config, path: Path) -> None:
    """Writes the settings as resolved, whole or not at all."""
    text = yaml.dump(
        dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")
