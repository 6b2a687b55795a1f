"""A loss may have variables of its own, such as the proxies of metric learning."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small

CLASSES = 3


class ProxyLoss(keras.layers.Layer):
    """Compares the output with one trainable vector for each class."""

    def __init__(self) -> None:
        super().__init__(name="proxy_loss")
        start = np.random.default_rng(2).normal(size=(1, CLASSES))
        initializer = keras.initializers.Constant(start)
        self.proxies = self.add_weight(name="proxies", shape=start.shape, initializer=initializer)

    def call(self, pair: Any) -> Any:
        output, label = pair
        return small.crossentropy((tf.matmul(output, self.proxies), label))


def labeled_data() -> tuple[np.ndarray, np.ndarray]:
    inputs, target = small.data(96)
    return inputs, (target[:, 0] > 0).astype("int64") + (target[:, 0] > 1)


def train_plainly(loss_rate: float) -> tuple[Any, Any]:
    """Trains six steps in a plain loop, and returns the model and the loss.

    Args:
        loss_rate: the learning rate of the loss's own variables
    """
    model, loss = small.create_model(), ProxyLoss()
    for batch in small.slices(labeled_data())(small.BATCH).take(6):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss((model(batch[0]), batch[1])))
        variables = [*model.trainable_variables, loss.proxies]
        rates = [small.RATE] * (len(variables) - 1) + [loss_rate]
        for gradient, variable, rate in zip(
            tape.gradient(value, variables), variables, rates, strict=True
        ):
            variable.assign_sub(rate * gradient)
    return model, loss


HOOKS = small.hooks(create_dataset=small.slices(labeled_data()), create_loss=ProxyLoss)


def test_variables_of_a_loss_are_trained_with_an_optimizer_of_their_own(
    train_small: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    def grad_pre(loss: Any, train_model: Any, train_loss: Any) -> Any:
        variables = ctl_core.trainable_variables(train_model)
        return loss, 0.0, variables + ctl_core.trainable_variables(train_loss)

    def create_opt(lr: Any, train_model: Any, train_loss: Any) -> Any:
        return [
            (keras.optimizers.SGD(lr), train_model.trainable_variables),
            (keras.optimizers.SGD(lr * 0.1), train_loss.trainable_variables),
        ]

    hooks = small.hooks(**vars(HOOKS) | {"grad_pre": grad_pre, "create_opt": create_opt})
    state = train_small(hooks, virtual_devices=3)
    model, loss = train_plainly(0.1 * small.RATE)
    compare.assert_close(state.train_model.weights, model.weights)
    compare.assert_close(state.train_loss.weights, loss.weights)
    printed = capsys.readouterr().out
    assert "60 parameters to train" in printed
    assert "warning" not in printed


@pytest.mark.parametrize("trainable", [True, False])
def test_variables_of_a_loss_that_grad_pre_leaves_out_are_named(
    train_small: engine.Train, capsys: pytest.CaptureFixture[str], trainable: bool
) -> None:
    """They keep their values, and are not counted among the parameters to train."""

    def create_loss() -> ProxyLoss:
        loss = ProxyLoss()
        loss.trainable = trainable
        return loss

    state = train_small(small.hooks(**vars(HOOKS) | {"create_loss": create_loss}))
    model, loss = train_plainly(0.0)
    compare.assert_close(state.train_model.weights, model.weights)
    compare.assert_same(state.train_loss.weights, loss.weights)
    printed = capsys.readouterr().out
    assert "57 parameters to train" in printed
    warnings = [line for line in printed.splitlines() if "proxy_loss/proxies" in line]
    assert len(warnings) == trainable
    for warning in warnings:
        assert "create_loss" in warning
        assert "grad_pre" in warning
        assert "trainable = False" in warning


class Scaled(keras.Model):
    """Keeps plain variables, as inverse problems do for the unknown numbers of an equation.

    Keras 2 tracked them; see https://github.com/maziarraissi/PINNs/issues/48.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = small.create_model()
        self.scale = tf.Variable([1.5], name="scale")
        self.fixed = tf.Variable([0.5], trainable=False, name="fixed")
        self.calls = tf.Variable([0.0], name="calls")

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add([1.0])
        return self.scale * self.net(inputs) + self.fixed + 0.0 * tf.stop_gradient(self.calls)


@pytest.mark.parametrize("is_returned", [False, True])
def test_plain_variables_of_a_keras_model_are_trained_or_named(
    train_small: engine.Train, capsys: pytest.CaptureFixture[str], is_returned: bool
) -> None:
    hooks = small.hooks(create_model=Scaled)
    if is_returned:
        hooks.grad_pre = lambda loss, train_model: (loss, 0.0, list_variables(train_model))

    def list_variables(model: Any) -> list[Any]:
        return [*model.net.weights, model.scale]

    state = train_small(hooks)
    model = Scaled()
    variables = list_variables(model)[: 4 + is_returned]
    for inputs, target in small.create_dataset(small.BATCH).take(6):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(small.squared_error((model(inputs), target)))
        gradients = tape.gradient(loss, variables)
        small.create_opt(small.RATE).apply(gradients, variables)
    compare.assert_close(list_variables(state.train_model), list_variables(model))
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == (not is_returned)
    for warning in warnings:
        assert "grad_pre (the engine's default): does not train scale, because Keras" in warning
