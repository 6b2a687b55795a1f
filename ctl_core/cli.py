"""The command line: the commands, what each takes, and whose settings it means.

Settings come from the defaults, then config.yaml, then ``CTL_*`` environment variables, then flags.
A run that is there already has its own config.yaml, which takes the place of the project's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ValidationError, create_model
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from ctl_core.callbacks_file import DEFAULT
from ctl_core.cluster.rendezvous import LONGEST
from ctl_core.cluster.task import is_in_cluster
from ctl_core.errors import PeerLost, SetupError, one_line
from ctl_core.files import from_here
from ctl_core.layers import (
    ENV_PREFIX,
    Layer,
    flatten,
    lay_over,
    merge,
    read_environment,
    read_file,
    resolve,
)
from ctl_core.settings import (
    SETTINGS,
    Config,
    Count,
    check_path,
    declare,
    explain,
    label,
    nearest,
    shown,
)
from ctl_core.sources import read_source

_File = Annotated[
    str | None,
    AfterValidator(lambda path: None if path is None else os.path.abspath(check_path(path))),
]
_Checkpoint = Count | Literal["best"] | None
COMMANDS = {
    "train": "train, or resume a run",
    "evaluate": "evaluate a run's checkpoint",
    "predict": "write a run's predictions to a file",
    "export": "write a run's model for TensorFlow Serving",
    "hooks": "print the table of hooks",
}
_OPTIONS: dict[str, Any] = {
    "config": (list[str] | None, declare(None, "settings file, again for more; null: config.yaml")),
    "continue": (bool, declare(False, "train on where a hook has ended a run (StopTraining)")),
    "check": (bool, declare(False, "try everything once, in seconds and a temporary folder")),
    "note": (str | None, declare(None, "what you expect of the run, for training_log.md")),
    "checkpoint": (_Checkpoint, declare(None, "step, or best; null: the newest", "best")),
    "watch": (bool, declare(False, "evaluate each checkpoint of a run that is being trained")),
    "input": (_File, declare(None, "a .npy file, or a .npz file of named inputs")),
    "dataset": (str | None, declare(None, "which set, if create_eval_dataset has several")),
    "output": (_File, declare(None, "where to write; null: in the folder of the run")),
}
_OF_ALL = ("run_name", "runs_dir", "callbacks", "batch_size", "debug", "hparams")
# Of each command its own options, and the settings of a run that it takes.
FLAGS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "train": (("config", "continue", "check", "note"), tuple(SETTINGS)),
    "evaluate": (("config", "checkpoint", "watch"), (*_OF_ALL, "eval_batch_size", "limit_eval")),
    "predict": (("config", "checkpoint", "input", "dataset", "output"), _OF_ALL),
    "export": (("config", "checkpoint", "output"), _OF_ALL),
}
# What is known of a command before the settings of its run are.
_FIRST = ("run_name", "runs_dir", "fork")
# What a run does not take over from the one that it begins from.
_NOT_FORKED = ("workers", "run_name", "runs_dir", "fork", "init_from")
# How long evaluate --watch waits for a run to begin (seconds).
BEGINNING = 30.0


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
    """

    name: str
    config: Config
    options: Mapping[str, Any]
    notes: Sequence[str] = ()
    run: Path | None = None
    trained_with: str = DEFAULT


def parse_command(argv: Sequence[str]) -> Command:
    """Parses ``<command> [flags]``, where the command is one of ``FLAGS``.

    Of a command that uses a run, a word before the flags is its name.

    A run that is there has its own config.yaml, as resolved when it was trained last, in place of
    the project's; files named by ``--config`` go before it. Only ``debug`` is the project's.

    Raises:
        SetupError: anything is unknown, of the wrong type, out of range or missing.
        SystemExit: ``--help`` was asked for and printed.
    """
    command, *words = argv
    training = command == "train"
    if not training and words and not words[0].startswith("-"):
        words[0] = f"--run-name={words[0]}"
    flags, options = read_flags(command, words)
    if options.get("check") and options["note"]:
        raise SetupError("note: a check is no run; leave one out.")
    above = [read_environment(), flags]
    variable = os.environ.get(f"{ENV_PREFIX}CONFIG", "").split(os.pathsep)
    named = options.pop("config") or [path for path in variable if path]
    project = [read_file(Path(path), required=bool(named)) for path in named or ["config.yaml"]]
    near = resolve([layer.only(_FIRST) for layer in (*project, *above)])
    runs_dir, name = Path(near.runs_dir), near.run_name
    if not training:
        run: Path | None = find_run(runs_dir, name, BEGINNING if options.get("watch") else 0)
    else:
        run = runs_dir / name if name and (runs_dir / name / "config.yaml").is_file() else None
    source = run
    if training and source is None and near.fork:
        with contextlib.suppress(SetupError):  # training says that there is none
            source = read_source("fork", near.fork, near.runs_dir).run
    notes: list[str] = []
    files, trained_with = project, DEFAULT
    if source is not None:
        own = read_file(source / "config.yaml")
        if not own.values:
            raise SetupError(f"{label(from_here(source))}: config.yaml is empty; put it back.")
        trained_with = str(own.values.get("callbacks", DEFAULT))
        here = {"debug", *(_NOT_FORKED if run is None else ())}
        own = own.only(
            own.values.keys() - here - ({"workers"} if training and is_in_cluster() else set())
        )
        files = [*(layer.only(here) for layer in project), own, *(project if named else ())]
        if training and not named and (differ := _compare(own, project[0], above)):
            notes.append(
                f"{label(from_here(source))} goes on with its own settings: {differ}; "
                "--config config.yaml takes those of the file."
            )
    config = merge(files, above, project)
    if run is not None:
        config = dataclasses.replace(config, run_name=run.name, runs_dir=str(run.parent))
    if not training:
        config = dataclasses.replace(config, workers=1)  # whatever has trained it
    config = dataclasses.replace(config, callbacks=from_here(config.callbacks))
    return Command(command, config, options, notes, run, trained_with)


