"""``evaluate``, ``predict`` and ``export``: using the checkpoint of a run, which they only read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.commands.watch import watch as watch_run
from ctl_core.model.state import State
from ctl_core.run.console import Console
from ctl_core.run.errors import SetupError
from ctl_core.run.files import from_here, written_whole
from ctl_core.run.settings import Config
from ctl_core.serving.export import next_version, save_model
from ctl_core.serving.inference import create_inference
from ctl_core.serving.load import CheckpointName, open_run, restore_run
from ctl_core.serving.predict import predict_outputs


def evaluate(
    callbacks: Any,
    config: Config,
    checkpoint: CheckpointName = None,
    watch: bool = False,
    console: Console | None = None,
) -> dict[str, float]:
    """Evaluates a checkpoint and prints the values; with ``watch``, each that a run makes.

    Raises:
        SetupError: there is no evaluation data, or no checkpoint.
    """
    if watch:
        if checkpoint is not None:
            raise SetupError("watch: evaluates every checkpoint; leave out --checkpoint.")
        with open_run(callbacks, config, console) as (state, run, console):
            _check_data(state)
            return watch_run(state, run, console)
    with restore_run(callbacks, config, checkpoint, console) as (state, console):
        _check_data(state)
        values: dict[str, float] = state.evaluation.evaluate()
        console.values(state.step, "eval", values)
    return values


def _check_data(state: State) -> None:
    if state.evaluation is None:
        raise SetupError("create_eval_dataset: there is none, so there is nothing to evaluate.")


def predict(
    callbacks: Any,
    config: Config,
    checkpoint: CheckpointName = None,
    input: str | None = None,
    dataset: str | None = None,
    output: str | None = None,
    console: Console | None = None,
) -> Path:
    """Writes the model's outputs for a file, or for a set of evaluation data, as a .npz file.

    Raises:
        SetupError: the file does not fit the model, or there is no data or no checkpoint.
    """
    if input and dataset:
        raise SetupError("input and dataset: give one of the two.")
    if output and (Path(output).suffix != ".npz" or output == input):
        raise SetupError(f"output: expected the name of another .npz file, got {output}.")
    source = Path(input) if input else None
    with restore_run(callbacks, config, checkpoint, console) as (state, console):
        name = None
        if source is None and state.evaluation is not None:
            names = list(state.evaluation.sets)
            name = names[0] if dataset is None and len(names) == 1 else dataset
            if name not in names:
                there = ", ".join(names) if any(names) else "none"
                raise SetupError(f"dataset: expected one of {there}, got {name!r}.")
        of = source.stem if source else name
        path = Path(output or state.run_dir / f"predictions{f'-{of}' * bool(of)}.npz")
        arrays = predict_outputs(state, source, name)
        with written_whole(path) as beside, beside.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        console.say(f"step {state.step}: wrote {shapes} to {from_here(path)}")
    return path


def export(
    callbacks: Any,
    config: Config,
    checkpoint: CheckpointName = None,
    output: str | None = None,
    console: Console | None = None,
) -> Path:
    """Writes the model of a checkpoint as a SavedModel: the next version in a folder.

    Returns:
        Where it is, runs/NAME/export/1 say.

    Raises:
        SetupError: there is no checkpoint.
        OSError: the place cannot be written.
    """
    with restore_run(callbacks, config, checkpoint, console) as (state, console):
        base = Path(output or state.run_dir / "export")
        path = next_version(base)
        tf.summary.experimental.set_step(state.step)  # no variable that serving would lack
        inference = create_inference(state)
        base.mkdir(exist_ok=True)
        with written_whole(path) as beside:
            save_model(inference, beside)
        console.say(f"step {state.step}: wrote a SavedModel to {from_here(path)}")
    return path
