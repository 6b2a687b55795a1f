"""Settings: defaults < config.yaml < ``CTL_*`` environment variables < flags.

jsonargparse reads the values and checks their types; ranges and combinations are checked in
``Config`` itself, so that a notebook gets the same answers. TensorFlow is not imported here: a
misspelt flag is answered at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jsonargparse
import yaml

from ctl_core.errors import SetupError, one_line

ENV_PREFIX = "CTL_"
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run.

    Args:
        steps: train until this step, counted from the start of the run, not of the process
        epochs: the same in passes over the training data (give steps or epochs)
        batch_size: global batch size, shared out evenly over the replicas
        learning_rate: initial value of lr; on resume, a changed value replaces the current one
        seed: seeds Python, NumPy, TensorFlow and Keras
        run_name: folder of the run inside runs_dir; an existing one resumes; default: the time
        ckpt_every: save a checkpoint every so many steps (0: only at the end)
        eval_every: evaluate every so many steps (0: only at the end)
        strategy: auto takes all GPUs, or the virtual devices, or the one device there is
        virtual_devices: split the CPU into so many devices, to try multi-GPU code on a laptop
        max_chunk: most steps inside one graph call
        deterministic: bit-identical results from run to run (op determinism), slower
        runs_dir: folder that holds the runs
        debug: show tracebacks and TensorFlow's own messages on the console
        hparams: free values of your own; hooks get them as hparams
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 64
    learning_rate: float = 0.001
    seed: int = 0
    run_name: str | None = None
    ckpt_every: int = 1000
    eval_every: int = 1000
    strategy: Literal["auto", "one_device", "mirrored"] = "auto"
    virtual_devices: int = 1
    max_chunk: int = 1000
    deterministic: bool = False
    runs_dir: str = "runs"
    debug: bool = False
    hparams: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks ranges and combinations.

        Raises:
            SetupError: a value is out of range; the message names setting, value and range.
        """
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise SetupError(f"{name}: expected a whole number, got {value!r}.")
            if value < least:
                raise SetupError(f"{name}: expected a whole number from {least} up, got {value}.")
        if self.seed >= 2**32:
            raise SetupError(f"seed: expected a whole number below 2**32, got {self.seed}.")
        rate = self.learning_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e30:
            raise SetupError(f"learning_rate: expected a number above 0, got {rate!r}.")
        if self.steps is not None and self.epochs is not None:
            raise SetupError(
                f"steps and epochs: give one of the two, got steps={self.steps} and "
                f"epochs={self.epochs}."
            )
        if self.strategy not in ("auto", "one_device", "mirrored"):
            raise SetupError(
                f"strategy: expected auto, one_device or mirrored, got {self.strategy!r}."
            )
        if self.strategy == "one_device" and self.virtual_devices > 1:
            raise SetupError(
                f"strategy: one_device uses one device, but virtual_devices is "
                f"{self.virtual_devices}; leave one of them out."
            )
        if self.run_name is not None and not _RUN_NAME.fullmatch(self.run_name):
            raise SetupError(
                f"run_name: expected a folder name of letters, digits, '.', '_' and '-' that "
                f"starts with a letter or digit, got {self.run_name!r}."
            )
        if not isinstance(self.hparams, dict):
            raise SetupError(f"hparams: expected names with values, got {self.hparams!r}.")


# The lowest value that each whole number may take.
_LEAST = {
    "steps": 0,
    "epochs": 0,
    "batch_size": 1,
    "seed": 0,
    "ckpt_every": 0,
    "eval_every": 0,
    "virtual_devices": 1,
    "max_chunk": 1,
}
FIELDS = tuple(field.name for field in dataclasses.fields(Config))


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the nearest of ``names``, or an empty string."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def load_config(path: str | Path, **overrides: Any) -> Config:
    """Reads a config file, with keyword arguments on top: the settings for ``ctl_core.train``.

    Raises:
        SetupError: the file is missing or wrong, or a setting is.
    """
    parser = _parser("train")
    file = _read_file(parser, Path(path), required=True)
    given = _parse("", lambda: parser.parse_object(dict(overrides), defaults=False))
    return _merge([file, given])


@dataclasses.dataclass(frozen=True)
class Command:
    """A parsed command line: the settings, and the options that only this command has."""

    name: str
    config: Config
    options: Mapping[str, Any]


