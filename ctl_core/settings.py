"""Settings: defaults < config.yaml < ``CTL_*`` environment variables < flags.

jsonargparse reads the values and checks their types; ranges and combinations are checked in
``Config`` itself, so that a notebook gets the same answers. TensorFlow is not imported here: a
misspelt flag is answered at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import jsonargparse
import yaml

from ctl_core.errors import SetupError, one_line

ENV_PREFIX = "CTL_"
_STRATEGIES = Literal["auto", "one_device", "mirrored", "multi_worker"]
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# With one slash, as pathlib writes it; a scheme of one letter is a drive.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class _Loader(yaml.SafeLoader):
    """Reads YAML in which 1e-3 is a number, as flags have it; to PyYAML it is a text."""


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads back as it was."""


for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*\.?|\.[0-9])[0-9_]*[eE][-+]?[0-9]+\Z"),
        list("-+.0123456789"),
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run, each with what ``--help`` says of it.

    The help is no docstring, of which Python 3.13 strips the indentation and -OO leaves nothing.
    """

    steps: Annotated[
        int | None, "train until this step, counted from the start of the run, not of the process"
    ] = None
    epochs: Annotated[
        int | None, "the same in passes over the training data (give steps or epochs)"
    ] = None
    batch_size: Annotated[int, "global batch size, shared out evenly over the replicas"] = 64
    accumulate_steps: Annotated[
        int, "micro-batches that an update is made of, to save memory, not time"
    ] = 1
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"],
        "what Keras layers compute in; weights and updates stay float32",
    ] = "float32"
    jit_compile: Annotated[
        bool, "compile each replica's forward and backward pass with XLA; may help on GPUs"
    ] = False
    on_nan: Annotated[
        Literal["stop", "warn", "ignore"],
        "at a NaN or infinite loss; warn: exit code 1 if the last one is; stop: at the first, with "
        "exit code 1",
    ] = "warn"
    learning_rate: Annotated[
        float, "initial value of lr; on resume, a changed value replaces the current one"
    ] = 0.001
    seed: Annotated[int, "seeds Python, NumPy, TensorFlow and Keras"] = 0
    run_name: Annotated[
        str | None, "folder of the run inside runs_dir; an existing one resumes; default: the time"
    ] = None
    ckpt_every: Annotated[int, "save a checkpoint every so many steps (0: only at the end)"] = 1000
    eval_every: Annotated[int, "evaluate every so many steps (0: only at the end)"] = 1000
    strategy: Annotated[
        _STRATEGIES,
        "auto joins the cluster of TF_CONFIG; else it takes all GPUs, or the one device",
    ] = "auto"
    virtual_devices: Annotated[
        int, "split the CPU into so many devices, to try multi-GPU code on a laptop"
    ] = 1
    workers: Annotated[int, "start a cluster of so many processes on this machine"] = 1
    max_restarts: Annotated[
        int, "how often a cluster is started again after a crash of one of its workers"
    ] = 3
    max_chunk: Annotated[int, "most steps inside one graph call"] = 1000
    deterministic: Annotated[
        bool, "bit-identical results from run to run (op determinism), slower"
    ] = False
    profile: Annotated[
        str | None, "START:STOP profiles the steps after START up to STOP, for TensorBoard"
    ] = None
    runs_dir: Annotated[str, "folder that holds the runs"] = "runs"
    debug: Annotated[bool, "show tracebacks and TensorFlow's own messages on the console"] = False
    hparams: Annotated[dict[str, Any], "free values of your own; hooks get them as hparams"] = (
        dataclasses.field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        """Checks types, ranges and combinations; numbers of NumPy become Python's.

        Raises:
            SetupError: a value is impossible; the message names setting, value and range.
        """
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and getattr(Config, name) is None:
                continue
            number = _whole(value)
            if number is None:
                raise SetupError(f"{name}: expected a whole number, got {value!r}.")
            if not least <= number < _TOO_MUCH[name]:
                above = f" and below 2**{int(math.log2(_TOO_MUCH[name]))}" * (number >= least)
                raise SetupError(
                    f"{name}: expected a whole number from {least} up{above}, got {number}."
                )
            object.__setattr__(self, name, number)
        rate = self.learning_rate
        if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or not 0 < rate < 1e30:
            raise SetupError(f"learning_rate: expected a number above 0, got {rate!r}.")
        object.__setattr__(self, "learning_rate", float(rate))
        for name in ("jit_compile", "deterministic", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise SetupError(f"{name}: expected true or false, got {getattr(self, name)!r}.")
        if self.steps is not None and self.epochs is not None:
            raise SetupError(
                f"steps and epochs: give one of the two, got steps={self.steps} and "
                f"epochs={self.epochs}."
            )
        if self.strategy not in get_args(_STRATEGIES):
            raise SetupError(
                f"strategy: expected one of {', '.join(get_args(_STRATEGIES))}, got "
                f"{self.strategy!r}."
            )
        if self.precision not in ("float32", "bfloat16", "float16"):
            raise SetupError(
                f"precision: expected float32, bfloat16 or float16, got {self.precision!r}."
            )
        if self.on_nan not in ("stop", "warn", "ignore"):
            raise SetupError(f"on_nan: expected stop, warn or ignore, got {self.on_nan!r}.")
        if self.strategy == "one_device" and self.virtual_devices > 1:
            raise SetupError(
                f"strategy: one_device uses one device, but virtual_devices is "
                f"{self.virtual_devices}; leave one of them out."
            )
        if self.workers > 1 and self.strategy in ("one_device", "mirrored"):
            raise SetupError(
                f"strategy: {self.strategy} trains in one process, but workers is {self.workers}; "
                "leave one of them out."
            )
        if self.run_name is not None and not (
            isinstance(self.run_name, str) and _RUN_NAME.fullmatch(self.run_name)
        ):
            raise SetupError(
                f"run_name: expected a folder name of letters, digits, '.', '_' and '-' that "
                f"starts with a letter or digit, got {self.run_name!r}."
            )
        if not isinstance(self.runs_dir, str | os.PathLike) or not str(self.runs_dir).strip():
            raise SetupError(f"runs_dir: expected the name of a folder, got {self.runs_dir!r}.")
        object.__setattr__(self, "runs_dir", _expect_path("runs_dir", str(self.runs_dir)))
        _ = self.profile_steps
        self._check_hparams()

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """The steps to profile: after the first up to the second; None for none.

        Raises:
            SetupError: ``profile`` names no such steps.
        """
        if self.profile is None:
            return None
        found = re.fullmatch(r"(\d+):(\d+)", str(self.profile))
        if found is None or int(found[1]) >= int(found[2]):
            raise SetupError(
                f"profile: expected START:STOP, two step numbers of which the first is lower, such "
                f"as 50:60, got {self.profile!r}."
            )
        return int(found[1]), int(found[2])

    def _check_hparams(self) -> None:
        if not isinstance(self.hparams, dict):
            raise SetupError(f"hparams: expected names with values, got {self.hparams!r}.")
        for name, value in self.hparams.items():
            try:
                read = yaml.load(yaml.dump({name: value}, Dumper=_Dumper), Loader=_Loader)
            except yaml.YAMLError:
                read = None
            if not isinstance(name, str) or read is None:
                raise SetupError(
                    f"hparams: {name!r} has the value {one_line(repr(value), 60)}; expected a name "
                    "with numbers, texts, true, false, null, or lists and dicts of these."
                )


def _expect_path(name: str, value: str) -> str:
    """Returns a path as it is.

    Raises:
        SetupError: it is a URL; where that leads, there are no locks and no renames.
    """
    if _URL.match(value):
        raise SetupError(
            f"{name}: expected a path in the file system, got the URL {value!r}; take a local path "
            "and copy the files, or mount what the URL names (gcsfuse does so for gs://) and give "
            "the path."
        )
    return value


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


# The lowest value that each whole number may take.
_LEAST = {
    "steps": 0,
    "epochs": 0,
    "batch_size": 1,
    "accumulate_steps": 1,
    "seed": 0,
    "ckpt_every": 0,
    "eval_every": 0,
    "virtual_devices": 1,
    "workers": 1,
    "max_restarts": 0,
    "max_chunk": 1,
}
_TOO_MUCH = {**dict.fromkeys(_LEAST, 2**63), "seed": 2**32, "workers": 2**10}
FIELDS = tuple(field.name for field in dataclasses.fields(Config))


def nearest(name: str, names: Iterable[str], mark: str = "") -> str:
    """Returns ``"; did you mean 'x'?"`` for the nearest of ``names``, or an empty string.

    ``mark`` is put before it, and is no part of what is compared.
    """
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean '{mark}{close[0]}'?" if close else ""


def load_config(path: str | Path, **overrides: Any) -> Config:
    """Reads a config file, with keyword arguments on top: the settings for ``ctl_core.train``.

    Raises:
        SetupError: the file is missing or wrong, or a setting is.
    """
    parser = _parser("train")
    file = _read_file(parser, Path(path), required=True)
    for name in overrides:
        if name not in FIELDS:
            raise SetupError(f"unknown setting {name!r}{nearest(name, FIELDS)}")
    return _merge([file, overrides])


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
    "train": {"continue": (bool, "train on in a run that a hook has ended (StopTraining)")},
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
    name = argv[0]
    parser = _parser(name)
    flags, hparams = _split_hparams(argv[1:])
    given = _parse("", lambda: parser.parse_args(flags, defaults=False, env=False), name)
    if hparams:
        given["hparams"] = hparams
    env = _environment(parser, environ)
    named = given.pop("config", env.get("config"))
    env.pop("config", None)
    path = Path(_expect_path("config", named or "config.yaml"))
    if name != "train" and named is None:
        near = {**_read_file(parser, path, required=False), **env, **given}
        runs_dir = _expect_path("runs_dir", near.get("runs_dir", Config.runs_dir))
        run = find_run(Path(runs_dir), near.get("run_name"))
        given.update(run_name=run.name, runs_dir=str(run.parent))
        path = run / "config.yaml"
    file = _read_file(parser, path, required=named is not None)
    if name != "train":
        file.pop("debug", None)  # how a run was watched says nothing about how it is used
    layers = [file, env, given]
    if name != "train":  # a trained run is used in one process
        for layer in layers:
            layer.pop("workers", None)
    options: dict[str, Any] = dict.fromkeys(OPTIONS[name])
    for layer in layers:
        options.update({key: layer.pop(key) for key in options if key in layer})
    for key in ("input", "output"):
        _expect_path(key, options.get(key) or "")
    return Command(name, _merge(layers), options)


def _split_hparams(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes the flags for hparams out; ``--hparams.a.b 3`` is {a: {b: 3}}.

    Returns:
        The other flags, and the values.
    """
    others: list[str] = []
    found: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        names = flag.split(".")[1:]
        if flag.split(".")[0] != "--hparams":
            others.append(word)
            continue
        if not equals:
            value = next(words, "--")
        if not all(names) or (not equals and value.startswith("--")):
            raise SetupError(f"{flag}: expected a name and a value: --hparams.width 64.")
        read = _read_value(value)
        for name in reversed(names):
            read = {name: read}
        found = _nested(found, _expect_names(f"{flag}: ", read))
    return others, found


