"""Prediction: a model's outputs for a file, or for the evaluation data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.context import StepContext
from ctl_core.errors import SetupError
from ctl_core.numerics.joining import on_host, padded
from ctl_core.step import call_model, model_input


def predict(context: StepContext, batches: Any, from_hooks: bool) -> dict[str, np.ndarray]:
    """Runs the model over batches.

    Args:
        context: the model and its hooks
        batches: an iterable of batches, each with the examples along the first dimension
        from_hooks: whether ``input_pre`` makes the model's input from each; False: they are it

    Returns:
        The model's outputs by name, along the first dimension; a single one is "output". Where
        their sizes vary, they are padded: see ``joining.padded``.

    Raises:
        RunError: outputs do not fit into one array.
    """

    @tf.function(autograph=False, reduce_retracing=True)
    def outputs(batch: Any) -> Any:
        inputs = model_input(context, batch, training=False) if from_hooks else batch
        _, _, model = context.model_for(training=False)
        return call_model(model, inputs, training=False)

    collected: dict[str, list[tuple[np.ndarray, dict[int, np.ndarray]]]] = {}
    for batch in batches:
        for name, value in _named(outputs(batch)).items():
            collected.setdefault(name, []).append(on_host(value))
    return {
        part: array
        for name, values in collected.items()
        for part, array in padded(name, values).items()
    }


def _named(output: Any) -> dict[str, Any]:
    """Names the tensors of an output: a dict's by its keys, a tuple's output_0, output_1, …"""
    if isinstance(output, dict):
        return {
            name if inner == "output" else f"{name}.{inner}": tensor
            for name, part in output.items()
            for inner, tensor in _named(part).items()
        }
    if isinstance(output, tuple | list):
        flat = enumerate(tf.nest.flatten(output))
        return {f"output_{index}": _named(part)["output"] for index, part in flat}
    return {"output": output}


def read_inputs(path: Path, spec: Any, batch_size: int) -> Any:
    """Reads the model's input from a .npy or .npz file and batches it.

    Args:
        path: the file
        spec: the specification of the model's input; a dict for a .npz file with its keys
        batch_size: examples in a batch

    Raises:
        SetupError: the file is missing, or does not hold what the model takes.
    """
    try:
        content = np.load(path, allow_pickle=False)
        arrays: Any = dict(content) if isinstance(content, np.lib.npyio.NpzFile) else content
    except (OSError, ValueError) as error:
        raise SetupError(f"input: {path} cannot be read as a .npy or .npz file: {error}") from error
    if isinstance(spec, tuple | list):
        names = [f"input_{index}" for index in range(len(spec))]
        if not isinstance(arrays, dict) or set(arrays) != set(names):
            there = ", ".join(names)
            raise SetupError(f"input: {path} must be a .npz file with the arrays {there}.")
        arrays = tf.nest.pack_sequence_as(spec, [arrays[name] for name in names])
    elif isinstance(arrays, dict) and not isinstance(spec, dict):
        if len(arrays) != 1:
            raise SetupError(f"input: {path} holds {', '.join(arrays)}; the model takes one array.")
        arrays = next(iter(arrays.values()))
    if isinstance(spec, dict) and (not isinstance(arrays, dict) or set(arrays) != set(spec)):
        raise SetupError(
            f"input: {path} must be a .npz file with the arrays {', '.join(map(str, spec))}."
        )

    def fitting(expected: Any, array: np.ndarray) -> np.ndarray:
        if array.ndim != expected.shape.rank or not expected.shape[1:].is_compatible_with(
            array.shape[1:]
        ):
            raise SetupError(
                f"input: {path} has an array of shape {list(array.shape)}; the model takes "
                f"{[None, *expected.shape[1:].as_list()]}."
            )
        return array.astype(expected.dtype.as_numpy_dtype)

    tensors = tf.nest.map_structure(fitting, spec, arrays)
    return tf.data.Dataset.from_tensor_slices(tensors).batch(batch_size)