def read_flags(command: str, words: Sequence[str]) -> tuple[Layer, dict[str, Any]]:
    """Reads the flags of a command: settings, and its options.

    Raises:
        SetupError: one is unknown, lacks its value, or has a wrong one.
    """
    others, hparams = _split_hparams(words)
    options = {name: _OPTIONS[name] for name in FLAGS[command][0]}
    settings = {name: (SETTINGS[name].annotation, SETTINGS[name]) for name in FLAGS[command][1]}
    fields: dict[str, Any] = options | settings
    del fields["hparams"]
    source: Any = CliSettingsSource(
        create_model(command, __base__=BaseSettings, __doc__=_describe(command), **fields),
        cli_prog_name=f"python -m ctl_core {command}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        cli_parse_none_str="null",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
    )
    source.root_parser.usage = f"%(prog)s {'[NAME] ' * (command != 'train')}[--SETTING VALUE ...]"
    try:
        found = source(args=others)()
    except SettingsError as error:
        raise SetupError(_explain_flag(str(error), fields)) from error
    model = create_model(command, **options)
    try:
        chosen = model(**{name: found.pop(name) for name in options if name in found})
    except ValidationError as error:
        raise SetupError(explain(error, model.model_fields)) from error
    return Layer(found | ({"hparams": hparams} if hparams else {})), chosen.model_dump()


def _split_hparams(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes the flags for hparams out; ``--hparams.a.b 3`` is {a: {b: "3"}}."""
    others: list[str] = []
    hparams: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        if flag.split(".")[0] != "--hparams":
            others.append(word)
            continue
        value: Any = text if equals else next(rest, "--")
        if "." not in flag or (not equals and value.startswith("--")):
            raise SetupError(f"{label(flag)}: expected a name and a value: --hparams.width 64.")
        for name in reversed(flag.split(".")[1:]):
            value = {name: value}
        hparams = lay_over(hparams, value, "hparams")
    return others, hparams


def _describe(command: str) -> str:
    return (
        f"{COMMANDS[command].capitalize()}. Settings come from the defaults, then config.yaml, or "
        "the run's own where it is there already, then the environment "
        f"({ENV_PREFIX}BATCH_SIZE=32), then these flags; --hparams.NAME VALUE is one of yours."
    )


def _explain_flag(text: str, known: Iterable[str]) -> str:
    """Says in one line which flag is wrong, and which one may have been meant."""
    text = text.removeprefix("error parsing CLI: ")
    unknown = re.match(r"unrecognized arguments: (\S*)", text)
    if unknown is None:
        return one_line(text.replace("one argument", "a value after it"))
    flag = unknown[1].partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected word {shown(flag)}: settings are given as --name value."
    names = [name.replace("_", "-") for name in known]
    near = nearest(flag.strip("-").replace("_", "-"), names, "--")
    return f"unknown setting {label(flag)}{near}"


def _compare(own: Layer, project: Layer, above: Sequence[Layer]) -> str:
    """Says what a run and config.yaml have otherwise, and neither variable nor flag says."""
    said = {"debug", "run_name", "runs_dir"}.union(*(flatten(layer.values) for layer in above))
    before, after = flatten(own.values), flatten(project.values)
    if "callbacks" in after:
        after["callbacks"] = from_here(str(after["callbacks"]))
    found = [
        f"{name} {shown(before[name], 30)} (config.yaml: {shown(value, 30)})"
        for name, value in after.items()
        if name not in said and name in before and before[name] != value
    ]
    return ", ".join(found[:3]) + f" and {len(found) - 3} more" * (len(found) > 3)


def as_evaluator(command: Command) -> Command:
    """Returns the command of an evaluator in the cluster of a training: ``evaluate --watch``.

    Waits for the run to begin.

    Raises:
        PeerLost: none has begun after as long as workers wait for each other.
    """
    config = dataclasses.replace(command.config, workers=1)
    try:
        run = find_run(Path(config.runs_dir), config.run_name, LONGEST)
    except SetupError as error:
        raise PeerLost(f"after {LONGEST:.0f} s, there is no run to evaluate: {error}") from None
    options = {"checkpoint": None, "watch": True}
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
    while run_name and not (runs_dir / run_name / "config.yaml").is_file():
        if time.monotonic() >= end:
            break
        time.sleep(0.2)
    runs = {path.parent.name: path.parent for path in sorted(runs_dir.glob("*/config.yaml"))}
    where = label(from_here(runs_dir))
    if not runs:
        raise SetupError(f"{where}: no run there yet; train one first.")
    if run_name is None:
        return max(runs.values(), key=lambda run: (run / "config.yaml").stat().st_mtime)
    if run_name not in runs:
        there = f" (there: {one_line(', '.join(runs), 100)})"
        near = nearest(run_name, runs)
        raise SetupError(f"run_name: no run {shown(run_name)} in {where}{near}{there}")
    return runs[run_name]
