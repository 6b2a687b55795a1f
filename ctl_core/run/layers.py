"""Reads settings from files, ``CTL_*`` environment variables and keyword arguments.

Settings come from several layers: defaults, config.yaml, environment variables and flags, in this
order. Each layer overrides the layers before it. commands/cli.py reads the flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
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
from ctl_core.run.settings import RETIRED, SETTINGS, Config, SettingValue, make_plain

ENV_PREFIX = "CTL_"
# The maximum number of values in a settings file.
_MOST_VALUES = 100_000


class Layer(NamedTuple):
    """The settings of one layer: a file, the environment variables, or the flags.

    Attributes:
        values: the settings by name
        place: the prefix of each setting's name in a message, such as the name of the file
    """

    values: dict[str, Any]
    place: str = ""

    def locate(self, name: str) -> str:
        """Returns the name of a setting as it is written in this layer, for a message."""
        if self.place == ENV_PREFIX:
            name = name.upper()
        return self.place + name

    def leave_out(self, names: Collection[str]) -> Layer:
        """Returns a copy of the layer without the settings of the given names."""
        others = {name: value for name, value in self.values.items() if name not in names}
        return Layer(others, self.place)


class _Loader(yaml.SafeLoader):
    """Reads YAML, with ``1e-3`` as a number; rejects a name that occurs twice in a mapping.

    A few lines of YAML with nested aliases can expand to billions of values, or to infinitely many.
    Such files are rejected, too.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _count_values(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"its aliases expand to more than {_MOST_VALUES:,} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"{quote(name)} is given twice")
        return super().construct_mapping(node, deep)


def _count_values(node: yaml.Node, counts: dict[int, float]) -> float:
    """Returns the number of values in a node, including the values that aliases refer to.

    Args:
        node: a node of parsed YAML
        counts: the results for other nodes, by ``id``. While a node is being counted, its result
            is infinite, so a node with an alias to itself has infinitely many values.
    """
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = math.inf
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    counts[id(node)] = 1 + sum(_count_values(child, counts) for child in children)
    return counts[id(node)]


class _Dumper(yaml.SafeDumper):
    """Writes YAML that ``_Loader`` reads back unchanged."""


for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*\.?|\.[0-9])[0-9_]*[eE][-+]?[0-9]+\Z"),
        list("-+.0123456789"),
    )


def read_file(path: Path, required: bool = True) -> Layer:
    """Reads a YAML file of settings.

    Args:
        path: the path of the file
        required: whether the file must exist; if False, a missing file counts as an empty one

    Raises:
        SetupError: the file cannot be read.
    """
    where = format_name(path)
    try:
        content = parse_settings(path.read_text(encoding="utf-8-sig"), where)
    except FileNotFoundError:
        if not required:
            return Layer({})
        raise SetupError(f"{where}: there is no such settings file.") from None
    except UnicodeDecodeError as error:
        raise SetupError(f"{where}: not valid UTF-8: {make_line(error, 200)}.") from error
    layer = Layer(content, f"{where}: ")
    is_of_run = any((path.parent / name).exists() for name in ("train.log", "ckpt"))
    if is_of_run:
        layer = layer.leave_out(RETIRED)
    return layer


def parse_settings(text: str, where: str) -> dict[str, SettingValue]:
    """Parses the content of a settings file.

    Args:
        text: YAML
        where: the name of the file, for messages

    Raises:
        SetupError: the content is not valid YAML, or not a mapping.
    """
    try:
        content = yaml.load(text, Loader=_Loader) or {}
    except yaml.MarkedYAMLError as error:
        line = ""
        if error.problem_mark is not None:
            line = f"line {error.problem_mark.line + 1}: "
        raise SetupError(f"{where}: not valid YAML: {line}{error.problem}.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SetupError(f"{where}: not valid YAML: {make_line(error, 200)}.") from error
    except RecursionError:
        raise SetupError(f"{where}: its values are nested too deeply.") from None
    if not isinstance(content, dict):
        raise SetupError(f"{where}: expected lines such as 'name: value'.")
    return {str(name): value for name, value in content.items()}


class EnvironmentSource(EnvSettingsSource):
    """Reads ``CTL_*`` environment variables; ignores empty variables.

    ``CTL_HPARAMS`` contains all hyperparameters as YAML, ``CTL_HPARAMS__WIDTH`` a single value.
    """

    def __init__(self, model: type[BaseSettings]) -> None:
        super().__init__(
            model,
            env_prefix=ENV_PREFIX,
            env_nested_delimiter="__",
            env_ignore_empty=True,
            env_parse_none_str="null",
        )

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: str) -> SettingValue:
        """Parses the value of a variable as YAML, which includes JSON."""
        return _read_value(value)


