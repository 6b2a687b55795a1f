"""Exporting the model: a SavedModel that serves without this engine or the hooks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.errors import one_line
from ctl_core.nested import any_number, input_names, output_names, structured
from ctl_core.serving import Serving


def next_version(base: Path) -> Path:
    """Returns the folder of the next version, as TensorFlow Serving counts them: 1, 2, ..."""
    names = [path.name for path in base.iterdir()] if base.is_dir() else []
    versions = [int(name) for name in names if re.fullmatch("[0-9]{1,18}", name)]
    return base / str(max(versions, default=0) + 1)


def save_model(serving: Serving, folder: Path) -> None:
    """Writes a SavedModel, from raw inputs to the output.

    The function ``serve`` takes raw inputs in their structure; the signature ``serving_default``
    takes them by the names of ``input_names`` and returns the output by those of ``output_names``;
    ``tf_example``, where the raw inputs can be in a tf.Example, takes a vector of such, serialized.

    Raises:
        SetupError: something that the model uses cannot be found, so that it cannot be saved.
        OSError, tf.errors.OpError: it cannot be written.
    """
    module = tf.Module()
    module.resources = serving.resources
    module.serve = tf.function(
        lambda inputs: serving.traced(inputs),
        autograph=False,
        input_signature=[serving.input_spec],
    )
    by_name = _by_name(serving)
    signatures = {"serving_default": by_name, "serve": by_name}
    features = _example_features(serving.input_spec)
    if features is not None:
        signatures["tf_example"] = _of_examples(serving, features)
    try:
        tf.saved_model.save(module, str(folder), signatures)
    except AssertionError as error:  # a resource that no attribute leads to
        raise serving.hook.reject(
            "uses something that cannot be found by its attributes, so that it cannot be saved: "
            f"{one_line(error, 200)}"
        ) from error


def _by_name(serving: Serving) -> Any:
    """Returns the graph function of ``serving_default``: raw inputs and outputs by name."""
    spec = {name: any_number(part, name) for name, part in input_names(serving.input_spec).items()}

    @tf.function(autograph=False, input_signature=[spec])
    def by_name(inputs: dict[str, Any]) -> dict[str, Any]:
        return _dense_outputs(serving.traced(structured(serving.input_spec, inputs)))

    return by_name


def _dense_outputs(output: Any) -> dict[str, tf.Tensor]:
    """Returns the parts of an output by name: ragged ones padded, as ``predict`` writes them."""
    found = {}
    for name, part in output_names(output).items():
        if isinstance(part, tf.RaggedTensor):
            for axis in range(1, 1 + part.ragged_rank):
                lengths = part.row_lengths(axis)
                if isinstance(lengths, tf.RaggedTensor):
                    lengths = lengths.to_tensor()
                found[f"{name}.lengths" + (f"_{axis}" if axis > 1 else "")] = lengths
            part = part.to_tensor()
        elif isinstance(part, tf.SparseTensor):
            part = tf.sparse.to_dense(part)
        found[name] = part
    return found


def _example_features(spec: Any) -> dict[str, Any] | None:
    """Returns the features of a tf.Example that holds the raw inputs; None if it cannot.

    Such a one has lists of floats, whole numbers and texts. Where the second dimension is open, the
    lists of a batch are padded with zeros to the longest.
    """
    features: dict[str, Any] = {}
    for name, part in input_names(spec).items():
        dtype, shape = _of_example(part.dtype), part.shape
        if dtype is None or not shape.rank or isinstance(part, tf.SparseTensorSpec):
            return None
        if isinstance(part, tf.RaggedTensorSpec):
            if shape.rank != 2 or part.ragged_rank != 1:
                return None
            features[name] = tf.io.RaggedFeature(dtype, row_splits_dtype=part.row_splits_dtype)
        elif shape[1:].is_fully_defined():
            features[name] = tf.io.FixedLenFeature(shape[1:], dtype)
        elif shape[2:].is_fully_defined():
            features[name] = tf.io.FixedLenSequenceFeature(shape[2:], dtype, allow_missing=True)
        else:
            return None
    return features


def _of_example(dtype: tf.DType) -> tf.DType | None:
    if dtype == tf.string:
        return tf.string
    if dtype.is_floating:
        return tf.float32
    return tf.int64 if dtype.is_integer or dtype.is_bool else None


def _of_examples(serving: Serving, features: dict[str, Any]) -> Any:
    names = input_names(serving.input_spec)

    @tf.function(
        autograph=False, input_signature=[tf.TensorSpec([None], tf.string, name="examples")]
    )
    def of_examples(examples: tf.Tensor) -> dict[str, Any]:
        parsed = tf.io.parse_example(examples, features)
        inputs = {
            name: parsed[name] if part.dtype == tf.string else tf.cast(parsed[name], part.dtype)
            for name, part in names.items()
        }
        return _dense_outputs(serving.traced(structured(serving.input_spec, inputs)))

    return of_examples
