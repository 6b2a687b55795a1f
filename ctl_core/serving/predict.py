"""Prediction: a model's outputs for a file of raw inputs, or for the evaluation data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.errors import RunError, SetupError
from ctl_core.nested import output_names
from ctl_core.numerics.joining import varying_axes
from ctl_core.serving.inference import create_inference
from ctl_core.serving.raw import read_file
from ctl_core.state import State


def predict_outputs(state: State, source: Path | None, name: str | None) -> dict[str, np.ndarray]:
    """Returns the model's outputs by name.

    Args:
        state: with a restored checkpoint
        source: the file with what clients send; None for the evaluation data
        name: which set of these

    Raises:
        SetupError: the file does not fit the model, or there is no data.
        RunError: the model cannot take the values, or the outputs do not fit into arrays.
    """
    inference = create_inference(state)
    run = inference.run_batch if source is None else inference.run
    if source is not None:
        size = state.config.eval_batch_size or state.config.batch_size
        batches: Iterable[Any] = cut_batches(read_file(source, inference.input_spec), size)
    elif state.evaluation is None:
        raise SetupError("input: name a file, since there is no create_eval_dataset.")
    else:
        batches = state.evaluation.sets[name or ""].make()
    try:
        return gather_outputs(map(make_dense, map(run, batches)))
    except tf.errors.OpError as error:
        raise inference.describe_failure(error) from error


def cut_batches(inputs: Any, size: int) -> Iterator[Any]:
    """Yields batches of tensors whose first dimensions are the examples."""
    parts = tf.nest.flatten(inputs)
    number = next(part.shape[0] for part in parts if part.shape.rank)
    for start in range(0, number, size):
        yield tf.nest.map_structure(
            lambda part, start=start: part[start : start + size] if part.shape.rank else part,
            inputs,
        )


def make_dense(output: Any) -> dict[str, tf.Tensor]:
    """Returns the parts of an output by name: ragged ones padded, with their lengths beside them.

    ``NAME.lengths`` are those of axis 1, ``NAME.lengths_2`` those of axis 2.
    """
    found = {}
    for name, part in output_names(output).items():
        if isinstance(part, tf.RaggedTensor):
            for axis in range(1, 1 + part.ragged_rank):
                lengths = part.row_lengths(axis)
                dense = isinstance(lengths, tf.Tensor)
                found[_name_lengths(name, axis)] = lengths if dense else lengths.to_tensor()
            part = part.to_tensor()
        elif isinstance(part, tf.SparseTensor):
            part = tf.sparse.to_dense(part)
        found[name] = part
    return found


def _name_lengths(name: str, axis: int) -> str:
    return f"{name}.lengths" + (f"_{axis}" if axis > 1 else "")


def gather_outputs(outputs: Iterable[dict[str, tf.Tensor]]) -> dict[str, np.ndarray]:
    """Joins the outputs of batches by name.

    Outputs of different sizes along an axis are padded with zeros to the largest; their lengths, as
    ``make_dense`` names them, say how much of each example is its own.

    Raises:
        RunError: outputs do not fit into one array.
    """
    found: dict[str, list[np.ndarray]] = {}
    for output in outputs:
        for name, value in output.items():
            array = value.numpy()
            found.setdefault(name, []).append(
                array.astype(bytes) if array.dtype == object else array  # texts
            )
    arrays = {}
    for name, parts in found.items():
        shapes = [part.shape for part in parts]
        if len(set(map(len, shapes))) > 1:
            several = " and ".join(str(list(shape)) for shape in sorted(set(shapes))[:3])
            raise RunError(
                f"predict: the output '{name}' has shapes {several}; one file needs one rank."
            )
        if not shapes[0]:  # a number for each batch
            arrays[name] = np.array(parts)
            continue
        arrays[name] = _join(parts)
        for axis in varying_axes(shapes) if ".lengths" not in name else ():
            if (of_axis := _name_lengths(name, axis)) not in found:
                arrays[of_axis] = np.concatenate([np.full(s[0], s[axis]) for s in shapes])
    return arrays


def _join(parts: list[np.ndarray]) -> np.ndarray:
    """Joins arrays along the first axis, padded along the others to the largest."""
    largest = (max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True))
    whole = np.zeros((sum(map(len, parts)), *largest), np.result_type(*parts))
    start = 0
    for part in parts:
        whole[(slice(start, start + len(part)), *map(slice, part.shape[1:]))] = part
        start += len(part)
    return whole