def _read_value(text: str) -> Any:
    """Reads the value of a flag or variable as YAML; what is none is a text."""
    try:
        return yaml.load(text, Loader=_Loader) if text else text
    except yaml.YAMLError:
        return text


def _expect_names(where: str, hparams: Any) -> dict[str, Any]:
    if isinstance(hparams, dict):
        return hparams
    raise SetupError(f"{where}expected names with values, got {hparams!r}.")


def _nested(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lays one dict over another, name by name, also in the dicts within."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        both = isinstance(value, dict) and isinstance(below, dict)
        merged[name] = _nested(below, value) if both else value  # type: ignore[arg-type]
    return merged


def free_name(runs_dir: Path) -> str:
    """Returns the time as a name for a run; with a number behind it if that second is taken."""
    name = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while (runs_dir / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return name if number == 1 else f"{name}-{number}"


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
        if kind is bool:
            yes_no = jsonargparse.ActionYesNo(no_prefix="no-")
            parser.add_argument(f"--{key}", action=yes_no, default=False, help=text)
        else:
            parser.add_argument(f"--{key}", type=kind, help=text)
    parser.add_argument(
        "--config", type=str, metavar="FILE", help="settings file (default: config.yaml)"
    )
    hints = get_type_hints(Config, include_extras=True)
    for field in dataclasses.fields(Config):
        flag, kind = "--" + field.name.replace("_", "-"), _TYPES[field.name]
        text = hints[field.name].__metadata__[0]
        if kind is bool:
            yes_no = jsonargparse.ActionYesNo(no_prefix="no-")
            parser.add_argument(flag, action=yes_no, default=field.default, help=text)
        elif field.name == "hparams":
            text += "; as a flag: --hparams.width 64"
            parser.add_argument(flag, type=dict[str, Any], default={}, help=text)
        else:
            parser.add_argument(flag, type=kind, default=field.default, help=text)
    return parser


def _kind(field: dataclasses.Field[Any]) -> Any:
    """Returns a field's type without ``None``: in a file or flag, nothing is said by absence."""
    hint = get_type_hints(Config)[field.name]
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return hint if get_origin(hint) in (Literal, dict) or not kinds else kinds[0]


_TYPES = {field.name: _kind(field) for field in dataclasses.fields(Config)}
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text (in quotes, if it looks like a number)",
}


def _parse(
    where: str, parse: Callable[[], jsonargparse.Namespace], command: str = "train"
) -> dict[str, Any]:
    """Runs one of the parser's methods and turns its complaint into one line.

    ``where`` names the setting, unless the parser reads flags and names it itself.
    """
    try:
        return dict(parse().as_dict())
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise SetupError(where + _plain(one_line(error), bool(where), command)) from error


def _plain(line: str, named: bool, command: str) -> str:
    """Keeps what a user needs of a jsonargparse message: the setting, the value, the type."""
    if unknown := re.search(r"[Uu]nrecognized arguments: (\S+)", line):
        flag = unknown.group(1).split("=")[0]
        if not flag.startswith("-"):
            return f"unexpected word {flag!r}: settings are given as --name value."
        names = [name.replace("_", "-") for name in (*_KEYS, *OPTIONS[command])]
        return f"unknown setting {flag}{nearest(flag.strip('-').replace('_', '-'), names, '--')}"
    if flag_alone := re.search(r"argument (--\S+): expected one argument", line):
        return f"{flag_alone.group(1)}: expected a value after it."
    if yes_no := re.search(r"argument (--[\w-]+)\S*: ignored explicit argument", line):
        return f"{yes_no.group(1)} takes no value; the opposite is --no-{yes_no.group(1)[2:]}."
    key = re.search(r"""[Kk]ey "(\w+)""", line)
    value = re.search(r"(?:(?:Got|Given) value:|Value not boolean:) ?(.*?)\.?$", line)
    if not key and not (named and value):
        return line
    kinds = {**_TYPES, **{name: kind for name, (kind, _) in OPTIONS[command].items()}}
    kind = kinds.get(key.group(1), str) if key else bool
    expected = _WORDS.get(kind) or f"one of {', '.join(get_args(kind))}"
    setting = f"{key.group(1)}: " if key and not named else ""
    return f"{setting}expected {expected}" + (f", got {value.group(1)!r}." if value else ".")


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
        content = yaml.load(text, Loader=_Loader)
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
    layer: dict[str, Any] = {}
    for key, value in content.items():
        if key == "hparams":  # the parser would turn the text '3' into a number
            layer[key] = _expect_names(f"{path}: {key}: ", {} if value is None else value)
        elif value is not None:
            layer |= _parse(
                f"{path}: {key}: ",
                lambda one={key: value}: parser.parse_object(one, defaults=False),  # type: ignore[misc]
            )
    return layer


def _environment(parser: jsonargparse.ArgumentParser, environ: Mapping[str, str]) -> dict[str, Any]:
    """Reads the ``CTL_*`` variables; one that is empty says nothing."""
    layer: dict[str, Any] = {}
    for name, value in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or not value:
            continue
        key = name[len(ENV_PREFIX) :].lower()
        if key not in _KEYS:
            hint = nearest(key.upper(), [known.upper() for known in _KEYS], ENV_PREFIX)
            raise SetupError(f"unknown setting {name} in the environment{hint}")
        if _TYPES.get(key) is bool:  # what others write for a switch
            value = {"0": "false", "1": "true"}.get(value, value)
        if key == "hparams":
            layer[key] = _expect_names(f"{name}: ", _read_value(value))
            continue
        layer |= _parse(
            f"{name}: ",
            lambda one={name: value}: parser.parse_env(one, defaults=False),  # type: ignore[misc]
        )
    return layer


def _merge(layers: Sequence[Mapping[str, Any]]) -> Config:
    """Lays the later values over the earlier ones; hparams are merged name by name, at any depth.

    ``--epochs 3`` over ``steps: 600`` in the file means three epochs, not a conflict.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if one in layer and other not in layer:
                merged.pop(other, None)
        below, over = merged.get("hparams", {}), layer.get("hparams", {})
        merged |= layer
        merged["hparams"] = _nested(below, over) if isinstance(over, dict) else over
    return Config(**merged)


def write_config(config: Config, path: Path) -> None:
    """Writes the settings as resolved, whole or not at all."""
    text = yaml.dump(
        dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    try:
        beside.replace(path)
    except OSError:
        beside.unlink()
        raise
