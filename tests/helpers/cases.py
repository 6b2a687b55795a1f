"""Data, models and hooks that several tests, and the processes of their clusters, train with.

Nothing here starts TensorFlow: devices and cluster are still to be chosen.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import compare, small

EXAMPLES, FEATURES = small.EXAMPLES, small.FEATURES
regression_data, small_model, squared_error = small.data, small.create_model, small.squared_error
sgd = small.create_opt


def set_weights(model: keras.Model, seed: int = 1) -> keras.Model:
    """Gives a model weights that depend on nothing but their shapes."""
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(scale=0.3, size=w.shape) for w in model.get_weights()])
    return model


def norm_model() -> keras.Model:
    """A model with batch normalisation."""
    return small.model_with(keras.layers.BatchNormalization())


def dropout_model() -> keras.Model:
    """A model with batch normalisation and Dropout."""
    return small.model_with(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1))


def assert_weights(state: Any, expected: Any, rtol: float = 1e-6) -> None:
    """Compares all weights of a trained model with those of another, or with a list of them.

    Args:
        state: of the run
        expected: the weights, a model or the state of another run
        rtol: how far they may differ; with 0 they are the same bit for bit
    """
    if not isinstance(expected, list):
        expected = getattr(expected, "train_model", expected).weights
    compare.assert_close(state.train_model.weights, expected, rtol, 1e-6 if rtol else 0.0)


def sliced(data: Any) -> Callable[[int], tf.data.Dataset]:
    """Returns a create_dataset that reads arrays in their order, in whole batches."""
    return small.slices(data, drop_remainder=True)


def make_hooks(**hooks: Any) -> SimpleNamespace:
    """Returns hooks that train ``small_model``, quietly; what is named replaces them."""
    base: dict[str, Any] = {
        "create_dataset": sliced(regression_data()),
        "create_model": small_model,
        "create_loss": small.create_loss,
        "every_steps": {},
    }
    return SimpleNamespace(**{**base, **hooks})


def nadam(lr: Any) -> keras.optimizers.Optimizer:
    """The default of create_opt."""
    return keras.optimizers.Nadam(learning_rate=lr, epsilon=0.001)


# ---- Evaluation --------------------------------------------------------------------------------


def eval_hooks(size: int, **hooks: Any) -> SimpleNamespace:
    """Evaluates the first ``size`` examples, with a mean and a count as metrics."""
    return make_hooks(
        create_eval_dataset=small.slices(small.data(size)),
        create_metrics=lambda: {
            "error": keras.metrics.MeanAbsoluteError(),
            "seen": keras.metrics.Sum(),
        },
        metric_pre=lambda output, batch: {
            "error": (batch[1], output),
            "seen": tf.ones(tf.shape(output)[0]),
        },
        **hooks,
    )


def evaluated_by_hand(size: int) -> dict[str, float]:
    """The same by NumPy."""
    inputs, target = (part[:size] for part in regression_data())
    error = small_model()(inputs).numpy() - target
    return {"loss": (error**2).mean(), "error": abs(error).mean(), "seen": size}


# ---- Random numbers ---------------------------------------------------------------------------


def dropout_hooks(seen: list[Any]) -> SimpleNamespace:
    """Writes down what Dropout makes of ones."""

    def create_model() -> keras.Model:
        inputs = keras.Input((FEATURES,))
        dropped = keras.layers.Dropout(0.5)(inputs)
        return keras.Model(inputs, [dropped, keras.layers.Dense(1)(dropped)])

    return make_hooks(
        create_model=create_model,
        input_pre=lambda batch: tf.ones_like(batch[0]),
        loss_pre=lambda output, batch: (output[1], batch[1]),
        every_steps={1: lambda output: seen.append(output[0].numpy())},
    )


class Followed(keras.Model):
    """A network with a copy that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = small_model(), small_model()
        self.target.trainable = False

    def call(self, inputs: Any) -> Any:
        return self.online(inputs) + 0.1 * tf.stop_gradient(self.target(inputs))
