"""``ctl_core.load``: the trained model of a run as a function, for a notebook or a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ctl_core.callbacks_file import find_callbacks, load_callbacks
from ctl_core.console import Console
from ctl_core.numerics.randomness import seeds_kept
from ctl_core.serving.inference import LoadedModel, create_inference
from ctl_core.serving.restore import CheckpointName, restore_run
from ctl_core.settings import load_config


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
