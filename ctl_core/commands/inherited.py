"""Decides which settings a training inherits from an existing run that it resumes or forks.

The command line and ``ctl_core.train`` follow the same rule: the saved settings of the run take
precedence over those of the project's config.yaml. Flags, environment variables and the arguments
of ``load_config`` take precedence over both.
"""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ctl_core.checkpoint.run_settings import CONFIG_FILE, has_settings, read_run_settings
from ctl_core.checkpoint.source import read_source
from ctl_core.hooks.callbacks_file import DEFAULT
from ctl_core.run.errors import SetupError, format_name, make_line, quote
from ctl_core.run.files import relative_path
from ctl_core.run.layers import Layer, find_layers, locate_runs, resolve
from ctl_core.run.settings import Config, flatten

# The settings that name the code of a run, and its mirror. A fork does not inherit them, because
# the original run may be somebody else's. Its code is not executed, and nothing is sent to its
# mirror, unless the project or a flag names them, too.
_NAMED_AGAIN = ("callbacks", "listener", "mirror")
# The settings that a fork does not inherit.
_NOT_FORKED = frozenset(
    {"workers", "run_name", "runs_dir", "fork", "init_from", "init_skip", *_NAMED_AGAIN}
)
# The settings that may differ when a run is resumed with a ``Config`` from Python, without a note:
# they say when training ends, where the run is, or how it began.
_FREE = frozenset({"steps", "epochs", "debug", "callbacks", *_NOT_FORKED} - {"listener", "mirror"})


class Origin(NamedTuple):
    """An existing run whose saved settings a command inherits.

    Attributes:
        run: the folder of the run
        is_forked: whether training begins a new run from this run, instead of resuming it
    """

    run: Path
    is_forked: bool = False


class ProjectFile(NamedTuple):
    """The settings file of a project.

    Attributes:
        path: the path of the file
        layer: the settings in the file
        cure: what to do so that the values of the file are used, for a message
    """

    path: Path
    layer: Layer
    cure: str


def find_training_origin(config: Config) -> Origin | None:
    """Returns the run that training resumes or forks; None if it starts a new run."""
    run = Path(config.runs_dir, config.run_name or "")
    if config.run_name is not None and has_settings(run):
        return Origin(run)
    if config.fork:
        with contextlib.suppress(SetupError):  # training reports a missing run later
            return Origin(read_source("fork", config.fork, config.runs_dir).run, is_forked=True)
    return None


def inherit_settings(config: Config) -> tuple[Config, list[str]]:
    """Returns the settings with which ``ctl_core.train`` trains, and notes for the user.

    If ``load_config`` has read the settings, and training resumes or forks a run, the saved
    settings of the run take precedence over those in the file. Any other ``Config`` is returned
    unchanged, with a note for each setting that differs from those of the resumed run.

    Raises:
        SetupError: the saved settings of the run cannot be read.
    """
    origin = find_training_origin(config)
    if origin is None:
        return config, []
    layers = find_layers(config)
    if layers is None:
        return config, _describe_changes(origin, config)
    path, file, arguments = layers
    saved = read_run_settings(origin.run)
    # The number of processes is left out, because Python code cannot start them.
    inherited = saved.leave_out({"workers", *list_not_inherited(True, origin)})
    notes = describe_saved(origin, saved, [file, arguments])
    project = ProjectFile(path, file, "pass them to load_config")
    notes += describe_differences(origin, inherited, project, [arguments])
    config = locate_runs(resolve([file, inherited], [arguments]), layers)
    if not origin.is_forked:
        config = dataclasses.replace(
            config, run_name=origin.run.name, runs_dir=str(origin.run.parent)
        )
    return config, notes


def _describe_changes(origin: Origin, config: Config) -> list[str]:
    """Returns a note for each setting whose value changes when the run is resumed."""
    if origin.is_forked:
        return []
    try:
        saved = flatten(read_run_settings(origin.run).values)
    except SetupError:  # the file is damaged; training writes it again
        return []
    present = flatten(dataclasses.asdict(config))
    notes = []
    for name in sorted(saved.keys() | present.keys()):
        is_known = name in saved or name.startswith("hparams.")
        if not is_known or name in {"hparams", *_FREE}:
            continue
        old = saved.get(name)
        new = present.get(name)
        if old != new:
            notes.append(
                f"{format_name(name)}: {quote(new, 60)} from now on; until now, "
                f"{format_name(relative_path(origin.run))} has trained with {quote(old, 60)}."
            )
    return notes


def list_not_inherited(is_training: bool, origin: Origin) -> set[str]:
    """Returns the names of the settings that are not read from the run's saved config.yaml."""
    names = {"debug"}
    # The number of processes matters only if training starts these processes itself.
    if not is_training or "TF_CONFIG" in os.environ:
        names.add("workers")
    if origin.is_forked:
        names |= _NOT_FORKED
    return names


def describe_differences(
    origin: Origin, inherited: Layer, project: ProjectFile, above: Sequence[Layer]
) -> list[str]:
    """Returns a note if the project's config.yaml was edited, but the run keeps its own settings.

    Args:
        origin: the run
        inherited: the settings that are read from the saved config.yaml of the run
        project: the project's config.yaml
        above: environment variables and flags, which override both files
    """
    overridden = {name for layer in above for name in flatten(layer.values)}
    saved = flatten(inherited.values)
    edited = flatten(project.layer.values)
    if "callbacks" in edited:
        edited["callbacks"] = relative_path(edited["callbacks"])
    differing = [
        name
        for name, value in edited.items()
        if name not in overridden and saved.get(name, value) != value
    ]
    if not differing:
        return []
    # Each start saves the settings of the run. If these differed from the project's file even then,
    # the reason was a flag. A note is therefore printed only if the file was edited later.
    run_file = origin.run / CONFIG_FILE
    if not run_file.exists() or project.path.stat().st_mtime <= run_file.stat().st_mtime:
        return []
    names = make_line(", ".join(sorted(differing)), 100)
    return [
        f"{format_name(relative_path(origin.run))} keeps its own settings; config.yaml differs "
        f"in {names}: to use its values, {project.cure}."
    ]


def describe_saved(origin: Origin, saved: Layer, others: Sequence[Layer]) -> list[str]:
    """Returns notes about the settings of a run: their origin, and those that a fork leaves out.

    Args:
        origin: the run
        saved: the saved settings of the run
        others: the project's settings files, environment variables and flags
    """
    notes = []
    if not (origin.run / CONFIG_FILE).exists():
        notes.append(
            f"{format_name(relative_path(origin.run))} has no {CONFIG_FILE}: its settings are "
            "taken from its newest checkpoint."
        )
    if not origin.is_forked:
        return notes
    named = {name for layer in others for name in layer.values}
    for name in _NAMED_AGAIN:
        value = saved.values.get(name)
        if value not in (None, DEFAULT) and name not in named:
            notes.append(
                f"fork: that run used --{name} {format_name(value)}, but this one does not; to "
                "use it here, too, pass it."
            )
    return notes
