"""``evaluate``, ``predict`` and ``export``: using the checkpoint of a run, which they only read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.errors import SetupError, reason
from ctl_core.evaluation.evaluate import Evaluation
from ctl_core.files import from_here, refuse_links, written_whole
from ctl_core.serving.export import next_version, save_model
from ctl_core.serving.inference import create_inference
from ctl_core.serving.predict import predict_outputs
from ctl_core.serving.restore import open_run, restore_run
from ctl_core.settings import Config
from ctl_core.state import State
from ctl_core.tools.watch import watch


def evaluate(callbacks: Any, config: Config, options: Mapping[str, Any]) -> dict[str, float]:
    """Evaluates a checkpoint and prints the values; with ``watch``, each that a run makes.

    Raises:
        SetupError: there is no evaluation data, or no checkpoint.
    """
    if options.get("watch"):
        if options["checkpoint"] is not None:
            raise SetupError("watch: evaluates every checkpoint; leave out --checkpoint.")
        with open_run(callbacks, config) as (state, run, console):
            _check_evaluation(state)
            return watch(state, run, console)
    with restore_run(callbacks, config, options["checkpoint"]) as (state, _, console):
        evaluation = _check_evaluation(state)
        evaluation.trace(state.recording)
        values = evaluation.evaluate()
        assert values is not None
        console.values(state.step, "eval", values)
    return values


def _check_evaluation(state: State) -> Evaluation:
    if state.evaluation is None:
        raise SetupError("create_eval_dataset: there is none, so there is nothing to evaluate.")
    return state.evaluation  # type: ignore[no-any-return]


def predict(callbacks: Any, config: Config, options: Mapping[str, Any]) -> Path:
    """Writes the model's outputs for a file, or for the evaluation data, as a .npz file.

    Raises:
        SetupError: the file does not fit the model, or there is no data or no checkpoint.
    """
    if options["input"] and options.get("dataset"):
        raise SetupError("input and dataset: give one of the two.")
    config = dataclasses.replace(config, limit_eval=None)
    source = Path(options["input"]) if options["input"] else None
    if options["output"]:
        _check_output(Path(options["output"]), source)
    with restore_run(callbacks, config, options["checkpoint"]) as (state, _, console):
        name = None
        if source is None and state.evaluation is not None:
            name = _choose_set(state.evaluation, options.get("dataset"))
        of = source.stem if source else name
        path = Path(options["output"] or state.run_dir / f"predictions{f'-{of}' * bool(of)}.npz")
        arrays = predict_outputs(state, source, name)
        with _naming(path), written_whole(path) as beside, beside.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        console.say(f"step {state.step}: wrote {shapes} to {from_here(path)}")
    return path


def _check_output(path: Path, source: Path | None) -> None:
    if path.suffix != ".npz":
        raise SetupError(f"output: expected the name of a .npz file, got {path}.")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise SetupError(
            f"output: {from_here(path)} is the file of --input, which would be lost; name another "
            "one."
        )


def _choose_set(evaluation: Evaluation, name: str | None) -> str:
    """Returns the name of the set of evaluation data to take, if need be that of the only one.

    Raises:
        SetupError: there is none of that name, or several and no name.
    """
    names = list(evaluation.sets)
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        there = "one of " + ", ".join(names) if any(names) else "none"
        raise SetupError(f"dataset: expected {there}, as create_eval_dataset has it, got {name!r}.")
    return name


def export(callbacks: Any, config: Config, options: Mapping[str, Any]) -> Path:
    """Writes the model of a checkpoint as a SavedModel: the next version in a folder.

    Returns:
        Where it is, runs/NAME/export/1 say.

    Raises:
        SetupError: there is no checkpoint, or the place cannot be written.
    """
    output = options["output"]
    with restore_run(callbacks, config, options["checkpoint"]) as (state, _, console):
        base = Path(output or state.run_dir / "export")
        if output is None:
            refuse_links(state.run_dir, [base])
        path = next_version(base)
        tf.summary.experimental.set_step(state.step)  # no variable that serving would lack
        inference = create_inference(state)
        with _naming(path):
            base.mkdir(exist_ok=True)
            with written_whole(path, folder=True) as beside:
                save_model(inference, beside)
        console.say(f"step {state.step}: wrote a SavedModel to {from_here(path)}")
    return path


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Says in one line what cannot be written, and what to do.

    Raises:
        SetupError: instead of the error within.
    """
    try:
        yield
    except (OSError, tf.errors.PermissionDeniedError, tf.errors.ResourceExhaustedError) as error:
        raise SetupError(
            f"output: {from_here(path)} cannot be written: {reason(error)}; name another place by "
            "--output."
        ) from error
