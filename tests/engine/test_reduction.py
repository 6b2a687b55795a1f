"""Gradients are summed over the replicas once, whatever the optimizer is inside of."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core import compat
from tests.engine.conftest import Train, make_hooks, regression_data, small_model, squared_error

STEPS, BATCH, RATE = 12, 16, 0.02


class TwoOptimizers:
    """One for the kernels, one for the rest, as research code has it."""

    def __init__(self, lr: Any) -> None:
        self.parts = {"kernels": keras.optimizers.SGD(lr), "rest": keras.optimizers.SGD(lr)}

    def build(self, variables: Any) -> None:
        self.parts["kernels"].build([v for v in variables if len(v.shape) == 2])
        self.parts["rest"].build([v for v in variables if len(v.shape) == 1])

    def apply_gradients(self, pairs: Any) -> None:
        pairs = list(pairs)
        self.parts["kernels"].apply_gradients([pair for pair in pairs if len(pair[1].shape) == 2])
        self.parts["rest"].apply_gradients([pair for pair in pairs if len(pair[1].shape) == 1])


class Subclassed(keras.optimizers.SGD):
    """An optimizer of the user's own that wraps another."""

    def __init__(self, lr: Any) -> None:
        super().__init__(lr)
        self.inner = keras.optimizers.SGD(lr)

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.inner.build(variables)

    def apply_gradients(self, pairs: Any) -> None:
        self.inner.apply_gradients(pairs)


class TfModule(tf.Module):
    """Another object around an object around an optimizer."""

    def __init__(self, lr: Any) -> None:
        super().__init__()
        self.around = SimpleNamespace(optimizer=keras.optimizers.SGD(lr))

    def build(self, variables: Any) -> None:
        self.around.optimizer.build(variables)

    def apply_gradients(self, pairs: Any) -> None:
        self.around.optimizer.apply(*map(list, zip(*pairs, strict=True)))


def by_hand() -> list[np.ndarray]:
    """Plain SGD on one device."""
    model = small_model()
    inputs, target = regression_data()
    passes = len(inputs) // BATCH
    for step in range(STEPS):
        part = slice((step % passes) * BATCH, (step % passes + 1) * BATCH)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(squared_error((model(inputs[part]), target[part]))) / BATCH
        for variable, gradient in zip(
            model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
        ):
            variable.assign_sub(RATE * gradient)
    return model.get_weights()  # type: ignore[no-any-return]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("create", [TwoOptimizers, Subclassed, TfModule])
def test_an_optimizer_in_any_object_steps_as_on_one_device(
    train: Train, create: Callable[[Any], Any], replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[int] = []
    reduce = tf.distribute.ReplicaContext.all_reduce

    def count(self: Any, *args: Any, **options: Any) -> Any:
        sums.append(1)
        return reduce(self, *args, **options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", count)
    hooks = make_hooks(create_opt=create, update_pre=lambda gradients: (gradients, gradients))
    state = train(hooks, steps=STEPS, learning_rate=RATE, virtual_devices=replicas)
    assert len(sums) == (2 if replicas == 2 else 0), "one for all gradients, on each replica"
    for weight, expected in zip(state.train_model.get_weights(), by_hand(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_optimizer_that_a_hook_applies_gets_the_sum_over_the_replicas(
    train: Train, replicas: int
) -> None:
    """In ``grad_pre`` nothing is summed yet: Keras' own sum is what a critic needs there."""
    made = SimpleNamespace()

    def create_model() -> keras.Model:
        made.scale, made.optimizer = keras.Variable([1.0]), keras.optimizers.SGD(0.1)
        made.optimizer.build([made.scale])
        return small_model()

    def grad_pre(loss: Any, batch: Any, train_model: Any) -> Any:
        gradient = tf.reduce_sum(batch[1])[None] / BATCH
        made.optimizer.apply_gradients([(gradient, made.scale)])
        return loss, 0.0, train_model.trainable_variables

    hooks = make_hooks(create_model=create_model, grad_pre=grad_pre)
    train(hooks, steps=1, virtual_devices=replicas)
    expected = 1.0 - 0.1 * regression_data()[1][:BATCH].mean()
    np.testing.assert_allclose(made.scale.numpy(), [expected], rtol=1e-5)


def test_keras_sums_in_the_method_that_is_replaced() -> None:
    """Fails if Keras renames it."""
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        variable, optimizer = tf.Variable(0.0), keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def step(summed: bool) -> None:
        if summed:
            with compat.gradients_are_summed():
                optimizer.apply_gradients([(tf.constant(1.0), variable)])
        else:
            optimizer.apply_gradients([(tf.constant(1.0), variable)])

    for summed, value in ((False, -2.0), (True, -3.0)):
        tf.function(lambda s=summed: strategy.run(step, (s,)), autograph=False)()
        assert float(variable.read_value()) == value
