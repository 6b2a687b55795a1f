"""The command line: the commands, what each takes, and whose settings it means.

Settings come from the defaults, then config.yaml, then ``CTL_*`` environment variables, then flags.
Of a run that is there already, its own config.yaml goes before the project's.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, ValidationError, create_model
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from ctl_core.checkpoint.source import CheckpointName, read_source
from ctl_core.hooks.callbacks_file import DEFAULT
from ctl_core.run.errors import SetupError, format_name, make_line, quote, suggest
from ctl_core.run.files import relative_path
from ctl_core.run.settings import SETTINGS, Config, FilePath, declare, explain, flatten
from ctl_core.run.sources import (
    ENV_PREFIX,
    EnvironmentSource,
    Layer,
    find_unknown_variables,
    merge_hparams,
    read_file,
    resolve,
)

_File = Annotated[FilePath, AfterValidator(os.path.abspath)]
_OPTIONS: dict[str, Any] = {
    "config": (list[str] | None, declare(None, "settings file, again for more")),
    "continue": (bool, declare(False, "train on where a hook has ended a run (StopTraining)")),
    "check": (bool, declare(False, "try everything once, in seconds and a temporary folder")),
    "note": (str | None, declare(None, "what you expect of the run, for training_log.md")),
    "checkpoint": (CheckpointName, declare(None, "step, or best; null: newest")),
    "watch": (bool, declare(False, "evaluate each checkpoint of a run that is being trained")),
    "input": (_File | None, declare(None, "a .npy file, or a .npz file of named inputs")),
    "dataset": (str | None, declare(None, "which set, if create_eval_dataset has several")),
    "include": (list[str] | None, declare(None, "part of the batches, as label, to write, too")),
    "output": (_File | None, declare(None, "where to write; null: in the folder of the run")),
    "hook": (str | None, declare(None, "the hook to explain; null: the table of all")),
}
_OF_ALL = ("run_name", "runs_dir", "callbacks", "batch_size", "debug", "hparams")


class Flags(NamedTuple):
    """What a command does, its own options, and the settings of a run that it takes."""

    text: str
    options: Sequence[str]
    settings: Sequence[str] = _OF_ALL


COMMANDS = {
    "train": Flags(
        "train, or resume a run", ("config", "continue", "check", "note"), tuple(SETTINGS)
    ),
    "evaluate": Flags(
        "evaluate a run's checkpoint",
        ("config", "checkpoint", "watch"),
        (*_OF_ALL, "eval_batch_size", "limit_eval"),
    ),
    "predict": Flags(
        "write a run's predictions to a file",
        ("config", "checkpoint", "input", "dataset", "include", "output"),
        (*_OF_ALL, "eval_batch_size"),
    ),
    "export": Flags(
        "write a run's model for TensorFlow Serving", ("config", "checkpoint", "output")
    ),
    "hooks": Flags("print the table of hooks, or all about one hook", ("hook",), ()),
}
# What a run does not take over from the one that it begins from.
_NOT_FORKED = {"workers", "run_name", "runs_dir", "fork", "init_from", "init_skip"}


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
    options: dict[str, Any]
    notes: Sequence[str] = ()
    run: Path | None = None
    trained_with: str = DEFAULT


def parse_command(argv: Sequence[str]) -> Command:
    """Parses ``<command> [NAME] [flags]``: of a run to use, or of the hook to explain.

    Raises:
        SetupError: anything is unknown, of the wrong type, out of range or missing.
        SystemExit: ``--help`` was asked for and printed.
    """
    command, *words = argv
    if command not in COMMANDS:
        hint = suggest(command, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}."
        raise SetupError(f"unknown command {quote(command)}{hint}")
    training = command == "train"
    if not training and words and not words[0].startswith("-"):
        option = "hook" if command == "hooks" else "run-name"
        words[0] = f"--{option}={words[0]}"
    variables, flags, options = _read_words(command, words)
    if command == "hooks":
        return Command(command, Config(), options)
    above, notes = [variables, flags], find_unknown_variables()
    variable = os.environ.get(f"{ENV_PREFIX}CONFIG", "").split(os.pathsep)
    named = options.pop("config") or [path for path in variable if path]
    project = [read_file(Path(path), required=bool(named)) for path in named or ["config.yaml"]]
    near = resolve([layer.leave_out(["hparams"]) for layer in (*project, *above)])
    runs_dir = Path(near.runs_dir)
    if training:
        place = runs_dir / (near.run_name or "")
        run = source = place if (place / "config.yaml").is_file() else None
        if run is None and near.fork:
            with contextlib.suppress(SetupError):  # training says that there is none
                source = read_source("fork", near.fork, near.runs_dir).run
    else:
        run = source = find_run(runs_dir, near.run_name)
    files, trained_with = project, DEFAULT
    if source is not None:
        own = read_file(source / "config.yaml")
        trained_with = str(own.values.get("callbacks", DEFAULT))
        # How a run was watched, and by how many processes trained, says nothing about its use.
        left_out = {"debug"} | (
            set() if training and "TF_CONFIG" not in os.environ else {"workers"}
        )
        own = own.leave_out(left_out if run else left_out | _NOT_FORKED)
        files = [own, *project] if named else [*project, own]
        told = set().union(*(flatten(layer.values) for layer in above))
        before, now = flatten(own.values), flatten(project[0].values)
        if "callbacks" in now:
            now["callbacks"] = relative_path(now["callbacks"])
        differ = [name for name in now.keys() - told if before.get(name, now[name]) != now[name]]
        if training and not named and differ:
            # A start writes the run's own: what was other than here by then, its flags had said.
            edited, started = (os.path.getmtime(one / "config.yaml") for one in (Path(), source))
            if edited > started:
                text = make_line(", ".join(sorted(differ)), 100)
                notes.append(
                    f"{format_name(relative_path(source))} goes on with its own settings; "
                    f"config.yaml differs in {text}: to take it, --config config.yaml."
                )
    config = resolve(files, above)
    if run is not None:
        config = dataclasses.replace(config, run_name=run.name, runs_dir=str(run.parent))
    config = dataclasses.replace(config, callbacks=relative_path(config.callbacks))
    if command == "predict":
        config = dataclasses.replace(config, limit_eval=None)
    return Command(command, config, options, notes, run, trained_with)


def _read_words(command: str, words: Sequence[str]) -> tuple[Layer, Layer, dict[str, Any]]:
    """Reads what a command takes, from the environment and its words.

    Returns:
        The settings of the environment, those of the flags, and the command's own options.
    """
    words, hparams = _split_hparams(words)
    text, own, names = COMMANDS[command]
    options = {name: _OPTIONS[name] for name in own}
    settings: dict[str, Any] = {name: (SETTINGS[name].annotation, SETTINGS[name]) for name in names}
    variables = EnvironmentSource(create_model("Variables", __base__=BaseSettings, **settings))()
    settings.pop("hparams", None)
    doc = (
        f"{text.capitalize()}. Settings come from the defaults, then config.yaml, then the run's "
        f"own where it is there already, then the environment ({ENV_PREFIX}BATCH_SIZE=32), then "
        "these flags; --hparams.NAME VALUE is one of yours."
    )
    source: Any = CliSettingsSource(
        create_model(command, __base__=BaseSettings, __doc__=doc, **options, **settings),
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
        flags = source(args=words)()
    except SettingsError as error:
        raise SetupError(_explain_flag(str(error), [*options, *settings])) from error
    model = create_model(command, **options)
    try:
        chosen = model(**{name: flags.pop(name) for name in options if name in flags})
    except ValidationError as error:
        raise SetupError(explain(error, model.model_fields)) from error
    flags |= {"hparams": hparams} if hparams else {}
    return Layer(variables, ENV_PREFIX), Layer(flags), chosen.model_dump()


def _split_hparams(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes the flags for hparams out; ``--hparams.a.b 3`` is {a: {b: "3"}}."""
    others: list[str] = []
    hparams: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        if not flag.startswith("--hparams."):
            others.append(word)
            continue
        value: Any = text if equals else next(rest, None)
        if value is None:
            raise SetupError(f"{format_name(flag)}: expected a value after it.")
        for name in reversed(flag.split(".")[1:]):
            value = {name: value}
        hparams = merge_hparams(hparams, value)
    return others, hparams


