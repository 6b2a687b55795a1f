"""What a command line says: the command, its own options, and the settings.

Settings come from the defaults, then config.yaml, then ``CTL_*`` environment variables, then flags.
A run that is there already has its own config.yaml, which takes the place of the project's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from ctl_core.callbacks_file import DEFAULT
from ctl_core.cluster.place import is_placed
from ctl_core.errors import PeerLost, SetupError, one_line
from ctl_core.files import from_here
from ctl_core.layers import (
    ENV_PREFIX,
    Layer,
    Word,
    checked,
    environment,
    flat,
    laid_over,
    merge,
    read_file,
    read_text,
    read_value,
)
from ctl_core.run_process import read_process
from ctl_core.settings import (
    RENAMED,
    SETTINGS,
    STRICT,
    Config,
    Folder,
    check_path,
    declare,
    explain,
    kind_of,
    label,
    nearest,
    shown,
)
from ctl_core.sources import read_source
from ctl_core.unbegun import look, words_of


@dataclasses.dataclass(frozen=True)
class Command:
    """A parsed command line.

    Attributes:
        name: of the command
        config: the settings
        options: what only this command has
        notes: lines for the user on what was read
        run: the folder of the run that is there already, if one is
        trained_with: the setting ``callbacks`` in that run's own config.yaml
        given: the flags for settings, those of ``taken_over`` included
        taken_over: of these, those of an earlier start of a run that has not begun
    """

    name: str
    config: Config
    options: Mapping[str, Any]
    notes: Sequence[str] = ()
    run: Path | None = None
    trained_with: str = DEFAULT
    given: Sequence[str] = ()
    taken_over: Sequence[str] = ()


_File = Annotated[
    str | None,
    AfterValidator(lambda path: path if path is None else os.path.abspath(check_path(path))),
    Field(title="the name of a file or folder"),
]
_Files = Annotated[list[Folder] | None, Field(title="the name of a file")]


def _check_step(step: Any) -> Any:
    if isinstance(step, int) and not 0 <= step < 2**63:
        raise ValueError
    return step


_Checkpoint = Annotated[int | Literal["best"] | None, AfterValidator(_check_step)]
# Options that belong to one command and are no settings of a run: name -> (type, default and help).
_CHECKPOINT: dict[str, Any] = {
    "checkpoint": (
        _Checkpoint,
        declare(
            None,
            "step of the checkpoint to take, or best for the one of keep_best; default: the newest",
            title="a step, a whole number from 0 up, or best",
        ),
    )
}
# What may follow a training, by --then.
FOLLOWING = ("evaluate", "predict", "export")


def _check_then(text: Any) -> Any:
    names = text.split(",") if text is not None else []
    if len(set(names)) < len(names) or not set(names) <= set(FOLLOWING):
        raise ValueError
    return text


_Then = Annotated[str | None, AfterValidator(_check_then)]
_THEN = declare(
    None,
    "commands that follow a training which has come to its end, on its last checkpoint, such as "
    "evaluate,export; the first that fails ends it, with its exit code",
    title=f"one or several of {', '.join(FOLLOWING)}, each once, with commas between them",
    examples=["COMMANDS"],
)
_CONTINUE = declare(False, "train on in a run that a hook has ended (StopTraining)")
_CHECK = declare(
    False,
    "try everything once, in a temporary folder: two steps, every host hook, an evaluation of one "
    "batch, a checkpoint; hooks that write files or call services do so; a run that is there is "
    "not touched",
)
_BACKGROUND = declare(
    False, "train in a process of its own, which goes on when the terminal is closed"
)
_TENSORBOARD = declare(
    False,
    "start TensorBoard on all runs beside the training, and end it with that; keep: when training "
    "has come to its end, it goes on until Ctrl-C",
    title="true, false or keep",
)
_NOTE = declare(
    None,
    "what you expect of the run: begins its entry in training_log.md, which its end completes",
    title="a text",
)
_INPUT = declare(
    None,
    "a .npy file with what clients send, a .npz file with one array per named input, or a .csv, "
    ".tsv or .parquet file with a column for each; default: the data of create_eval_dataset",
)
_OUTPUT = declare(
    None,
    "the .npz file to write; default: predictions.npz in the run folder, of an --input "
    "x.npy predictions-x.npz there",
)
_EXPORT = declare(
    None,
    "savedmodel: the folder that versions 1, 2, ... are written into, default: export in the run "
    "folder; other formats: the file to write, default: model.keras and so on in the run folder",
)
_FORMAT = declare(
    "savedmodel",
    "savedmodel: for TensorFlow Serving, with what comes before the model; tflite and onnx: the "
    "same in one file; keras: a Keras model alone",
)
_DATASET = declare(
    None, "which set to take, if create_eval_dataset returns several by name", title="a text"
)
_WATCH = declare(
    False,
    "follow a run that another process trains: evaluate each checkpoint as it comes, and write the "
    "values to watch.jsonl and tb/watch in the run folder, until the run has ended",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "train": {
        "continue": (bool, _CONTINUE),
        "check": (bool, _CHECK),
        "then": (_Then, _THEN),
        "background": (bool, _BACKGROUND),
        "tensorboard": (bool | Literal["keep"], _TENSORBOARD),
        "note": (str | None, _NOTE),
    },
    "evaluate": {**_CHECKPOINT, "watch": (bool, _WATCH)},
    "predict": {
        **_CHECKPOINT,
        "input": (_File, _INPUT),
        "dataset": (str | None, _DATASET),
        "output": (_File, _OUTPUT),
    },
    "export": {
        **_CHECKPOINT,
        "format": (Literal["savedmodel", "keras", "tflite", "onnx"], _FORMAT),
        "output": (_File, _EXPORT),
    },
}
# What says how a run is watched, and where its processes are; the run does not keep these.
_OF_A_START = ("debug", "cluster", "wait_for_workers")
# What is known of a command before the settings of its run are.
_FIRST = ("run_name", "runs_dir", "fork", "cluster", "strategy")
# How long evaluate --watch waits for a run to begin (seconds).
BEGINNING = 30.0
_CONFIG = declare(
    None,
    "settings file, before the run's own; may be repeated: a later one goes before; default: "
    "config.yaml",
)
COMMANDS = {
    "train": "train, or resume a run",
    "evaluate": "evaluate a run's checkpoint",
    "predict": "write a run's predictions to a file",
    "export": "write a run's model for others to use",
    "tfrecords": "write images or tables as TFRecord files",
    "hooks": "print the table of hooks",
    "runs": "list the runs: state, step, metrics, age",
    "stop": "stop a run, which is saved",
    "logs": "print what a run has said, -f as it goes on",
    "sweep": "search settings by many runs",
    "compare": "compare runs: last values, settings that differ",
    "plot": "plot what runs have measured, here or into a file",
    "track": "log a run to trackers afterwards",
}


def parse_command(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Command:
    """Parses ``<command> [flags]``, where the command is one of ``OPTIONS``.

    Of a command that uses a run, a word before the flags is its name.

    A run that is there has its own config.yaml, as resolved when it was trained last, in place of
    the project's; files named by ``--config`` go before it. Only what says how a run is watched and
    where this process runs is the project's, and in a cluster ``workers`` is left to that.

    Raises:
        SetupError: anything is unknown, of the wrong type, out of range or missing.
        SystemExit: ``--help`` was asked for and printed.
    """
    command, word = argv[0], ""
    if command != "train" and argv[1:] and not argv[1].startswith("-"):
        word = argv[1]
        argv = [command, f"--run-name={word}", *argv[2:]]
    options = _options(command)
    env, named = environment(environ)
    flags = _flags(command, argv[1:])
    if word and flags["run_name"][1] != word:
        other = shown(flags["run_name"][1])
        raise SetupError(f"run_name: name one run, not both {shown(word)} and {other}.")
    chosen = {key: flags.pop(key)[1] for key in options.model_fields if key in flags}
    try:
        values = options(**{"config": named, **chosen}).model_dump()
    except ValidationError as error:
        raise SetupError(explain(error, options.model_fields)) from error
    named = values.pop("config")
    if values.get("then") and values["check"]:
        raise SetupError("then: a check trains nothing that a command could use; leave one out.")
    for name in ("background", "tensorboard", "note") if values.get("check") else ():
        if values[name]:
            raise SetupError(f"{name}: a check is no run; leave one out.")
    if values.get("background") and values["tensorboard"] == "keep":
        raise SetupError(
            "tensorboard: keep waits for Ctrl-C, which a training in the background does not hear; "
            "leave one out."
        )
    files = [read_file(Path(path), required=bool(named)) for path in named or ["config.yaml"]]
    project = files
    place: Layer = {}
    for layer in (*files, env, flags):
        place |= {key: layer[key] for key in _FIRST if key in layer}
    near = checked(place)
    notes = [
        f"{where} is called {name} now."
        for layer in (*files, env, flags)
        for name, (where, _) in layer.items()
        if name in RENAMED.values() and name not in where.lower().replace("-", "_")
    ]
    if command != "train":
        waits = BEGINNING if values.get("watch") and near.run_name is not None else 0
        run: Path | None = find_run(Path(near.runs_dir), near.run_name, waits)
    else:
        run = Path(near.runs_dir, near.run_name) if near.run_name else None
    trained_with = DEFAULT
    given = _given(command, argv[1:]) if command == "train" else []
    if run is not None and not os.path.isfile(run / "config.yaml"):
        taken, said = look(run, given)
        if taken:
            again = parse_command([*argv, *taken], environ)
            return dataclasses.replace(again, notes=[said, *again.notes], taken_over=taken)
        notes += [said] * bool(said)
        run = None
    if run is not None:
        own = read_file(run / "config.yaml")
        trained_with = str(own.get("callbacks", ("", DEFAULT))[1])
        if is_placed(near, environ):
            own.pop("workers", None)
        own = _of_this_start(own, files[-1])
        if command == "train" and not named and (differ := _differ(own, files[0], env | flags)):
            notes.append(
                f"{label(from_here(run))}: has its own settings: {differ}; "
                "--config config.yaml takes those of the file."
            )
        files = [own, *(files if named else ())]
        flags |= {"run_name": ("run_name", run.name), "runs_dir": ("runs_dir", str(run.parent))}
    elif command == "train" and (source := _forked(place | {"runs_dir": ("", near.runs_dir)})):
        own = read_file(source / "config.yaml")
        trained_with = str(own.get("callbacks", ("", DEFAULT))[1])
        for name in ("workers", "run_name", "runs_dir", "fork", "init_from", "init_partial"):
            own.pop(name, None)
        own = _of_this_start(own, files[-1])
        if not named and (differ := _differ(own, files[0], env | flags)):
            notes.append(
                f"fork: goes on with the settings of {label(from_here(source))}: {differ}; "
                "--config config.yaml takes those of the file."
            )
        files = [own, *(files if named else ())]
    if command != "train":  # a trained run is used in one process, whatever trained it
        several = {key: flags[key] for key in flags if key == "workers"}
        if command != "predict" and checked(several).workers > 1:
            raise SetupError(f"workers: {command} uses a run in one process; leave it out.")
        for layer in (*files, env, flags):
            layer.pop("workers", None)
        flags |= several if command == "predict" else {}
    config = merge(files, [env, flags], (named or ["config.yaml"])[-1], project)
    config = dataclasses.replace(config, callbacks=from_here(config.callbacks))
    return Command(command, config, values, notes, run, trained_with, given)


def _of_this_start(own: Layer, project: Layer) -> Layer:
    """Returns a run's own settings with the project's of what is of a start, not of the run."""
    kept = {name: value for name, value in own.items() if name not in _OF_A_START}
    return kept | {name: project[name] for name in _OF_A_START if name in project}


def _forked(place: Layer) -> Path | None:
    """Returns the folder of the run that another begins from, if it does and is there."""
    text, runs_dir = (place.get(name, ("", None))[1] for name in ("fork", "runs_dir"))
    with contextlib.suppress(SetupError):  # training says that there is none
        folder = read_source("fork", text, runs_dir).run if text is not None else None
        if folder is not None and (folder / "config.yaml").is_file():
            return folder
    return None


def _differ(own: Layer, project: Layer, above: Layer) -> str:
    """Says what a run and config.yaml have otherwise, and neither variable nor flag says."""
    if "steps" in above or "epochs" in above:
        above = above | dict.fromkeys(("steps", "epochs"), ("", None))
    before, after, known = (
        flat({name: value for name, (_, value) in layer.items()}) for layer in (own, project, above)
    )
    before = dataclasses.asdict(Config()) | before  # an earlier engine did not have them all
    if "callbacks" in after:
        after["callbacks"] = from_here(str(after["callbacks"]))
    found = [
        f"{name} {shown(before.get(name), 30)} (config.yaml: {shown(value, 30)})"
        for name, value in after.items()
        if name not in (*known, "run_name", "runs_dir") and before.get(name) != value
    ]
    return ", ".join(found[:3]) + f" and {len(found) - 3} more" * (len(found) > 3)


def as_evaluator(command: Command) -> Command:
    """Returns the command of an evaluator in the cluster of a training: ``evaluate --watch``.

    Waits for the run to begin.

    Raises:
        SetupError: the run has no name.
        PeerLost: no run has begun after ``wait_for_workers`` seconds.
    """
    config = command.config
    if config.run_name is None:
        raise SetupError("run_name: a cluster needs one, the same for each of its processes.")
    try:
        run = find_run(Path(config.runs_dir), config.run_name, config.wait_for_workers)
    except SetupError as error:
        raise PeerLost(
            f"wait_for_workers: after {config.wait_for_workers} s, there is no run to evaluate: "
            f"{error}"
        ) from None
    options = default_options("evaluate") | {"watch": True}
    config = dataclasses.replace(config, workers=1)
    return dataclasses.replace(command, name="evaluate", config=config, options=options, run=run)


def find_run(runs_dir: Path, run_name: str | None, waits: float = 0) -> Path:
    """Returns the folder of a run that was trained before; without a name, the newest.

    Args:
        runs_dir: the folder of the runs
        run_name: one's name
        waits: how long it may be about to begin (seconds)

    Raises:
        SetupError: there is no such run.
    """
    end = time.monotonic() + waits
    while waits and run_name and not (runs_dir / run_name / "config.yaml").is_file():
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    runs = [path.parent for path in runs_dir.glob("*/config.yaml")]
    if run_name and runs_dir / run_name not in runs and read_process(runs_dir / run_name):
        raise SetupError(
            f"run_name: {label(from_here(runs_dir / run_name))} has not begun yet, so that there "
            f"is nothing to use; python -m ctl_core logs {run_name} says how it went."
        )
    if not runs:
        raise SetupError(f"{label(from_here(runs_dir))}: no run there yet; train one first.")
    if run_name is None:
        return max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime)
    for run in runs:
        if run.name == run_name:
            return run
    names = sorted(run.name for run in runs)
    where = label(from_here(runs_dir))
    raise SetupError(
        f"run_name: no run {shown(run_name)} in {where}{nearest(run_name, names)} "
        f"(there: {one_line(', '.join(names), 100)})"
    )


def default_options(command: str) -> dict[str, Any]:
    """Returns the options of a command as they are where no flag says otherwise."""
    values = _options(command)().model_dump()
    return {name: value for name, value in values.items() if name != "config"}


@functools.cache
def _options(command: str) -> type[BaseModel]:
    """Builds what checks a command's own options, and ``--config``."""
    fields: dict[str, Any] = {"config": (_Files, _CONFIG), **OPTIONS[command]}
    return create_model(command, __config__=STRICT, **fields)


