"""``ctl_core.load``: the trained model of a run as a function, for a notebook or a server."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.callbacks_file import DEFAULT, MODULE, find_callbacks, load_callbacks
from ctl_core.console import Console
from ctl_core.errors import SetupError
from ctl_core.files import from_here
from ctl_core.nested import described, input_names
from ctl_core.process_state import seeds_kept
from ctl_core.serving.inference import Inference, create_inference
from ctl_core.serving.raw import to_tensors
from ctl_core.serving.restore import CheckpointName, restore_run
from ctl_core.settings import Config, label, load_config, shown


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel:
    """The model of a checkpoint, with what comes before it; several threads may call it at once.

    Attributes:
        model: what ``create_inference_model`` returned, or the model that is evaluated
        input_spec: what it is called with, in its structure; the first dimension, None, is the
            number of examples
        output_spec: what it returns
        step: of the checkpoint
        metrics: what the evaluation before the checkpoint found, by name, or {}
        settings: of the run
    """

    model: Any
    input_spec: Any
    output_spec: Any
    step: int
    metrics: dict[str, float]
    settings: Config
    _inference: Inference

    def __call__(self, inputs: Any) -> Any:
        """Returns the model's output for raw inputs, any number of examples.

        Args:
            inputs: arrays, lists or tensors as ``input_spec`` has them: what a client sends, before
                ``serve``, or without that hook before ``input_pre``

        Returns:
            Eager tensors as ``output_spec`` has them.

        Raises:
            SetupError: the inputs are not as ``input_spec`` has them.
            RunError: the model cannot take these values.
        """
        tensors = to_tensors(self.input_spec, inputs)
        try:
            return self._inference.run(tensors)
        except tf.errors.OpError as error:
            raise self._inference.describe_failure(error) from error

    def __repr__(self) -> str:
        """One line, as a notebook shows what a cell ends with."""
        spec = input_names(self.input_spec).items()
        parts = ", ".join(f"{name} {described(part)}" for name, part in spec)
        return f"LoadedModel({self.settings.run_name}, step={self.step}, inputs=({parts}))"


def load(
    run: str | Path, checkpoint: int | str | None = None, callbacks: Any = None
) -> LoadedModel:
    """Loads the model of a run, on the GPU if there is one.

    The hooks are those of the project: the run's own settings say which file. Where that is gone,
    the run's copy is taken, and a line says so; as does one where the file has changed since. What
    ``create_dataset`` reads has to be there, since the model is built as it was for training; an
    export needs neither.

    Seeds, Keras' settings, ``sys.path`` and the module ``callbacks`` are as before afterwards.

    Args:
        run: the folder of the run, such as ``runs/a``
        checkpoint: the step of the checkpoint, a number or a text, or ``best`` for the one of
            ``keep_best``; default: the newest
        callbacks: a module, a dict or any object with the hooks, instead of the project's file

    Raises:
        SetupError: there is no such run or checkpoint, or a hook cannot work.
    """
    folder, name = _check_folder(run), _read_step(checkpoint)
    config = load_config(folder / "config.yaml", run_name=folder.name, runs_dir=str(folder.parent))
    console = Console()
    with _state_kept():
        if callbacks is None:
            written = load_config(folder / "config.yaml")
            project = _find_project(folder, written.runs_dir)
            source = find_callbacks(
                written.callbacks, folder, written.callbacks, training=False, project=project
            )
            if source.note:
                console.say(source.note)
            callbacks = load_callbacks(source, project)
        with restore_run(callbacks, config, name, console) as (state, record, _):
            made = create_inference(state)
    metrics = dict(record.progress["metrics"])
    return LoadedModel(
        made.model, made.input_spec, made.output_spec, made.step, metrics, config, made
    )


def _check_folder(run: str | Path) -> Path:
    """Returns the folder of a run.

    Raises:
        SetupError: it is none; a project's own folder has config.yaml alone.
    """
    folder = Path(os.path.abspath(run))
    if not (folder / "config.yaml").is_file() or not (folder / "ckpt").is_dir():
        raise SetupError(f"run: {label(from_here(folder))} is no folder of a run, such as runs/a.")
    return folder


def _read_step(checkpoint: Any) -> CheckpointName:
    """Returns the step of a checkpoint, which may be a text of digits.

    Raises:
        SetupError: it is something else.
    """
    if checkpoint is None or checkpoint == "best":
        return checkpoint  # type: ignore[no-any-return]
    if str(checkpoint).isdecimal():
        return int(checkpoint)
    raise SetupError(
        "checkpoint: expected a step, a whole number from 0 up, or best, or nothing for the "
        f"newest, got {shown(checkpoint)}."
    )


def _find_project(run: Path, runs_dir: str) -> Path:
    """Returns the folder of the project that a run is in: what ``runs_dir`` is relative to."""
    parts = Path(runs_dir).parts
    inside = run.parent.parts[-len(parts) :] == parts and not Path(runs_dir).is_absolute()
    return Path(*run.parent.parts[: -len(parts)]) if inside else Path.cwd()


@contextlib.contextmanager
def _state_kept() -> Iterator[None]:
    """Within, seeds are set and modules found as a run has it; afterwards all is as it was."""
    path = list(sys.path)
    modules = {name: sys.modules.get(name) for name in (Path(DEFAULT).stem, MODULE)}
    try:
        with seeds_kept():
            yield
    finally:
        sys.path[:] = path
        for name, module in modules.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
