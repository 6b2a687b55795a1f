"""``detect_anomaly``: the first NaN or infinity is named, with step, op and line."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.helpers.cases import assert_weights, make_hooks, norm_model
from tests.helpers.fixtures import Train
from tests.helpers.project import PIECES, Cli, failed, mistakes, source_of, where

# Of 40 examples in batches of 8, one of the second batch is 0.
DATA = PIECES["imports"].replace("y = x.sum", "x[:] += 0.1\nx[13] = 0.0\ny = x.sum")
PROGRAMS = mistakes(
    """
== a layer
class Norm(keras.layers.Layer):
    def call(self, inputs):
        return inputs / tf.reduce_sum(inputs, 1, keepdims=True)  # here
def create_model():
    return keras.Sequential([keras.Input((2,)), Norm(name="norm"), keras.layers.Dense(1)])
-> step 2: NaN from RealDiv ( | norm
== one of two gradients of a loss
def create_loss():
    def loss(pair):
        far = tf.sqrt(tf.nn.sigmoid(pair[0][:, 0]) * pair[1][:, 0])  # here
        return far
    return loss
-> step 2: infinity from SqrtGrad ( | ), in the gradient of
== the gradient of grad_pre
def grad_pre(loss, train_model):
    norm = tf.norm(train_model.trainable_variables[1])  # here
    return loss, norm, train_model.trainable_variables
-> step 1: infinity from SqrtGrad ( | ), in the gradient of | , grad_pre (
== input_pre
def input_pre(batch):
    inputs = batch[0]
    if tf.reduce_any(inputs > 0.0):
        inputs = 2.0 * inputs
    return inputs / tf.reduce_max(inputs, 1, keepdims=True)  # here
every_steps = {1: lambda loss: None}
-> step 2: NaN from RealDiv ( | ), input_pre (
== update_pre
def update_pre(gradients):
    return [g / (g - g) for g in gradients], gradients  # here
-> step 1: | from RealDiv ( | ), update_pre (
== missing values
x[13, 1] = np.nan
data = tf.data.Dataset.from_tensor_slices((x, y))
def create_dataset(per_replica_batch_size):  # here
    return data.batch(per_replica_batch_size, drop_remainder=True)
-> step 2: NaN from IteratorGetNext ( | ), create_dataset (
== a weight that a host hook has spoilt
def spoil(train_model):
    train_model.layers[0].kernel.assign([[np.nan], [0.0]])
every_steps = {3: spoil}
-> step 4: NaN from ReadVariableOp ( | dense
"""
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_step_op_hook_and_line(cli: Cli, name: str) -> None:
    code, words = PROGRAMS[name]
    source = source_of(imports=DATA, program=code)
    for devices in "12":
        flags = ("--run-name", devices, "--virtual-devices", devices)
        failed(cli(source, "--detect-anomaly", *flags), *words, where(source))
    tf.math.log(tf.constant(-1.0))  # what is no part of that training is not checked


def test_a_run_without_any_has_the_same_weights(train: Train) -> None:
    hooks = make_hooks(create_model=norm_model)
    settings = {"batch_size": 8, "virtual_devices": 2, "last_batch": "keep"}
    plain = train(hooks, run_name="plain", **settings)
    assert_weights(train(hooks, detect_anomaly=True, **settings), plain)