@functools.cache
def _parser(command: str) -> argparse.ArgumentParser:
    """Builds the parser of one command: its own options, ``--config`` and every setting."""
    parser = argparse.ArgumentParser(
        prog=f"python -m ctl_core {command}" + " [NAME]" * (command != "train"),
        description=f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}"
        + ", that of the name, or else the newest" * (command != "train")
        + ". Settings come from "
        "the defaults, then config.yaml, or the run's own where it is there already, then the "
        f"environment ({ENV_PREFIX}BATCH_SIZE=32), then these flags.",
        exit_on_error=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, setting in (_options(command).model_fields | dict(SETTINGS)).items():
        kind, flag = kind_of(setting), "--" + name.replace("_", "-")
        default = json.dumps(setting.get_default(call_default_factory=True)).strip('"')
        text = f"{setting.description} (default: {default})".replace("%", "%%")
        if kind is bool:
            words = [word for part in get_args(setting.annotation) for word in get_args(part)]
            more: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            if words:
                more = {"action": _Switch, "nargs": "?", "metavar": "|".join(words)}
            names = [flag, f"--no-{flag[2:]}"] if words else [flag]
            parser.add_argument(*names, dest=name, help=text, **more)
            continue
        choices = f"{{{','.join(map(str, get_args(setting.annotation)))}}}"
        metavar = {int: "N", float: "X", Literal: choices, list: "FILE"}.get(kind, "TEXT")
        metavar = (setting.examples or [metavar])[0]
        action = "append" if kind is list else "store"
        parser.add_argument(flag, action=action, dest=name, metavar=metavar, help=text)
    return parser