def describe_variables() -> list[str]:
    """Returns a line that names the ``CTL_*`` variables, and a warning for each unknown one.

    Without the line, a variable that was set for another project would change settings silently.
    """
    known = [f"{ENV_PREFIX}{name.upper()}" for name in (*SETTINGS, "config")]
    names = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and os.environ[name])
    unknown = [name for name in names if name.split("__")[0] not in known]
    lines = [
        (
            f"warning: the environment variable {format_name(name)} is not a setting"
            f"{suggest(name, known)}"
        )
        for name in unknown
    ]
    used = [name for name in names if name not in unknown]
    if used:
        lines.append(f"settings from the environment: {make_line(', '.join(used), 200)}")
    return lines


class LoadedLayers(NamedTuple):
    """The layers from which ``load_config`` has built a ``Config``.

    Attributes:
        path: the path of the settings file
        file: the settings in the file
        arguments: the settings that were passed to ``load_config``
    """

    path: Path
    file: Layer
    arguments: Layer


def locate_runs(config: Config, layers: LoadedLayers) -> Config:
    """Returns settings with the ``runs_dir`` of the project to which the settings file belongs.

    Args:
        config: the settings
        layers: the layers of the settings; a ``runs_dir`` that was passed to ``load_config`` is
            relative to the current folder
    """
    folders = layers.path.absolute().parents
    projects = [folder for folder in folders if (folder / config.callbacks).is_file()]
    run = Path(config.runs_dir, config.run_name or "")  # an older run may be in the current folder
    is_here = Path(config.callbacks).is_file() or run.is_dir()
    if not projects or is_here or "runs_dir" in layers.arguments.values:
        return config
    return dataclasses.replace(config, runs_dir=str(projects[0].resolve() / config.runs_dir))


_LAYERS = "_loaded_layers"  # the attribute of a Config that contains its LoadedLayers


def load_config(path: str | Path, **overrides: Any) -> Config:
    """Reads the settings for ``ctl_core.train`` from a file.

    If the file belongs to a project and the current folder does not contain one, as in a notebook
    in a folder of the project, runs are in the ``runs_dir`` of that project.

    Args:
        path: the path of the file
        overrides: settings that take precedence over those in the file. If ``train`` resumes a
            run with the settings, the run keeps its own settings instead of those in the file, but
            the overrides take precedence over both.

    Raises:
        SetupError: the file is missing or invalid, or a setting is wrong.
    """
    path = Path(path)
    layers = LoadedLayers(path, read_file(path), Layer(make_plain(overrides)))
    config = locate_runs(resolve([layers.file], [layers.arguments]), layers)
    # Config is frozen. A copy that ``dataclasses.replace`` makes does not have this attribute.
    object.__setattr__(config, _LAYERS, layers)
    return config


def find_layers(config: Config) -> LoadedLayers | None:
    """Returns the layers of settings that ``load_config`` has read; None for any other Config."""
    layers: LoadedLayers | None = getattr(config, _LAYERS, None)
    return layers


def resolve(files: Sequence[Layer], above: Sequence[Layer] = ()) -> Config:
    """Merges layers of settings; a later layer overrides the layers before it.

    ``steps`` and ``epochs`` override each other: if a file contains ``steps: 600``, the flag
    ``--epochs 3`` trains for three epochs.

    Hyperparameters are merged name by name, at any depth. If the files contain hyperparameters,
    variables and flags can only change these, and cannot change their types. Otherwise, a run with
    a misspelled flag would train with the old value.

    Args:
        files: the layers of settings files
        above: the layers of variables and flags; their strings are converted to numbers if the
            files have numbers

    Raises:
        SetupError: a value is invalid, or a hyperparameter is unknown. The message names the layer
            with the error.
    """
    merged: dict[str, Any] = {}
    hparams: dict[str, Any] = {}
    known: dict[str, Any] | None = None
    layers = [*files, *above]
    for number, layer in enumerate(layers):
        if layer.values.get("steps") is not None:
            merged.pop("epochs", None)
        if layer.values.get("epochs") is not None:
            merged.pop("steps", None)
        merged |= layer.values
        if number == len(files):
            known = hparams
        changes = layer.values.get("hparams") or {}
        if layer.place == ENV_PREFIX:
            changes = match_case(changes, hparams)
        hparams = merge_hparams(hparams, changes, layer.locate("hparams"), known)
    try:
        return Config(**{**merged, "hparams": hparams})
    except SetupError as error:
        name, colon, words = str(error).partition(": ")
        places = (layer.locate(name) for layer in reversed(layers) if name in layer.values)
        raise SetupError(f"{next(places, name)}{colon}{words}") from error.__cause__