def _explain_flag(text: str, known: Sequence[str]) -> str:
    """Says in one line which flag is wrong, and which one may have been meant."""
    text = text.removeprefix("error parsing CLI: ")
    unknown = re.match(r"unrecognized arguments: ([^\s=]*)", text)
    if unknown is None:
        return make_line(text.replace("one argument", "a value after it"))
    names = ["--" + name.replace("_", "-") for name in known]
    near = suggest(unknown[1].replace("_", "-"), names)
    return f"there is no setting {quote(unknown[1])}{near or '; settings are --name value.'}"


def find_run(runs_dir: Path, run_name: str | None) -> Path:
    """Returns the folder of a run that was trained before; without a name, the newest.

    Raises:
        SetupError: there is no such run.
    """
    runs = {path.parent.name: path.parent for path in sorted(runs_dir.glob("*/config.yaml"))}
    where = format_name(relative_path(runs_dir))
    if not runs:
        raise SetupError(f"{where}: no run there yet; train one first.")
    if run_name is None:
        return max(runs.values(), key=lambda run: (run / "config.yaml").stat().st_mtime)
    if run_name not in runs:
        there = suggest(run_name, runs) or f" (there: {make_line(', '.join(runs), 100)})"
        raise SetupError(f"run_name: no run {quote(run_name)} in {where}{there}")
    return runs[run_name]
