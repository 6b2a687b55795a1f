"""Prediction: a model's outputs for a file of raw inputs, or for the evaluation data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.model.state import State
from ctl_core.run.errors import SetupError
from ctl_core.run.files import from_here
from ctl_core.serving.inference import create_inference, input_names, output_names, pack_inputs


def predict_outputs(state: State, source: Path | None, name: str | None) -> dict[str, np.ndarray]:
    """Returns the model's outputs by name.

    Args:
        state: with a restored checkpoint
        source: the file with what clients send; None for the evaluation data
        name: which set of these

    Raises:
        SetupError: the file does not fit the model, or there is no data.
        RunError: the model cannot take the values.
    """
    model = create_inference(state)
    if source is not None:
        size = state.config.eval_batch_size or state.config.batch_size
        return join_outputs(map(model, read_batches(source, model.input_spec, size)))
    if state.evaluation is None:
        raise SetupError("input: name a file, since there is no create_eval_dataset.")
    return join_outputs(map(model.run_batch, state.evaluation.sets[name or ""].make()))


def read_batches(path: Path, spec: Any, size: int) -> Iterator[Any]:
    """Yields batches of what a client would send from a .npy or .npz file.

    Args:
        path: the file
        spec: of the inputs; several are in a .npz file under the names of ``input_names``
        size: of a batch

    Raises:
        SetupError: the file does not hold what the model takes.
    """
    names, content = input_names(spec), np.load(path)
    arrays = {"": content} if isinstance(content, np.ndarray) else dict(content)
    if len(names) == len(arrays) == 1:
        arrays = dict(zip(names, arrays.values(), strict=True))
    numbers = {len(array) for array in arrays.values() if array.ndim}
    if arrays.keys() != names.keys() or len(numbers) != 1:
        held = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise SetupError(
            f"input: {from_here(path)} holds {held}; expected arrays of as many examples each, "
            f"called {', '.join(names)}."
        )
    for start in range(0, numbers.pop(), size):
        rows = slice(start, start + size)
        batch = {name: array[rows] if array.ndim else array for name, array in arrays.items()}
        yield pack_inputs(spec, batch)


def make_dense(output: Any) -> dict[str, tf.Tensor]:
    """Returns the parts of an output by name: ragged ones padded, with their lengths beside them.

    ``NAME.lengths`` says how much of each example is its own, along axis 1.
    """
    found = {}
    for name, part in output_names(output).items():
        if isinstance(part, tf.RaggedTensor):
            found[f"{name}.lengths"] = part.row_lengths()
            part = part.to_tensor()
        elif isinstance(part, tf.SparseTensor):
            part = tf.sparse.to_dense(part)
        found[name] = part
    return found


def join_outputs(outputs: Iterable[Any]) -> dict[str, np.ndarray]:
    """Joins the outputs of batches by name; those of other sizes are padded, as ragged ones are."""
    found: dict[str, list[np.ndarray]] = {}
    for output in outputs:
        for name, value in make_dense(output).items():
            array = np.atleast_1d(value.numpy())
            is_text = array.dtype == object
            found.setdefault(name, []).append(array.astype(bytes) if is_text else array)
    arrays = {}
    for name, parts in found.items():
        if len({part.shape[1:] for part in parts}) == 1:
            arrays[name] = np.concatenate(parts)
            continue
        rows = [row for part in parts for row in part]
        sizes = np.max([row.shape for row in rows], axis=0)
        arrays[name] = np.zeros((len(rows), *sizes), np.result_type(*parts))
        for padded, row in zip(arrays[name], rows, strict=True):
            padded[tuple(map(slice, row.shape))] = row
        if f"{name}.lengths" not in found:
            arrays[f"{name}.lengths"] = np.array([len(row) for row in rows])
    return arrays