class _Switch(argparse.Action):
    """``--name``, ``--no-name``, or ``--name word`` where a setting has a word beside these."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Keeps the word, or which of the two it is."""
        off = str(option_string).startswith("--no-")
        setattr(namespace, self.dest, f"{option_string} {values}" if off and values else values)
        if not values:
            setattr(namespace, self.dest, "false" if off else "true")


def _flags(command: str, argv: Sequence[str]) -> Layer:
    """Reads the flags, of settings and of the command's options.

    Raises:
        SetupError: one is unknown, or lacks its value.
    """
    words, hparams = _split_hparams(argv)
    old = {f"--{name.replace('_', '-')}": new for name, new in RENAMED.items()}
    renamed = [word for word in words if word.partition("=")[0] in old]
    for word in renamed:
        flag, equals, text = word.partition("=")
        words[words.index(word)] = f"--{old[flag].replace('_', '-')}{equals}{text}"
    settings = _options(command).model_fields | dict(SETTINGS)
    try:
        found, others = _parser(command).parse_known_args(words)
    except argparse.ArgumentError as error:
        flag, _, opposite = str(error.argument_name).partition("/")
        wrong = f" takes no value; the opposite is {opposite}." if opposite else None
        raise SetupError(f"{flag}{wrong or ': expected a value after it.'}") from error
    for word in others:
        flag = label(word.partition("=")[0])
        if not flag.startswith("-"):
            name = f"a run as {'--run-name NAME' if command == 'train' else f'{command} NAME'}"
            raise SetupError(
                f"unexpected word {shown(word)}: settings are given as --name value, {name}."
            )
        names = [name.replace("_", "-") for name in settings]
        near = nearest(flag.strip("-").replace("_", "-"), names, "--")
        raise SetupError(f"unknown setting {flag}{near}")
    layer = {name: (name, read_text(settings[name], text)) for name, text in vars(found).items()}
    for word in renamed:
        flag = word.partition("=")[0]
        layer[old[flag]] = (flag, layer[old[flag]][1])
    return layer | ({"hparams": ("--hparams", hparams)} if hparams else {})


def _given(command: str, argv: Sequence[str]) -> list[str]:
    """Returns the flags that say settings, or name files of them, in one form and order."""
    words, hparams = _split_hparams(argv)
    found, _ = _parser(command).parse_known_args(words)
    return words_of(vars(found), hparams)


def _split_hparams(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes the flags for hparams out; ``--hparams.a.b 3`` is {a: {b: 3}}.

    Returns:
        The other flags, and the values.
    """
    others: list[str] = []
    found: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        flag, equals, text = word.partition("=")
        first, *names = flag.split(".")
        if first != "--hparams":
            others.append(word)
            continue
        if not equals:
            text = next(words, "--")
        where = label(flag)
        if not all(names) or (not equals and text.startswith("--")):
            raise SetupError(f"{where}: expected a name and a value: --hparams.width 64.")
        read = read_value(text)
        value: Any = read if isinstance(read, dict) else Word(text)
        for name in reversed(names):
            read, value = {name: read}, {name: value}
        checked({"hparams": (where, read)})
        found = laid_over(found, value, "")
    return others, found
