"""Data, models and hooks that are shared by tests and by the processes of their clusters.

Importing this module does not start TensorFlow, so that devices and clusters can be set up later.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden import compare, small

FEATURES = small.FEATURES
regression_data = small.data
small_model = small.create_model
sgd = small.create_opt


def norm_model() -> keras.Model:
    """Returns a model with batch normalization."""
    return small.model_with(keras.layers.BatchNormalization())


def dropout_model() -> keras.Model:
    """Returns a model with batch normalization and Dropout."""
    return small.model_with(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1))


def assert_weights(state: Any, expected: Any, rtol: float = 1e-6) -> None:
    """Asserts that all weights of a trained model are close to the expected ones.

    Args:
        state: the state of the run
        expected: a list of weights, a model, or the state of another run
        rtol: the relative tolerance; with 0, the weights must be equal bit for bit
    """
    if not isinstance(expected, list):
        expected = getattr(expected, "train_model", expected).weights
    compare.assert_close(state.train_model.weights, expected, rtol, 1e-6 if rtol else 0.0)


def sliced(data: Any) -> Callable[[int], tf.data.Dataset]:
    """Returns a ``create_dataset`` hook that reads arrays in order, in whole batches."""
    return small.slices(data, drop_remainder=True)


def create_opt(lr: Any) -> keras.optimizers.Optimizer:
    """Returns an optimizer with a slot for each variable, which is traced faster than the default.

    With the default, Nadam, a training of a small model takes half as long again.
    """
    return keras.optimizers.SGD(lr, momentum=0.9)


def make_hooks(**hooks: Any) -> SimpleNamespace:
    """Returns hooks that train ``small_model`` without reports; arguments replace or add hooks."""
    base: dict[str, Any] = {
        "create_dataset": sliced(regression_data()),
        "create_model": small_model,
        "create_loss": small.create_loss,
        "create_opt": create_opt,
        "every_steps": {},
    }
    return SimpleNamespace(**{**base, **hooks})


# ---- Evaluation --------------------------------------------------------------------------------


def eval_hooks(size: int, **hooks: Any) -> SimpleNamespace:
    """Returns hooks that evaluate the first ``size`` examples, with a mean and a count."""
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
    """Returns the loss and metrics of ``eval_hooks``, computed in NumPy."""
    inputs, target = (array[:size] for array in regression_data())
    error = small_model()(inputs).numpy() - target
    return {"loss": (error**2).mean(), "error": abs(error).mean(), "seen": size}


class Followed(keras.Model):
    """A network with a frozen copy, on which its output depends, too."""

    def __init__(self) -> None:
        super().__init__()
        self.online = small_model()
        self.target = small_model()
        self.target.trainable = False

    def call(self, inputs: Any) -> Any:
        return self.online(inputs) + 0.1 * tf.stop_gradient(self.target(inputs))


# ---- An uninterrupted run and the same run in two parts -----------------------------------------


def values(state: ctl_core.State) -> dict[str, np.ndarray]:
    """Returns all recorded variables by path, each summed over the replicas."""
    read = state.strategy.experimental_local_results
    return {
        path: np.sum([value.numpy() for value in read(variable)], axis=0)
        for path, variable in state.recording.variables.items()
    }


def assert_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(actual[path], value, err_msg=path)


def assert_resumes(
    train: Callable[..., ctl_core.State], program: Callable[[], SimpleNamespace], **settings: Any
) -> dict[str, np.ndarray]:
    """Asserts that 12 steps give the same values in one run and in parts of 5 and 7 steps.

    Returns these values. The hooks are created again for each part.
    """
    whole = values(train(program(), steps=12, run_name="whole", **settings))
    for steps in (5, 12):
        resumed = values(train(program(), steps=steps, run_name="parts", **settings))
    assert_equal(resumed, whole)
    return whole
