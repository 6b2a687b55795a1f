"""What a command line says: the command, its own options, and the settings.

Settings come from the defaults, then config.yaml, then ``CTL_*`` environment variables, then flags.
A run that is there already has its own config.yaml, which takes the place of the project's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ctl_core.callbacks_file import DEFAULT
from ctl_core.cluster.rendezvous import LONGEST
from ctl_core.cluster.task import is_in_cluster
from ctl_core.errors import PeerLost, SetupError, one_line
from ctl_core.files import from_here
from ctl_core.flags import read_flags
from ctl_core.layers import Layer, checked, environment, flat, merge, read_file
from ctl_core.options import default_options, options_of
from ctl_core.settings import Config, explain, label, nearest, shown
from ctl_core.sources import read_source


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


# What says how a run is watched; the run does not keep it.
_OF_A_START = ("debug",)
# What is known of a command before the settings of its run are.
_FIRST = ("run_name", "runs_dir", "fork", "strategy")
# What a run does not take over from the one that it begins from.
_NOT_FORKED = ("workers", "run_name", "runs_dir", "fork", "init_from")
# How long evaluate --watch waits for a run to begin (seconds).
BEGINNING = 30.0


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
    command, words = argv[0], _with_name(argv)
    env, named = environment(environ)
    flags = read_flags(command, words)
    options = _options(command, named, flags)
    named = options.pop("config")
    project = [read_file(Path(path), required=bool(named)) for path in named or ["config.yaml"]]
    place: Layer = {}
    for layer in (*project, env, flags):
        place |= {key: layer[key] for key in _FIRST if key in layer}
    near = checked(place)
    notes = []
    run = _run(command, near, options)
    if run is not None and not os.path.isfile(run / "config.yaml"):
        run = None
    source, files, trained_with = run, project, DEFAULT
    if run is None and command == "train":
        source = _forked(place | {"runs_dir": ("", near.runs_dir)})
    if source is not None:
        own = read_file(source / "config.yaml")
        trained_with = str(own.get("callbacks", ("", DEFAULT))[1])
        clustered = command == "train" and is_in_cluster(environ)
        others = _NOT_FORKED if run is None else ("workers",) * clustered
        own = _of_this_start({key: own[key] for key in own if key not in others}, project[-1])
        if command == "train" and not named and (differ := _differ(own, project[0], env | flags)):
            where = label(from_here(source))
            begins = f"fork: goes on with the settings of {where}"
            notes.append(
                f"{begins if run is None else f'{where}: has its own settings'}: {differ}; "
                "--config config.yaml takes those of the file."
            )
        files = [own, *(project if named else ())]
    if run is not None:
        flags |= {"run_name": ("run_name", run.name), "runs_dir": ("runs_dir", str(run.parent))}
    if command != "train":
        _leave_out_workers(command, [*files, env, flags])
    config = merge(files, [env, flags], (named or ["config.yaml"])[-1], project)
    config = dataclasses.replace(config, callbacks=from_here(config.callbacks))
    return Command(command, config, options, notes, run, trained_with)


def _with_name(argv: Sequence[str]) -> Sequence[str]:
    """Returns what follows a command; a word at the beginning, the name of a run, is a flag then.

    Raises:
        SetupError: another run is named as well.
    """
    command, *words = argv
    if command == "train" or not words or words[0].startswith("-"):
        return words
    name, *words = words
    words = [f"--run-name={name}", *words]
    if (other := read_flags(command, words)["run_name"][1]) != name:
        raise SetupError(f"run_name: name one run, not both {shown(name)} and {shown(other)}.")
    return words


def _options(command: str, named: Sequence[str] | None, flags: Layer) -> dict[str, Any]:
    """Takes a command's own options, and ``config``, out of the flags.

    Raises:
        SetupError: one is wrong, or does not go with another.
    """
    known = options_of(command)
    chosen = {key: flags.pop(key)[1] for key in known.model_fields if key in flags}
    try:
        values = known(**{"config": named, **chosen}).model_dump()
    except ValidationError as error:
        raise SetupError(explain(error, known.model_fields)) from error
    if values.get("check") and values["note"]:
        raise SetupError("note: a check is no run; leave one out.")
    return values


def _run(command: str, near: Config, options: Mapping[str, Any]) -> Path | None:
    """Returns the folder of the run that a command is of; of a training, whether there or not."""
    if command == "train":
        return Path(near.runs_dir, near.run_name) if near.run_name else None
    waits = BEGINNING if options.get("watch") and near.run_name is not None else 0
    return find_run(Path(near.runs_dir), near.run_name, waits)


def _leave_out_workers(command: str, layers: Sequence[Layer]) -> None:
    """Lets a trained run be used in one process, whatever trained it.

    Raises:
        SetupError: a flag, the last of the layers, says otherwise.
    """
    flags = layers[-1]
    if checked({key: flags[key] for key in flags if key == "workers"}).workers > 1:
        raise SetupError(f"workers: {command} uses a run in one process; leave it out.")
    for layer in layers:
        layer.pop("workers", None)


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
        PeerLost: none has begun after as long as workers wait for each other.
    """
    config = command.config
    try:
        run = find_run(Path(config.runs_dir), config.run_name, LONGEST)
    except SetupError as error:
        raise PeerLost(f"after {LONGEST:.0f} s, there is no run to evaluate: {error}") from None
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
