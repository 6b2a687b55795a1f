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

import ctl_core
from tests.helpers.cases import FEATURES, make_hooks, regression_data, small_model
from tests.helpers.fixtures import Train
from tests.helpers.resume import (
    Blocks,
    StatefulRnn,
    assert_resumes,
    counting_model,
    dense,
    seeded,
    values,
)

# ---- Models -----------------------------------------------------------------------------------


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


class Plain:
    """No base class at all."""

    def __init__(self) -> None:
        self.layers = [dense(6), dense(1, 6)]
        self.gain = tf.Variable(1.0)

    def __call__(self, inputs: Any) -> Any:
        return self.layers[1](tf.tanh(self.layers[0](inputs))) * self.gain


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


MODELS: dict[str, Callable[[], Any]] = {
    "layers in lists and dicts": Blocks,
    "a plain object": Plain,
    "shared and nested layers": shared_model,
    "a counter and a metric": counting_model,
}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_resumes_whatever_it_is_made_of(train: Train, model: str) -> None:
    numbers = assert_resumes(train, lambda: make_hooks(create_model=seeded(MODELS[model])))
    if model == "a counter and a metric":
        own = [v for path, v in numbers.items() if path.startswith("create_model/")]
        assert {12, 12 * 16} <= {float(v) for v in own if not v.ndim}


# ---- Losses, optimizers, random generators ----------------------------------------------------


class CentreLoss:
    """A plain class with a running centre, as in a loss of a paper's repository."""

    def __init__(self) -> None:
        self.centre = tf.Variable(0.0, trainable=False)

    def __call__(self, loss_input: Any) -> Any:
        output, target = loss_input
        self.centre.assign(0.9 * self.centre + 0.1)
        return tf.reduce_sum((output - target - self.centre) ** 2, axis=1)


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


def unseeded_program() -> SimpleNamespace:
    """Noise from keras.random without a generator, and from one that the hook holds."""
    own = keras.random.SeedGenerator(3)

    def input_pre(batch: Any) -> Any:
        noise = keras.random.normal(tf.shape(batch[0])) + keras.random.uniform((), seed=own)
        return batch[0] + 0.1 * noise

    return make_hooks(input_pre=input_pre)


def metric_program() -> SimpleNamespace:
    """A host hook with a moving average of the weights and a metric, in its closure."""
    average = [tf.Variable(w) for w in small_model().get_weights()]
    losses = keras.metrics.Mean()

    def follow(loss: Any, train_model: Any) -> None:
        losses.update_state(loss)
        for mean, weight in zip(average, train_model.get_weights(), strict=True):
            mean.assign(0.9 * mean + 0.1 * weight)

    return make_hooks(every_steps={1: follow})


PROGRAMS: dict[str, Callable[[], SimpleNamespace]] = {
    "a loss with a running centre": lambda: make_hooks(create_loss=CentreLoss),
    "an adversary in globals": adversary_program,
    "noise without a generator": unseeded_program,
    "a moving average in a host hook": metric_program,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_resumes_wherever_its_state_is(
    train: Train, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_resumes(train, PROGRAMS[program])
    assert "warning" not in capsys.readouterr().out


def test_an_optimizer_that_was_made_too_early_is_refused(train: Train) -> None:
    early = keras.optimizers.Adam(0.01)

    def grad_pre(loss: Any, train_model: Any) -> Any:
        variables = train_model.trainable_variables
        early.apply_gradients([(tf.zeros(v.shape), v) for v in variables])
        return loss, 0.0, variables

    with pytest.raises(ctl_core.SetupError, match=r"grad_pre .* make it in create_model or create"):
        train(make_hooks(grad_pre=grad_pre), steps=1)


# ---- What an evaluation leaves alone, and what is refused --------------------------------------


def evaluated(**hooks: Any) -> SimpleNamespace:
    def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(regression_data()).batch(per_replica_batch_size)

    return make_hooks(**{"create_eval_dataset": create_eval_dataset, **hooks})


@pytest.mark.parametrize(("create", "replicas"), [(StatefulRnn, 1), (counting_model, 2)])
def test_an_evaluation_changes_no_bit_of_training(
    train: Train, create: Callable[[], Any], replicas: int
) -> None:
    def program() -> SimpleNamespace:
        def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
            data = tf.data.Dataset.from_tensor_slices(regression_data())
            return data.batch(per_replica_batch_size, drop_remainder=True)

        return evaluated(create_model=seeded(create), create_eval_dataset=create_eval_dataset)

    settings: dict[str, Any] = {"virtual_devices": replicas, "steps": 9}
    often = values(train(program(), eval_every=2, run_name="often", **settings))
    never = program()
    del never.create_eval_dataset
    rarely = values(train(never, run_name="never", **settings))
    for path, value in rarely.items():
        np.testing.assert_array_equal(value, often[path], err_msg=path)
    assert any(path.endswith("seen/total") for path in rarely)


@pytest.mark.parametrize("create", [Module, Plain])
def test_a_model_of_any_kind_is_exported(train: Train, create: Callable[[], Any]) -> None:
    from ctl_core.commands import use

    state = train(make_hooks(create_model=seeded(create)), steps=3)
    path = use.export(make_hooks(create_model=seeded(create)), state.config)
    inputs = regression_data()[0]
    arguments = {"training": False} if create is Module else {}
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    output = next(iter(served(inputs=tf.constant(inputs)).values()))
    np.testing.assert_allclose(output, state.train_model(inputs, **arguments), rtol=1e-5, atol=1e-6)


RANDOM: dict[str, Callable[[Any], Any]] = {
    "RandomStandardNormal": lambda x: x + tf.random.normal(tf.shape(x)),
    "RandomGamma": lambda x: tf.random.gamma([], 1.0) * x,
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operations_that_no_checkpoint_holds_are_pointed_out(
    train: Train, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    hooks = make_hooks(input_pre=lambda batch: RANDOM[name](batch[0]))
    train(hooks, steps=1)
    assert f"draws random numbers with {name}" in capsys.readouterr().out

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        def change(x: Any, y: Any) -> Any:
            return tf.cond(x[0, 0] > 9.0, lambda: x, lambda: RANDOM[name](x)), y

        data = tf.data.Dataset.from_tensor_slices(regression_data())
        return data.batch(per_replica_batch_size, drop_remainder=True).map(change)

    data = make_hooks(create_dataset=create_dataset)
    train(data, steps=1, run_name="data")
    assert f"it runs {name}, which has a state of its own" in capsys.readouterr().out
