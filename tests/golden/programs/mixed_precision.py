"""Mixed precision through a Keras policy, after the guides of Keras and TensorFlow.

The plain loop uses ``keras.optimizers.LossScaleOptimizer``. The tape receives the scaled loss, and
the optimizer receives the scaled gradients, which it checks, unscales and applies. In both loops,
the scale starts at 2^15 and changes by factors of 2, so that scaling is exact. One example has an
infinite weight. Its update is skipped, and the scale is reduced.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import BATCH, STEPS, Program, Trained
from tests.golden.reference import RATE

OVERFLOW = 7
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.uniform(size=(96, 16)).astype("float32")
LABELS = RANDOM.integers(0, 4, size=96)
WEIGHTS = np.ones(96, "float32")
WEIGHTS[OVERFLOW * BATCH - 1] = np.inf
create_dataset = small.slices((IMAGES, LABELS, WEIGHTS))


def create_model() -> keras.Model:
    keras.mixed_precision.set_global_policy("mixed_float16")
    keras.utils.set_random_seed(2)
    inputs = keras.Input((16,), name="digits")
    hidden = keras.layers.Dense(8, activation="relu", name="dense_1")(inputs)
    hidden = keras.layers.Dense(8, activation="tanh", name="dense_2")(hidden)
    logits = keras.layers.Dense(4, name="dense_logits")(hidden)
    outputs = keras.layers.Activation("softmax", dtype="float32", name="predictions")(logits)
    return keras.Model(inputs, outputs)


def weighted(loss_input: Any) -> Any:
    output, label, weight = loss_input
    return weight * keras.losses.sparse_categorical_crossentropy(label, output)


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_model=create_model,
    create_loss=lambda: weighted,
    create_opt=lambda lr: keras.optimizers.SGD(lr, momentum=0.5),
    input_pre=lambda batch: batch[0],
    loss_pre=lambda output, batch: (output, batch[1], batch[2]),
    grad_pre=lambda loss, train_model: (loss, 0.0, train_model.trainable_variables),
)


def train_plainly() -> Trained:
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
    return [*model.trainable_variables, inner.iterations], {}


PROGRAM = Program(
    hooks,
    train_plainly,
    weights=lambda state: [*state.train_model.trainable_variables, state.optimizer.iterations],
    # Each device rounds the gradients of its examples to float16. A processor with float16
    # arithmetic also rounds differently in a graph than in eager execution.
    tolerance=1e-7,
    absolute=1e-4,
)
