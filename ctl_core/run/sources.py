"""Where settings come from: settings files, ``CTL_*`` environment variables, keyword arguments.

Layers of settings lie over each other: defaults < config.yaml < variables < flags, which
commands/cli.py reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from ctl_core.run.errors import SetupError, format_name, make_line, quote, suggest
from ctl_core.run.files import atomic_write
from ctl_core.run.settings import SETTINGS, Config

ENV_PREFIX = "CTL_"


class Layer(NamedTuple):
    """What one source says: settings by name, and what a message puts before these names."""

    values: dict[str, Any]
    place: str = ""

    def locate(self, name: str) -> str:
        """Names a setting as this source has it."""
        return self.place + (name.upper() if self.place == ENV_PREFIX else name)

    def leave_out(self, names: Collection[str]) -> Layer:
        """Returns the others of its settings."""
        others = {name: value for name, value in self.values.items() if name not in names}
        return Layer(others, self.place)


class _Loader(yaml.SafeLoader):
    """Reads YAML in which 1e-3 is a number."""


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads back as it was."""


for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*\.?|\.[0-9])[0-9_]*[eE][-+]?[0-9]+\Z"),
        list("-+.0123456789"),
    )


def read_file(path: Path, required: bool = True) -> Layer:
    """Reads one YAML file of settings; a missing file that was not asked for is an empty one.

    Raises:
        SetupError: it cannot be read.
    """
    where = format_name(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader) or {}
    except FileNotFoundError:
        if not required:
            return Layer({})
        raise SetupError(f"{where}: there is no such settings file.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SetupError(f"{where}: no valid YAML: {make_line(error, 200)}.") from error
    if not isinstance(content, dict):
        raise SetupError(f"{where}: expected lines of the form 'name: value'.")
    if (path.parent / "train.log").exists():  # of an earlier engine, as its checkpoints will tell
        content = {name: value for name, value in content.items() if name in SETTINGS}
    return Layer({str(name): value for name, value in content.items()}, f"{where}: ")


class EnvironmentSource(EnvSettingsSource):
    """Reads ``CTL_*`` variables; ``CTL_HPARAMS`` is YAML, ``CTL_HPARAMS__WIDTH`` one of them.

    One that is empty says nothing.
    """

    def __init__(self, model: type[BaseSettings]) -> None:
        super().__init__(
            model,
            env_prefix=ENV_PREFIX,
            env_nested_delimiter="__",
            env_ignore_empty=True,
            env_parse_none_str="null",
        )

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Reads YAML, of which JSON is a part."""
        return _read_value(value)


def find_unknown_variables() -> list[str]:
    """Returns a warning for each ``CTL_*`` variable that is no setting."""
    known = [f"{ENV_PREFIX}{name.upper()}" for name in (*SETTINGS, "config")]
    return [
        f"warning: the environment has {format_name(name)}, no setting{suggest(name, known)}"
        for name in os.environ
        if name.startswith(ENV_PREFIX) and name.split("__")[0] not in known
    ]


def load_config(path: str | Path, **overrides: Any) -> Config:
    """Reads a config file, with keyword arguments on top: the settings for ``ctl_core.train``.

    Raises:
        SetupError: the file is missing or wrong, or a setting is.
    """
    return resolve([read_file(Path(path))], [Layer(overrides)])


def resolve(files: Sequence[Layer], above: Sequence[Layer] = ()) -> Config:
    """Lays later values over earlier ones; a complaint says where the wrong one comes from.

    ``--epochs 3`` over ``steps: 600`` in a file means three epochs, not a conflict. hparams are
    merged name by name, at any depth. What is above the files keeps the type that an hparam has in
    these, and has no names that no file has, unless no file has any: a slip would train with the
    old value.

    Args:
        files: what settings files say
        above: what variables and flags say; texts are numbers where the files have these

    Raises:
        SetupError: a value is wrong, or an hparam unknown.
    """
    merged: dict[str, Any] = {}
    hparams: dict[str, Any] = {}
    known: dict[str, Any] | None = None
    layers = [*files, *above]
    for number, layer in enumerate(layers):
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if layer.values.get(one) is not None:
                merged.pop(other, None)
        merged |= layer.values
        if number == len(files):
            known = hparams
        over = layer.values.get("hparams") or {}
        hparams = merge_hparams(hparams, over, layer.locate("hparams"), known)
    try:
        return Config(**{**merged, "hparams": hparams})
    except SetupError as error:
        name, colon, words = str(error).partition(": ")
        places = (layer.locate(name) for layer in reversed(layers) if name in layer.values)
        raise SetupError(f"{next(places, name)}{colon}{words}") from error.__cause__


def merge_hparams(
    below: Mapping[str, Any],
    over: Any,
    where: str = "hparams",
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Lays hparams over others, name by name, also in the dicts within.

    Args:
        below: what is there
        over: what is laid over it
        where: what to call ``over`` in a message
        known: names that there may be, all if it is empty; values keep the type of what is there.
            None: whatever is said is taken

    Raises:
        SetupError: a name is unknown, or a value has another type.
    """
    if not isinstance(over, dict):
        raise SetupError(f"{where}: expected names with values, got {quote(over)}.")
    merged = dict(below)
    for name, value in over.items():
        inner, old, inside = f"{where}.{name}", below.get(name), None
        if known and name not in known:
            there = f"; a settings file has {make_line(', '.join(map(str, known)), 100)}"
            near = suggest(str(name), map(str, known)) or there
            raise SetupError(f"{format_name(inner)}: no settings file has it{near}")
        if known is not None:
            value, inside = _convert(value, old, inner), known.get(name)
            inside = inside if isinstance(inside, dict) else {}
        if isinstance(value, dict):
            value = merge_hparams(old if isinstance(old, dict) else {}, value, inner, inside)
        merged[name] = value
    return merged


def _convert(value: Any, old: Any, where: str) -> Any:
    """Returns a value with the type of the one that it replaces; null has none.

    Raises:
        SetupError: it has another.
    """
    if isinstance(value, str):
        read = _read_value(value)
        value = value if isinstance(old, str) and not isinstance(read, str | None) else read
    if old is None or value is None:
        return value
    try:
        return TypeAdapter(type(old)).validate_python(value)
    except ValidationError:
        expected = f"expected a value such as {quote(old, 40)}, which a settings file has"
        raise SetupError(f"{format_name(where)}: {expected}, got {quote(value)}.") from None


def _read_value(text: str) -> Any:
    """Reads the text of a flag or variable as YAML; what is none is a text."""
    with contextlib.suppress(yaml.YAMLError, ValueError):
        return yaml.load(text, Loader=_Loader)
    return text


def write_config(config: Config, path: Path) -> None:
    """Writes the settings as resolved, whole or not at all."""
    text = yaml.dump(
        dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
    with atomic_write(path) as beside:
        beside.write_text(text, encoding="utf-8")
