"""A run that is only read: a checkpoint restored on one device, and ``ctl_core.load`` of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from ctl_core.build import create_state, process_state
from ctl_core.checkpoint.checkpoints import Checkpoints
from ctl_core.checkpoint.folder import Run, open_session
from ctl_core.checkpoint.record import Source
from ctl_core.cluster.task import Task
from ctl_core.hooks.callbacks_file import find_callbacks, load_callbacks
from ctl_core.model.state import State
from ctl_core.numerics.randomness import seeds_kept
from ctl_core.run.console import Console
from ctl_core.run.settings import Config
from ctl_core.run.sources import load_config
from ctl_core.serving.inference import LoadedModel, create_inference

CheckpointName = int | Literal["best"] | None


@contextmanager
def open_run(
    callbacks: Any, config: Config, console: Console | None = None
) -> Iterator[tuple[State, Run, Console]]:
    """Builds the state of a run that is only read, on one device."""
    console = console or Console()
    config = dataclasses.replace(config, strategy="one_device", virtual_devices=1, workers=1)
    # Nobody need count the training data.
    config = dataclasses.replace(config, steps=None, epochs=None, ckpt_every=0, eval_every=0)
    run = Run(config, Task(), reading=True)
    with open_session(run, console), process_state(config):
        yield create_state(callbacks, config, run, console), run, console


@contextmanager
def restore_run(
    callbacks: Any, config: Config, checkpoint: CheckpointName, console: Console | None = None
) -> Iterator[tuple[State, Console]]:
    """Builds the state of a run and restores a checkpoint; the weights are averaged with ``ema``.

    Args:
        callbacks: the hooks
        config: the settings of the run
        checkpoint: its step, ``best`` for the one that ``keep_best`` keeps, or None for the newest
        console: where to say so

    Raises:
        SetupError: there is none, or it does not fit.
    """
    with open_run(callbacks, config, console) as (state, run, console):
        source = Source("checkpoint", run.path, checkpoint)
        Checkpoints(state, console).restore(source, with_input=False)
        console.say(f"{run.shown}: checkpoint of step {state.step}.")
        yield state, console


def load(run: str | Path, checkpoint: CheckpointName = None, callbacks: Any = None) -> LoadedModel:
    """Loads the model of a run, on the GPU if there is one.

    The hooks are those of the project: the run's own settings say which file. Where that is gone,
    the run's copy is taken, and a line says so; as does one where the file has changed since. What
    ``create_dataset`` reads has to be there, since the model is built as it was for training; an
    export needs neither.

    Seeds and Keras' settings are as before afterwards; the file is the module ``callbacks``, as in
    a training, and what it imports is found in ``sys.path``.

    Args:
        run: the folder of the run, such as ``runs/a``
        checkpoint: the step of the checkpoint, or ``best`` for the one of ``keep_best``; default:
            the newest
        callbacks: a module, a dict or any object with the hooks, instead of the project's file

    Raises:
        SetupError: there is no such run or checkpoint, or a hook cannot work.
    """
    folder, console = Path(os.path.abspath(run)), Console()
    config = load_config(folder / "config.yaml")
    if callbacks is None:
        project = _find_project(folder, config.runs_dir)
        name = config.callbacks
        source = find_callbacks(name, folder, name, training=False, project=project)
        if source.note:
            console.say(source.note)
    own = load_config(folder / "config.yaml", run_name=folder.name, runs_dir=str(folder.parent))
    with seeds_kept():
        hooks = load_callbacks(source, project) if callbacks is None else callbacks
        with restore_run(hooks, own, checkpoint, console) as (state, _):
            return create_inference(state)


def _find_project(run: Path, runs_dir: str) -> Path:
    """Returns the folder of the project that a run is in: what ``runs_dir`` is relative to."""
    parts = Path(runs_dir).parts
    inside = run.parent.parts[-len(parts) :] == parts and not Path(runs_dir).is_absolute()
    return Path(*run.parent.parts[: -len(parts)]) if inside else Path.cwd()
