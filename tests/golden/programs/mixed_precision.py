"""Mixed precision by a policy of the model's own, after Keras' and TensorFlow's guides to it.

The plain loop has ``keras.optimizers.LossScaleOptimizer``: it gives the scaled loss to the tape and
the scaled gradients to the optimizer, which checks, unscales and applies them. Both start at 2^15
and change by factors of 2, so that scaling is exact. One example has an infinite weight: its update
is skipped, and the scale falls.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, RATE, STEPS, Program

OVERFLOW = 7
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.uniform(size=(96, 16)).astype("float32")
LABELS = RANDOM.integers(0, 4, size=96)
WEIGHTS = np.ones(96, "float32")
WEIGHTS[OVERFLOW * BATCH - 1] = np.inf

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS, WEIGHTS))
    return data.batch(per_replica_batch_size)


def create_model() -> keras.Model:
    keras.mixed_precision.set_global_policy("mixed_float16")
    keras.utils.set_random_seed(2)
    inputs = keras.Input((16,), name="digits")
    hidden = keras.layers.Dense(8, activation="relu", name="dense_1")(inputs)
    hidden = keras.layers.Dense(8, activation="tanh", name="dense_2")(hidden)
    logits = keras.layers.Dense(4, name="dense_logits")(hidden)
    outputs = keras.layers.Activation("softmax", dtype="float32", name="predictions")(logits)
    return keras.Model(inputs, outputs)


def input_pre(batch: Any) -> Any:
    return batch[0]


def loss_pre(output: Any, batch: Any) -> Any:
    return output, batch[1], batch[2]


def weighted(loss_input: Any) -> Any:
    output, label, weight = loss_input
    return weight * keras.losses.sparse_categorical_crossentropy(label, output)


def grad_pre(loss: Any, train_model: Any) -> Any:
    return loss, 0.0, train_model.trainable_variables


def update_pre(gradients: Any) -> Any:
    return gradients, gradients


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=lambda: weighted,
        create_opt=lambda lr: keras.optimizers.SGD(lr, momentum=0.5),
        input_pre=input_pre,
        loss_pre=loss_pre,
        grad_pre=grad_pre,
        update_pre=update_pre,
        every_steps={},
    )


# ---- The same as a plain loop -----------------------------------------------------------------


@functools.cache
def train_plainly() -> list[Any]:
    before = keras.config.dtype_policy()
    model = create_model()
    keras.config.set_dtype_policy(before)
    inner = keras.optimizers.SGD(RATE, momentum=0.5)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    optimizer.build(model.trainable_variables)
    for inputs, label, weight in create_dataset(BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(weighted((model(inputs, training=True), label, weight)))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert int(inner.iterations.numpy()) == STEPS - 1
    return [*model.trainable_variables, inner.iterations]


PROGRAM = Program(
    hooks,
    train_plainly,
    weights=lambda state: [*state.train_model.trainable_variables, state.optimizer.iterations],
    # Each device rounds the gradients of its examples to float16; a processor that multiplies in
    # float16 itself rounds otherwise in a graph than step by step.
    tolerance=1e-7,
    absolute=1e-4,
)
