"""Hooks of small models, one for each kind of layer in the table of ``make exports``.

``--hparams.layer NAME`` chooses the model. All of them classify random sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

EXAMPLES = 96
TRAINING = 64  # the number of examples that are used for training
CLASSES = 4
SHAPE = (12, 8)

every_steps: dict[int, Any] = {}
Tensors = dict[str, Any]


def attend(vectors: Any) -> Any:
    """Returns the result of self-attention in which each place sees only the places before it."""
    return keras.layers.MultiHeadAttention(2, 4)(vectors, vectors, use_causal_mask=True)


# What each model does with the vectors before it flattens the result.
LAYERS: dict[str, Callable[[Any], Any]] = {
    "LSTM": lambda vectors: keras.layers.LSTM(8)(vectors),
    "GRU": lambda vectors: keras.layers.GRU(8)(vectors),
    "Bidirectional LSTM": lambda vectors: keras.layers.Bidirectional(keras.layers.LSTM(4))(vectors),
    "causal Conv1D": lambda vectors: keras.layers.Conv1D(8, 3, padding="causal")(vectors),
    "MultiHeadAttention": attend,
    "LayerNormalization": lambda vectors: keras.layers.LayerNormalization()(vectors),
    "Embedding": lambda ids: keras.layers.Embedding(20, 8)(ids),
    "two inputs": lambda vectors: vectors,
    "two outputs": lambda vectors: keras.layers.Dense(8, "gelu")(vectors),
}


def read(first: int, last: int) -> tf.data.Dataset:
    """Returns examples as a dict: a sequence of vectors, one of numbers, and the class."""
    random = np.random.default_rng(0)
    examples = {
        "vectors": random.normal(size=(EXAMPLES, *SHAPE)).astype("float32"),
        "ids": random.integers(0, 20, (EXAMPLES, SHAPE[0])).astype("int32"),
        "label": random.integers(0, CLASSES, EXAMPLES),
    }
    return tf.data.Dataset.from_tensor_slices(
        {name: array[first:last] for name, array in examples.items()}
    )


def create_dataset(global_batch_size: int) -> tf.data.Dataset:
    """Returns the training data."""
    return read(0, TRAINING).batch(global_batch_size, drop_remainder=True)


def create_eval_dataset(global_batch_size: int) -> tf.data.Dataset:
    """Returns the evaluation data."""
    return read(TRAINING, EXAMPLES).batch(global_batch_size)


def create_metrics() -> dict[str, keras.Metric]:
    """Returns the metric of classes."""
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


def create_loss() -> Callable[[Any], tf.Tensor]:
    """Returns the cross-entropy of each example."""
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda pair: cross_entropy(pair[1], pair[0])


def input_pre(batch: Tensors, hparams: dict[str, str]) -> Any:
    """Returns the vectors, the numbers, or both."""
    if hparams["layer"] == "Embedding":
        return batch["ids"]
    if hparams["layer"] == "two inputs":
        return {"vectors": batch["vectors"], "ids": batch["ids"]}
    return batch["vectors"]


def take_logits(output: Any) -> tf.Tensor:
    """Returns the logits of a model with one or with two outputs."""
    return output["logits"] if isinstance(output, dict) else output


def loss_pre(output: Any, batch: Tensors) -> Any:
    """Returns the logits and the classes."""
    return take_logits(output), batch["label"]


def metric_pre(output: Any, batch: Tensors) -> Any:
    """Returns the classes and the logits."""
    return batch["label"], take_logits(output)


def create_model(hparams: dict[str, str]) -> keras.Model:
    """Returns the model that ``layer`` names."""
    name = hparams["layer"]
    vectors = keras.Input(SHAPE, name="vectors")
    ids = keras.Input(SHAPE[:1], dtype="int32", name="ids")
    inputs: Any = ids if name == "Embedding" else vectors
    hidden = LAYERS[name](inputs)
    if name == "two inputs":
        inputs = {"vectors": vectors, "ids": ids}
        hidden = keras.layers.Concatenate()([hidden, keras.layers.Embedding(20, 8)(ids)])
    logits = keras.layers.Dense(CLASSES)(keras.layers.Flatten()(hidden))
    if name == "two outputs":
        return keras.Model(inputs, {"logits": logits, "mean": keras.ops.mean(hidden, 1)})
    return keras.Model(inputs, logits)
