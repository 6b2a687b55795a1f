"""Tests that the first NaN or infinity is reported with step, op and line, and all are counted."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.golden import small
from tests.golden.engine import locate, read_table
from tests.helpers.cases import assert_weights, make_hooks, norm_model, regression_data, sliced
from tests.helpers.project import Cli, Train, failed

# The program has 40 examples in batches of 8. All inputs of one example in the second batch are 0.
DATA = f"""{small.CALLBACKS}
x, y = small.data(40)
x[13] = 0.0
create_dataset = small.slices((x, y), drop_remainder=True)
def create_model():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
"""
PROGRAMS = read_table(
    """
== a layer -> step 2: NaN from RealDiv ( | norm
class Norm(keras.layers.Layer):
    def call(self, inputs):
        return inputs / tf.reduce_sum(inputs, 1, keepdims=True)  # here
def create_model():
    return keras.Sequential([keras.Input((5,)), Norm(name="norm"), keras.layers.Dense(1)])
== grad_pre -> step 1: infinity from SqrtGrad ( | ), in the gradient of | , grad_pre (
def grad_pre(loss, train_model):
    norm = tf.norm(train_model.trainable_variables[1])  # here
    return loss, norm, train_model.trainable_variables
== input_pre -> step 2: NaN from RealDiv ( | ), input_pre (
def input_pre(batch):
    inputs = batch[0]
    if tf.reduce_any(inputs > 0.0):
        inputs = 2.0 * inputs
    return inputs / tf.reduce_max(inputs, 1, keepdims=True)  # here
every_steps = {1: lambda loss: None}
== update_pre -> step 1: | from RealDiv ( | ), update_pre (
def update_pre(gradients):
    return [g / (g - g) for g in gradients], gradients  # here
== missing values -> step 2: NaN from IteratorGetNext ( | ), create_dataset (
x[13, 1] = np.nan
data = tf.data.Dataset.from_tensor_slices((x, y))
def create_dataset(per_replica_batch_size):  # here
    return data.batch(per_replica_batch_size, drop_remainder=True)
== a weight that a host hook has spoilt -> step 4: NaN from ReadVariableOp ( | dense
def spoil(train_model):
    train_model.layers[0].kernel.assign(np.full([5, 1], np.nan))
every_steps = {3: spoil}
"""
)


@pytest.mark.parametrize("name", small.slow_but("a layer", "update_pre", of=PROGRAMS))
def test_anomaly_is_traced_to_step_op_hook_and_line(cli: Cli, name: str) -> None:
    code, words = PROGRAMS[name]
    source = f"{DATA}{code}\n"
    flags = ("--virtual-devices", "1" if name == "a layer" else "2")
    failed(cli(source, "--detect-anomaly", *flags), *words, *locate(source))
    tf.math.log(tf.constant(-1.0))  # After the training, ops are no longer checked.


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"logical_replicas": 4}])
def test_a_deterministic_loss_is_no_anomaly(train: Train, settings: Any) -> None:
    """A NaN that TensorFlow's deterministic loss contains for invalid labels is not reported."""
    inputs, target = regression_data()
    labels = (target[:, 0] > 0).astype("int64")
    hooks = make_hooks(
        create_dataset=sliced((inputs, labels)),
        create_model=lambda: keras.Sequential([keras.layers.Dense(2)]),
        create_loss=lambda: (
            lambda pair: keras.losses.sparse_categorical_crossentropy(
                pair[1], pair[0], from_logits=True
            )
        ),
    )
    assert train(hooks, steps=2, batch_size=8, detect_anomaly=True, **settings).step == 2


@pytest.mark.slow
def test_detect_anomaly_leaves_weights_of_a_sound_run_alone(train: Train) -> None:
    hooks = make_hooks(create_model=norm_model)
    settings = {"steps": 14, "batch_size": 8, "virtual_devices": 2, "last_batch": "keep"}
    plain = train(hooks, run_name="plain", **settings)
    assert_weights(train(hooks, detect_anomaly=True, **settings), plain)


# ---- Messages and counts without detect_anomaly --------------------------------------------------

BATCH = 16


@pytest.mark.parametrize(
    ("ends", "settings"),
    [
        ((9,), {"jit_compile": True}),
        pytest.param((5, 9), {"virtual_devices": 2, "accumulate_steps": 2}, marks=pytest.mark.slow),
    ],
)
def test_first_step_with_a_loss_that_is_not_finite_is_named(
    train: Train, capsys: pytest.CaptureFixture[str], ends: tuple[int, ...], settings: Any
) -> None:
    """Only the first step with a NaN loss is named, even if the run is resumed after this step."""
    inputs, target = (np.tile(array, (2, 1))[: 12 * BATCH] for array in regression_data())
    target[[step * BATCH - 1 for step in (3, 4, 7)]] = np.nan
    for steps in ends:
        hooks = make_hooks(create_dataset=sliced((inputs, target)))
        state = train(hooks, steps=steps, **settings)
    assert not state.diverged
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        printed.count("the loss of step 3 is not finite; --detect-anomaly finds the op, layer") == 1
    )
    assert "the loss was not finite in 3 of 9 steps, first in step 3, last in step 7." in printed


def test_nan_gradients_are_counted(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN gradients are counted even if the loss is finite. Here they are 0 times infinity."""

    def grad_pre(loss: Any, train_model: Any, step: Any) -> Any:
        zeros = 0.0 * train_model.weights[-1]
        extra = tf.cond(step == 3, lambda: tf.norm(zeros), lambda: 0.0)
        return loss + extra, 0.0, train_model.trainable_variables

    train(make_hooks(grad_pre=grad_pre), steps=6, virtual_devices=2)
    printed = " ".join(capsys.readouterr().out.split())
    assert "update_pre received NaN in gradients in 1 of 6 steps with a finite loss;" in printed


def test_nan_gradients_are_counted_for_every_update_pre(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN gradients are counted even if ``update_pre`` replaces the gradient that contains NaN."""

    def grad_pre(loss: Any, train_model: Any) -> Any:
        return loss + tf.norm(0.0 * train_model.weights[-1]), 0.0, train_model.trainable_variables

    def update_pre(gradients: Any) -> Any:
        hidden, *others = gradients[:-1]
        return [hidden, *others, tf.zeros_like(gradients[-1])], gradients

    train(make_hooks(grad_pre=grad_pre, update_pre=update_pre), steps=1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "update_pre received NaN in gradients in 1 of 1 steps with a finite loss;" in printed