def merge_hparams(
    below: Mapping[str, Any],
    over: SettingValue,
    where: str = "hparams",
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Merges hyperparameters name by name, including those in nested dicts.

    Args:
        below: the present values
        over: the values that replace them
        where: the name of ``over`` in messages
        known: the allowed names; an empty dict allows all names. In both cases, a new value must
            have the type of the present one. None allows any name and any type.

    Returns:
        The merged values.

    Raises:
        SetupError: a name is unknown, or a value has another type.
    """
    if not isinstance(over, dict):
        raise SetupError(f"{where}: expected names with values, got {quote(over)}.")
    merged = dict(below)
    for name, value in over.items():
        full_name = f"{where}.{name}"
        present = below.get(name)
        if known and name not in known:
            all_names = f"; a settings file has {make_line(', '.join(map(str, known)), 100)}"
            hint = suggest(str(name), map(str, known)) or all_names
            raise SetupError(
                f"{format_name(full_name)}: no settings file has this hyperparameter{hint}"
            )
        known_inside: dict[str, Any] | None = None
        if known is not None:
            value = _convert(value, present, full_name)
            known_inside = _as_dict(known.get(name))
        if isinstance(value, dict):
            value = merge_hparams(_as_dict(present), value, full_name, known_inside)
        merged[name] = value
    return merged


def _as_dict(value: SettingValue) -> dict[str, SettingValue]:
    """Returns a value if it is a dict, otherwise an empty dict."""
    if isinstance(value, dict):
        return value
    return {}


def _convert(value: SettingValue, present: SettingValue, where: str) -> SettingValue:
    """Returns a new value with the type of the present one; null fits any type.

    Raises:
        SetupError: the value cannot be converted.
    """
    if isinstance(value, str):
        parsed = _read_value(value)
        # A string such as "7" is not converted to a number if it replaces a string.
        stays_text = isinstance(present, str) and not isinstance(parsed, str | None)
        if not stays_text:
            value = parsed
    if present is None or value is None:
        return value
    if type(present) is int and type(value) is float and not value.is_integer():
        return value  # the file may contain 0 for a number such as a rate
    try:
        return TypeAdapter(type(present)).validate_python(value)
    except ValidationError:
        raise SetupError(
            f"{format_name(where)}: expected {_describe_kind(present)}, the value in a settings "
            f"file, got {quote(value)}."
        ) from None


def _describe_kind(present: SettingValue) -> str:
    """Returns a phrase for the values that may replace a hyperparameter."""
    text = make_line(yaml.dump(present, Dumper=_Dumper, default_flow_style=True, width=1000), 40)
    if isinstance(present, list):
        return f"a list such as '{text}'"
    if isinstance(present, dict):
        return f"names with values such as '{text}'"
    return f"a value of the same kind as {quote(present, 40)}"


def match_case(changes: SettingValue, present: Mapping[str, Any]) -> SettingValue:
    """Restores the upper-case letters of hyperparameters that environment variables set.

    The names of environment variables are read in lower case.

    Args:
        changes: the values of the variables
        present: the hyperparameters of the settings files
    """
    if not isinstance(changes, dict):
        return changes
    by_lower = {str(name).lower(): name for name in present}
    matched = {}
    for name, value in changes.items():
        if name not in present:
            name = by_lower.get(str(name), name)
        matched[name] = match_case(value, _as_dict(present.get(name)))
    return matched


def _read_value(text: str) -> SettingValue:
    """Parses a flag or variable as YAML; returns the string itself if it is not valid YAML."""
    with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
        return yaml.load(text, Loader=_Loader)
    return text


def write_config(config: Config, path: Path) -> None:
    """Writes all settings to a file, atomically."""
    with atomic_write(path) as beside:
        beside.write_text(format_config(config), encoding="utf-8")


def format_config(config: Config) -> str:
    """Returns all settings as YAML, in the form of a settings file."""
    return yaml.dump(
        dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