# Options that belong to one command and are no settings of a run: name -> (type, help).
_CHECKPOINT: dict[str, tuple[type, str]] = {
    "checkpoint": (int, "step of the checkpoint to take; default: the newest")
}
OPTIONS: dict[str, dict[str, tuple[type, str]]] = {
    "train": {},
    "evaluate": _CHECKPOINT,
    "predict": {
        **_CHECKPOINT,
        "input": (
            str,
            "a .npy file with the model's input, or a .npz file with one array per named input; "
            "default: the data of create_eval_dataset",
        ),
        "output": (str, "the .npz file to write; default: predictions.npz in the run folder"),
    },
    "export": _CHECKPOINT,
}
COMMANDS = {
    "train": "train, or resume a run",
    "evaluate": "evaluate a run's checkpoint",
    "predict": "write a run's predictions to a file",
    "export": "write a run's model as a SavedModel",
    "hooks": "print the table of hooks",
}


def parse_command(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Command:
    """Parses ``<command> [flags]``, where the command is one of ``OPTIONS``.

    ``evaluate``, ``predict`` and ``export`` take the run's own config.yaml as their config file,
    unless ``--config`` names another: the model must be the one that was trained.

    Raises:
        SetupError: anything is unknown, of the wrong type, out of range or missing.
        SystemExit: ``--help`` was asked for and printed.
    """
    name, flags = argv[0], list(argv[1:])
    parser = _parser(name)
    given = _parse("", lambda: parser.parse_args(flags, defaults=False, env=False))
    env = _environment(parser, environ)
    named = given.pop("config", None) or env.get("config")
    env.pop("config", None)
    path = Path(named or "config.yaml")
    if name != "train" and named is None:
        near = {**_read_file(parser, path, required=False), **env, **given}
        run = find_run(Path(near.get("runs_dir", Config.runs_dir)), near.get("run_name"))
        given.update(run_name=run.name, runs_dir=str(run.parent))
        path = run / "config.yaml"
    file = _read_file(parser, path, required=named is not None)
    if name != "train":
        file.pop("debug", None)  # how a run was watched says nothing about how it is used
    layers = [file, env, given]
    options: dict[str, Any] = dict.fromkeys(OPTIONS[name])
    for layer in layers:
        options.update({key: layer.pop(key) for key in options if key in layer})
    return Command(name, _merge(layers), options)


def find_run(runs_dir: Path, run_name: str | None) -> Path:
    """Returns the folder of a run that was trained before; without a name, the newest.

    Raises:
        SetupError: there is no such run.
    """
    runs = [path.parent for path in runs_dir.glob("*/config.yaml")]
    if not runs:
        raise SetupError(f"{runs_dir}: no run there yet; train one first.")
    if run_name is None:
        return max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime)
    for run in runs:
        if run.name == run_name:
            return run
    names = sorted(run.name for run in runs)
    raise SetupError(
        f"run_name: no run {run_name!r} in {runs_dir}{nearest(run_name, names)} "
        f"(there: {', '.join(names[:10])})"
    )


def _parser(command: str) -> jsonargparse.ArgumentParser:
    """Builds the parser of one command: its own options, ``--config`` and every setting."""
    parser = jsonargparse.ArgumentParser(
        prog=f"ctl_core {command}",
        description=f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}. Settings come from "
        f"the defaults, then config.yaml, then the environment ({ENV_PREFIX}BATCH_SIZE=32), then "
        "these flags.",
        exit_on_error=False,
        allow_abbrev=False,
        env_prefix=ENV_PREFIX.rstrip("_"),
    )
    for key, (kind, text) in OPTIONS[command].items():
        parser.add_argument(f"--{key}", type=kind, help=text)
    parser.add_argument(
        "--config", type=str, metavar="FILE", help="settings file (default: config.yaml)"
    )
    texts = _field_texts()
    for field in dataclasses.fields(Config):
        flag, kind, text = (
            "--" + field.name.replace("_", "-"),
            _TYPES[field.name],
            texts[field.name],
        )
        if kind is bool:
            yes_no = jsonargparse.ActionYesNo(no_prefix="no-")
            parser.add_argument(flag, action=yes_no, default=field.default, help=text)
        elif field.name == "hparams":
            text += "; as a flag: --hparams.width 64"
            parser.add_argument(flag, type=dict[str, Any], default={}, help=text)
        else:
            parser.add_argument(flag, type=kind, default=field.default, help=text)
    return parser


