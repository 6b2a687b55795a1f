"""A resumed run has all that the run had, wherever a program keeps it.

Each case is a program as people write it; run in one go and in two parts, it ends with the same
numbers, bit for bit, in everything that its objects reach.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import FEATURES, make_hooks, regression_data, small_model
from tests.helpers.fixtures import Train
from tests.helpers.resume import (
    StatefulRnn,
    assert_resumes,
    counting_model,
    dense,
    seeded,
    values,
)

# ---- Models -----------------------------------------------------------------------------------


def shared_model() -> keras.Model:
    """One layer twice, a model within a model, and two layers of one name."""
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="same"),
                              keras.layers.BatchNormalization()], name="inner")  # fmt: skip
    inputs = keras.Input((FEATURES,))
    shared = keras.layers.Dense(4, activation="tanh", name="shared")
    outer = keras.layers.Dense(4, name="same")
    left, right = shared(inputs), shared(inputs[:, ::-1])
    x = outer(inner(left)) + inner(right)
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(x))


def test_shared_and_nested_layers_resume(train: Train) -> None:
    assert_resumes(train, lambda: make_hooks(create_model=seeded(shared_model)))


@pytest.mark.parametrize("replicas", [1, 3])
def test_what_each_replica_sums_up_resumes(train: Train, replicas: int) -> None:
    numbers = assert_resumes(
        train, lambda: make_hooks(create_model=seeded(counting_model)), replicas, batch_size=18
    )
    own = [v for path, v in numbers.items() if path.startswith("create_model/")]
    assert 12 * 18 in {float(v) for v in own if not v.ndim}


# ---- Optimizers and averages of hooks ----------------------------------------------------------


def adversary_program() -> SimpleNamespace:
    """A second network with an optimizer of its own, which no hook returns."""
    critic: Any = None
    critic_opt: Any = None

    def create_model() -> Any:
        nonlocal critic, critic_opt
        critic, critic_opt = dense(1, 1), keras.optimizers.Adam(0.01)
        return small_model()

    def grad_pre(loss: Any, output: Any, train_model: Any) -> Any:
        with tf.GradientTape() as tape:
            score = tf.reduce_mean(critic(tf.stop_gradient(output)) ** 2)
        variables = critic.trainable_variables
        critic_opt.apply_gradients(zip(tape.gradient(score, variables), variables, strict=True))
        return loss + 0.1 * critic(output)[:, 0], 0.0, train_model.trainable_variables

    return make_hooks(create_model=create_model, grad_pre=grad_pre)


def metric_program() -> SimpleNamespace:
    """A host hook with a moving average of the weights and a metric, in its closure."""
    average = [tf.Variable(w) for w in small_model().get_weights()]
    losses = keras.metrics.Mean()

    def follow(loss: Any, train_model: Any) -> None:
        losses.update_state(loss)
        for mean, weight in zip(average, train_model.get_weights(), strict=True):
            mean.assign(0.9 * mean + 0.1 * weight)

    return make_hooks(every_steps={1: follow})


@pytest.mark.parametrize("program", [adversary_program, metric_program])
def test_a_program_resumes_wherever_its_state_is(
    train: Train, program: Callable[[], SimpleNamespace], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_resumes(train, program)
    assert "warning" not in capsys.readouterr().out


# ---- What an evaluation leaves alone, and what is refused --------------------------------------


@pytest.mark.parametrize(("create", "replicas"), [(StatefulRnn, 1), (counting_model, 2)])
def test_an_evaluation_changes_no_bit_of_training(
    train: Train, create: Callable[[], Any], replicas: int
) -> None:
    def program() -> SimpleNamespace:
        def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
            data = tf.data.Dataset.from_tensor_slices(regression_data())
            return data.batch(per_replica_batch_size, drop_remainder=True)

        return make_hooks(create_model=seeded(create), create_eval_dataset=create_eval_dataset)

    settings: dict[str, Any] = {"virtual_devices": replicas, "steps": 9}
    often = values(train(program(), eval_every=2, run_name="often", **settings))
    never = program()
    del never.create_eval_dataset
    rarely = values(train(never, run_name="never", **settings))
    for path, value in rarely.items():
        np.testing.assert_array_equal(value, often[path], err_msg=path)
    assert any(path.endswith("seen/total") for path in rarely)


class Module(tf.Module):
    """A tf.Module that holds Keras layers, Dropout and batch normalisation among them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = dense(6), dense(1, 6)
        self.norm, self.drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=1)
        self.scale = tf.Variable(tf.ones(6))

    def __call__(self, inputs: Any, training: bool) -> Any:
        hidden = self.norm(tf.tanh(self.first(inputs)) * self.scale, training=training)
        return self.last(self.drop(hidden, training=training))


def test_a_module_of_layers_is_exported(train: Train) -> None:
    from ctl_core.commands import use

    state = train(make_hooks(create_model=seeded(Module)), steps=3)
    path = use.export(make_hooks(create_model=seeded(Module)), state.config)
    inputs = regression_data()[0]
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    output = next(iter(served(inputs=tf.constant(inputs)).values()))
    np.testing.assert_allclose(
        output, state.train_model(inputs, training=False), rtol=1e-5, atol=1e-6
    )


def test_random_operations_that_no_checkpoint_holds_are_pointed_out(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        def change(x: Any, y: Any) -> Any:
            return tf.cond(x[0, 0] > 9.0, lambda: x, lambda: tf.random.gamma([], 1.0) * x), y

        data = tf.data.Dataset.from_tensor_slices(regression_data())
        return data.batch(per_replica_batch_size, drop_remainder=True).map(change)

    def input_pre(batch: Any) -> Any:
        return batch[0] + tf.random.normal(tf.shape(batch[0]))

    train(make_hooks(create_dataset=create_dataset, input_pre=input_pre), steps=1)
    output = capsys.readouterr().out
    assert "draws random numbers with RandomStandardNormal" in output
    assert "it runs RandomGamma, which has a state of its own" in output
