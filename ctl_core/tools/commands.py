"""``evaluate``, ``predict`` and ``export``: using the checkpoint of a run, which they only read."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.console import Console
from ctl_core.errors import SetupError, reason
from ctl_core.eval_data import create_eval_data
from ctl_core.evaluate import Evaluation
from ctl_core.evaluate import evaluate as run_evaluation
from ctl_core.files import from_here, refuse_links, written_whole
from ctl_core.predict import gather_outputs, predict_on_replicas, read_inputs
from ctl_core.serving import Serving, create_serving
from ctl_core.settings import Config
from ctl_core.state import State
from ctl_core.tools.export import next_version, save_model
from ctl_core.tools.restored import built, restored
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
        with built(callbacks, config) as (state, run, console):
            if state.evaluation is None:
                raise SetupError(_NO_DATA)
            return watch(state, run, console)
    with restored(callbacks, config, options["checkpoint"]) as (state, _, console):
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
    source = Path(options["input"]) if options["input"] else None
    if options["output"]:
        _check_output(Path(options["output"]), source)
    with restored(callbacks, config, options["checkpoint"], devices="all") as (state, _, console):
        path = Path(options["output"] or state.run_dir / _predictions(source))
        _try(path)
        serving = create_serving(state)
        name = None
        if source is None and state.evaluation is not None:
            name = _chosen(state.evaluation, options.get("dataset"))
        spec, batches = _inputs(state, config, serving, source, name, console)
        if state.context.replicas > 1:
            model = serving.of_batch if source is None else serving.function
            outputs = predict_on_replicas(state.strategy, model, spec, batches)
        else:
            outputs = map(serving.of_batch if source is None else serving.traced, batches)
        try:
            arrays = gather_outputs(outputs)
        except tf.errors.OpError as error:
            raise serving.failure(error) from error
        with _said(path), written_whole(path) as beside, beside.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        console.say(f"step {state.step}: wrote {shapes} to {from_here(path)}")
    return path


def _inputs(
    state: State,
    config: Config,
    serving: Serving,
    source: Path | None,
    name: str | None,
    console: Console,
) -> tuple[Any, Iterable[Any]]:
    """Returns what a prediction is for, in batches, and their specification.

    Raises:
        SetupError: the file does not fit the model, or there is no data.
    """
    # Whatever the replicas: a batch of another size is rounded differently.
    size = config.batch_size // config.accumulate_steps
    if source is not None:
        _note(serving, console)
        return serving.input_spec, read_inputs(source, serving.input_spec, size)
    if state.evaluation is None or name is None:
        raise SetupError("input: name a file, since there is no create_eval_dataset.")
    if serving.of_batch is None:
        raise SetupError(f"input: name a file. {serving.note}")
    data = state.evaluation.sets[name].data
    if state.context.replicas > 1:
        data = create_eval_data(state.hooks, config.eval_batch_size or size)[name]
    return data.dataset.element_spec, iter(data)


def _check_output(path: Path, source: Path | None) -> None:
    if path.suffix != ".npz":
        raise SetupError(f"output: expected the name of a .npz file, got {path}.")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise SetupError(
            f"output: {from_here(path)} is the file of --input, which would be lost; name another "
            "one."
        )


def _predictions(source: Path | None) -> str:
    """Returns what a file of predictions is called: those for one input do not replace others."""
    return "predictions.npz" if source is None else f"predictions-{source.stem}.npz"


def export(callbacks: Any, config: Config, options: Mapping[str, Any]) -> Path:
    """Writes the model of a checkpoint as a SavedModel: the next version in a folder.

    Returns:
        Where it is, runs/NAME/export/1 say.

    Raises:
        SetupError: there is no checkpoint, or the place cannot be written.
    """
    output = options["output"]
    with restored(callbacks, config, options["checkpoint"]) as (state, _, console):
        base = Path(output or state.run_dir / "export")
        if output is None:
            refuse_links(state.run_dir, [base])
        path = next_version(base)
        _try(path if base.is_dir() else base)
        tf.summary.experimental.set_step(state.step)  # no variable that serving would lack
        serving = create_serving(state)
        _note(serving, console)
        with _said(path):
            base.mkdir(exist_ok=True)
            with written_whole(path, folder=True) as beside:
                save_model(serving, beside)
        console.say(f"step {state.step}: wrote a SavedModel to {from_here(path)}")
    return path


def _note(serving: Serving, console: Console) -> None:
    if serving.note:
        console.say(serving.note)


def _chosen(evaluation: Evaluation, name: str | None) -> str:
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