def _field_texts() -> dict[str, str]:
    """Reads the help texts off the docstring of ``Config``, so that they are written once."""
    texts = re.findall(r"^ {8}(\w+): (.+)$", Config.__doc__ or "", re.MULTILINE)
    return dict(texts)


def _kind(field: dataclasses.Field[Any]) -> Any:
    """Returns a field's type without ``None``: in a file or flag, nothing is said by absence."""
    hint = get_type_hints(Config)[field.name]
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return hint if get_origin(hint) in (Literal, dict) or not kinds else kinds[0]


_TYPES = {field.name: _kind(field) for field in dataclasses.fields(Config)}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _parse(where: str, parse: Callable[[], jsonargparse.Namespace]) -> dict[str, Any]:
    """Runs one of the parser's methods and turns its complaint into one line."""
    try:
        return dict(parse().as_dict())
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise SetupError(where + _plain(one_line(error))) from error


def _plain(line: str) -> str:
    """Keeps what a user needs of a jsonargparse message: the setting, the value, the type."""
    if unknown := re.search(r"unrecognized arguments: (\S+)", line):
        flag = unknown.group(1).split("=")[0]
        if not flag.startswith("-"):
            return f"unexpected word {flag!r}: settings are given as --name value."
        return f"unknown setting {flag}{nearest(flag, ['--' + n.replace('_', '-') for n in _KEYS])}"
    key = re.search(r"""[Kk]ey "(\w+)""", line)
    value = re.search(r"(?:Got|Given) value: (.*)$", line)
    if boolean := re.search(r"Value not boolean: (.*?)\.?$", line):
        return f"expected true or false, got {boolean.group(1)}."
    if key and value and key.group(1) in _TYPES:
        kind = _TYPES[key.group(1)]
        expected = _WORDS.get(kind) or (
            f"one of {', '.join(get_args(kind))}"
            if get_origin(kind) is Literal
            else "names with values"
        )
        return f"{key.group(1)}: expected {expected}, got {value.group(1)!r}."
    return line


_KEYS = (*FIELDS, "config")


def _read_file(
    parser: jsonargparse.ArgumentParser, path: Path, required: bool = True
) -> dict[str, Any]:
    """Reads one YAML file of settings; a missing file that was not asked for is an empty one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if required:
            raise SetupError(f"{path}: there is no such settings file.") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path}: cannot be read as a settings file: {error}") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or one_line(error)
        raise SetupError(f"{path}:{line} no valid YAML: {problem}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SetupError(f"{path}: expected lines of the form 'name: value', got {content!r}.")
    for key in content:
        if key not in FIELDS:
            raise SetupError(f"{path}: unknown setting {key!r}{nearest(str(key), FIELDS)}")
    given = {key: value for key, value in content.items() if value is not None}
    return _parse(f"{path}: ", lambda: parser.parse_object(given, defaults=False))


def _environment(parser: jsonargparse.ArgumentParser, environ: Mapping[str, str]) -> dict[str, Any]:
    """Reads the ``CTL_*`` variables, each on its own so that a complaint can name it."""
    layer: dict[str, Any] = {}
    for name, value in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        key = name[len(ENV_PREFIX) :].lower()
        if key not in _KEYS:
            known = [ENV_PREFIX + known.upper() for known in _KEYS]
            raise SetupError(f"unknown setting {name} in the environment{nearest(name, known)}")
        layer |= _parse(
            f"{name}: ",
            lambda one={name: value}: parser.parse_env(one, defaults=False),  # type: ignore[misc]
        )
    return layer


def _merge(layers: Sequence[Mapping[str, Any]]) -> Config:
    """Lays the later values over the earlier ones; hparams are merged name by name.

    ``--epochs 3`` over ``steps: 600`` in the file means three epochs, not a conflict.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if one in layer and other not in layer:
                merged.pop(other, None)
        hparams = {**merged.get("hparams", {}), **layer.get("hparams", {})}
        merged |= layer
        merged["hparams"] = hparams
    return Config(**merged)


def write_config(config: Config, path: Path) -> None:
    """Writes the settings as resolved, whole or not at all."""
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
