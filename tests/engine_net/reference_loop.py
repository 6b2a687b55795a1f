"""The hooks of a small program, and a plain loop that trains the same program on one device.

The loop does not use the engine, and nothing in it is compiled or distributed. It is simple enough
to be verified by reading.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

EXAMPLES = 100
FEATURES = 5
BATCH_SIZE = 16
LEARNING_RATE = 0.05
# This norm is so small that every gradient of the program is clipped.
CLIP_NORM = 0.1
REGULARIZATION = 0.01

# The type of the fixture ``train``, which takes hooks and settings and returns the trained state.
Train: TypeAlias = Callable[..., Any]


def create_arrays() -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples: inputs [100, 5] and targets [100, 1], float32."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(EXAMPLES, FEATURES)).astype("float32")
    targets = np.tanh(inputs @ random.normal(size=(FEATURES, 1))).astype("float32")
    return inputs, targets


def create_dataset(global_batch_size: int) -> tf.data.Dataset:
    """Reads the examples in order, in complete batches. The remainder of a pass is dropped."""
    return tf.data.Dataset.from_tensor_slices(create_arrays()).batch(
        global_batch_size, drop_remainder=True
    )


def create_eval_dataset(global_batch_size: int) -> tf.data.Dataset:
    """Reads the last 37 examples. The batch sizes of these tests do not divide 37."""
    inputs, targets = create_arrays()
    return tf.data.Dataset.from_tensor_slices((inputs[-37:], targets[-37:])).batch(
        global_batch_size
    )


def create_model() -> keras.Model:
    """Builds a model whose initial weights depend only on the shapes of the weights."""
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(REGULARIZATION)),
            keras.layers.Dense(1),
        ]
    )
    random = np.random.default_rng(1)
    model.set_weights([random.normal(scale=0.3, size=w.shape) for w in model.get_weights()])
    return model


def create_loss() -> Any:
    """Returns a function that computes the squared error of each example."""
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2, axis=1)


def create_opt(lr: Any) -> keras.optimizers.Optimizer:
    """Returns plain SGD, because Adam would hide gradients of the wrong scale."""
    return keras.optimizers.SGD(lr)


def update_pre(gradients: list[tf.Tensor]) -> Any:
    """Clips the sum of the gradients over all devices."""
    return tf.clip_by_global_norm(gradients, CLIP_NORM)[0], gradients


def create_metrics() -> dict[str, keras.Metric]:
    """Returns the mean absolute error as a metric."""
    return {"error": keras.metrics.MeanAbsoluteError()}


def create_hooks(**changed: Any) -> SimpleNamespace:
    """Returns the hooks of the program. Hooks that are passed by name replace the defaults."""
    functions = [
        create_dataset, create_eval_dataset, create_model, create_loss, create_opt, update_pre,
        create_metrics,
    ]  # fmt: skip
    hooks: dict[str, Any] = {function.__name__: function for function in functions}
    return SimpleNamespace(**{**hooks, "every_steps": {}, **changed})


def train_plainly(steps: int, model: keras.Model | None = None) -> keras.Model:
    """Trains the program in a plain loop on one device and returns the model."""
    model = model or create_model()
    loss_of_examples = create_loss()
    optimizer = create_opt(LEARNING_RATE)
    batches: Iterable[Any] = create_dataset(BATCH_SIZE).repeat().take(steps)
    for inputs, targets in batches:
        with tf.GradientTape() as tape:
            output = model(inputs, training=True)
            losses = loss_of_examples((output, targets))
            loss = tf.reduce_sum(losses) / BATCH_SIZE + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        updates, _ = update_pre(gradients)
        optimizer.apply(updates, model.trainable_variables)
    return model


def assert_close(weights: Iterable[Any], expected: Iterable[Any]) -> None:
    """Asserts that variables are equal up to the rounding errors of sums."""
    for weight, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(
            weight.numpy(), other.numpy(), rtol=1e-5, atol=1e-6, err_msg=other.path
        )


def assert_equal(weights: Iterable[Any], expected: Iterable[Any]) -> None:
    """Asserts that variables are equal bit for bit."""
    for weight, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(weight.numpy(), other.numpy(), err_msg=other.path)
