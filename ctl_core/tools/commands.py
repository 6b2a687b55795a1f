"""``evaluate``, ``predict`` and ``export``: using the checkpoint of a run, which they only read."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.build import create_state
from ctl_core.checkpoint import Checkpoints
from ctl_core.cluster.strategy import Task
from ctl_core.console import Console
from ctl_core.errors import SetupError, reason
from ctl_core.eval_data import EvaluationData
from ctl_core.evaluate import Evaluation
from ctl_core.evaluate import evaluate as run_evaluation
from ctl_core.files import from_here, written_whole
from ctl_core.predict import predict as run_prediction
from ctl_core.predict import read_inputs
from ctl_core.process_state import process_state
from ctl_core.run_folder import Run, session
from ctl_core.run_state.tracking import find
from ctl_core.settings import Config, nearest, shown
from ctl_core.state import State
from ctl_core.tools.export import check_replaceable, export_model
from ctl_core.tools.watch import watch

_NO_DATA = "create_eval_dataset: there is none, so there is nothing to evaluate."


def evaluate(callbacks: Any, config: Config, options: Mapping[str, Any]) -> dict[str, float]:
    """Evaluates a checkpoint and prints the values; with ``watch``, each that a run makes.

    Raises:
        SetupError: there is no evaluation data, or no checkpoint.
    """
    if options.get("watch"):
        if options["checkpoint"] is not None:
            raise SetupError("watch: evaluates every checkpoint; leave out --checkpoint.")
        with _built(callbacks, config) as (state, run, console):
            if state.evaluation is None:
                raise SetupError(_NO_DATA)
            return watch(state, run, console)
    with _restored(callbacks, config, options) as (state, console):
        if state.evaluation is None:
            raise SetupError(_NO_DATA)
        values = run_evaluation(state.evaluation)
        assert values is not None
        console.values(state.step, "eval", values)
    return values


def predict(callbacks: Any, config: Config, options: Mapping[str, Any]) -> Path:
    """Writes the model's outputs for a file, or for the evaluation data, as a .npz file.

    Raises:
        SetupError: the file does not fit the model, or there is no data or no checkpoint.
    """
    if options["input"] and options.get("dataset"):
        raise SetupError("input and dataset: give one of the two.")
    config = dataclasses.replace(config, limit_eval=None)
    with _restored(callbacks, config, options) as (state, console):
        path = Path(options["output"] or state.run_dir / "predictions.npz")
        if path.suffix != ".npz":
            raise SetupError(f"output: expected the name of a .npz file, got {path}.")
        _try(path)
        if options["input"]:
            source = Path(options["input"])
            batches = read_inputs(source, state.input_spec, state.context.micro_batch_size)
        elif state.evaluation is not None:
            batches = _chosen(state.evaluation, options.get("dataset"))
        else:
            raise SetupError("input: name a file, since there is no create_eval_dataset.")
        outputs = run_prediction(state.context, batches, from_hooks=not options["input"])
        with _said(path), written_whole(path) as beside, beside.open("wb") as file:
            np.savez_compressed(file, **outputs)  # type: ignore[arg-type]
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in outputs.items())
        console.say(f"step {state.step}: wrote {shapes} to {from_here(path)}")
    return path


def export(callbacks: Any, config: Config, options: Mapping[str, Any]) -> Path:
    """Writes the model of a checkpoint as a SavedModel, to runs/NAME/export unless told otherwise.

    Raises:
        SetupError: there is no checkpoint, or the folder cannot be written or holds other things.
    """
    with _restored(callbacks, config, options) as (state, console):
        path = Path(options["output"] or state.run_dir / "export")
        check_replaceable(path)
        _try(path)
        tf.summary.experimental.set_step(state.step)  # no variable that serving would lack
        _, name, model = state.context.model_for(training=False)
        found = find({name: model})
        reached = [*found.variables.values(), *found.tables]
        with _said(path):
            export_model(model, reached, state.input_spec, path)
        console.say(f"step {state.step}: wrote a SavedModel to {from_here(path)}")
    return path


def _chosen(evaluation: Evaluation, name: str | None) -> EvaluationData:
    """Returns the set of evaluation data of a name, or the only one.

    Raises:
        SetupError: there is none of that name, or several and no name.
    """
    names = list(evaluation.sets)
    there = f"(there: {', '.join(names)})"
    if name is None:
        if len(names) > 1:
            raise SetupError(
                f"dataset: create_eval_dataset returns several; name one of them {there}, such as "
                f"--dataset {names[0]}."
            )
        name = names[0]
    elif names == [""]:
        raise SetupError(
            "dataset: create_eval_dataset returns one without a name; leave out --dataset."
        )
    elif name not in names:
        raise SetupError(f"dataset: there is no {shown(name)}{nearest(name, names)} {there}")
    return evaluation.sets[name].data


def _try(path: Path) -> None:
    """Refuses a place where nothing can be written, before anything is computed for it."""
    with _said(path), tempfile.TemporaryFile(dir=path.parent):
        pass


@contextmanager
def _said(path: Path) -> Iterator[None]:
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


@contextmanager
def _restored(
    callbacks: Any, config: Config, options: Mapping[str, Any]
) -> Iterator[tuple[State, Console]]:
    """Builds the state on one device and restores the checkpoint that is asked for."""
    with _built(callbacks, config) as (state, run, console):
        record = Checkpoints(state, console).restore(options["checkpoint"], with_input=False)
        if record is None:
            raise SetupError(
                f"{from_here(run.ckpt)}: no checkpoint there yet; train the run first."
            )
        if state.context.average and record.holds("ema"):
            state.context.average.put_in()
        console.say(f"{run.shown}: checkpoint of step {record.step}.")
        yield state, console


@contextmanager
def _built(callbacks: Any, config: Config) -> Iterator[tuple[State, Run, Console]]:
    """Builds the state of a run that is only read, on one device."""
    config = dataclasses.replace(config, strategy="one_device", virtual_devices=1, workers=1)
    # Nobody need count the training data.
    config = dataclasses.replace(config, steps=None, epochs=None, ckpt_every=0, eval_every=0)
    run, console = Run(config, Task(), reading=True), Console()
    with session(run, console), process_state(config):
        yield create_state(callbacks, config, run, console), run, console
