"""Optimizers with conditions or with groups of variables, and updates that are skipped."""

import json
import re
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.lookahead import Lookahead
from tests.golden.reference import RATE

STEPS, LIMIT = 12, 4.0  # some gradients have a norm above LIMIT

ACCUMULATES = {"virtual_devices": 3, "accumulate_steps": 2}
SETTINGS = pytest.mark.parametrize(
    "settings", small.slow_but(ACCUMULATES, of=[{}, {"virtual_devices": 2}, ACCUMULATES]), ids=str
)


# ---- Updates that are skipped ------------------------------------------------------------------


class WithoutSpikes(keras.optimizers.Adam):
    """Skips an update, including that of the moments, if the norm of the gradients is too large."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        apply = super().apply
        is_short = tf.linalg.global_norm(grads) < LIMIT
        tf.cond(is_short, lambda: apply(grads, trainable_variables), lambda: None)


def skip_spikes(gradients: Any) -> Any:
    return gradients, gradients, tf.linalg.global_norm(gradients) >= LIMIT


@SETTINGS
@pytest.mark.parametrize("kind", [WithoutSpikes, Lookahead])
def test_optimizer_with_a_condition_trains_as_in_a_plain_loop(
    train: engine.Train, kind: Any, settings: Any
) -> None:
    plain = kind(RATE)
    expected = small.plain(STEPS, optimizer=plain)
    state = train(small.hooks(create_opt=lambda lr: kind(lr)), **small.settings(STEPS, **settings))
    compare.assert_close(state.train_model.weights, expected.weights)
    kept = [v for v in plain.variables if not v.path.endswith("learning_rate")]
    compare.assert_close(state.optimizer.variables, kept)


@pytest.mark.parametrize(
    "settings",
    [
        {"jit_compile": True},
        {"virtual_devices": 2, "accumulate_steps": 2},
        pytest.param({"virtual_devices": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_update_that_update_pre_skips(train: engine.Train, settings: dict[str, Any]) -> None:
    """A skipped update changes no moments, weights or averages, nor calls ``update_post``."""
    plain, expected, taken = WithoutSpikes(RATE), small.create_model(), 0
    average = expected.get_weights()
    for batch in small.create_dataset(small.BATCH).repeat().take(STEPS):
        small.plain(1, model=expected, optimizer=plain, batches=[batch])
        if int(plain.iterations) > taken:
            taken = int(plain.iterations)
            pairs = zip(average, expected.get_weights(), strict=True)
            average = [0.5 * before + 0.5 * weight for before, weight in pairs]
    assert 0 < taken < STEPS
    counts: list[tf.Variable] = []

    def create_model() -> keras.Model:
        counts[:] = [tf.Variable(0, trainable=False)]
        return small.create_model()

    hooks = small.hooks(create_model=create_model, update_pre=skip_spikes)
    hooks.create_opt = lambda lr: keras.optimizers.Adam(lr)
    hooks.update_post = lambda: counts[0].assign_add(1)
    state = train(hooks, **small.settings(STEPS, ema=0.5, **settings))
    compare.assert_close(state.train_model.weights, expected.weights)
    updates = counts[0].numpy(), state.optimizer.iterations.numpy()
    assert (state.step, *updates) == (STEPS, taken, taken)
    assert state.average is not None
    state.average.swap()
    compare.assert_close(state.train_model.weights, average)


def test_one_of_two_objectives_is_skipped(train: engine.Train) -> None:
    """If one of two objectives is skipped, the other is updated, and ``update_post`` is called."""

    def grad_pre(loss: Any, train_model: keras.Model) -> Any:
        first, second = train_model.layers
        return {"a": (loss, 0.0, first.variables), "b": (loss, 0.0, second.variables)}

    def update_pre(gradients: Any, objective: str) -> Any:
        return (gradients, gradients, True) if objective == "a" else (gradients, gradients)

    counts: list[tf.Variable] = []

    def create_model() -> keras.Model:
        counts[:] = [tf.Variable(0, trainable=False)]
        return small.create_model()

    hooks = small.hooks(create_model=create_model, grad_pre=grad_pre, update_pre=update_pre)
    hooks.create_opt = lambda lr: {name: keras.optimizers.SGD(lr) for name in "ab"}
    hooks.update_post = lambda: counts[0].assign_add(1)
    state = train(hooks, **small.settings(5, virtual_devices=2))
    model = small.create_model()
    model.layers[0].trainable = False
    expected = small.plain(5, model=model)
    compare.assert_close(state.train_model.weights, expected.weights)
    assert counts[0].numpy() == 5


def test_skip_that_is_no_bool_is_refused(train: engine.Train) -> None:
    hooks = small.hooks(update_pre=lambda gradients: (gradients, gradients, 1.0))
    with pytest.raises(ctl_core.SetupError, match=r"a tuple of 3 values.*skip") as refused:
        train(hooks, **small.settings(1))
    assert "\n" not in str(refused.value)


# ---- Some of the variables that an optimizer was built with ------------------------------------


def create_multi_optimizer(lr: Any) -> keras.optimizers.MultiOptimizer:
    groups = {"body/.*": keras.optimizers.SGD(0.1 * lr, momentum=0.9)}
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(lr), groups)
    )


def create_heads(has_second: bool = True) -> keras.Model:
    inputs = keras.Input((small.FEATURES,))
    base = keras.layers.Dense(4, "tanh", kernel_initializer="ones", name="base")
    body = keras.layers.Dense(4, "tanh", kernel_initializer="identity", name="body")
    features = body(base(inputs))
    outputs = {"main": keras.layers.Dense(1, kernel_initializer="ones", name="main")(features)}
    if has_second:
        outputs["later"] = keras.layers.Dense(1, name="later")(features)
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize("devices", small.slow_but(2, of=[1, 2]))
@pytest.mark.parametrize("frozen", ["base", "body", None])
def test_a_multi_optimizer_where_variables_have_no_gradient(
    train: engine.Train, frozen: str | None, devices: int
) -> None:
    """A frozen layer, perhaps a whole group, and an unused head have no gradients."""

    def create_model(has_second: bool = True) -> keras.Model:
        model = create_heads(has_second)
        if frozen is not None:
            model.get_layer(frozen).trainable = False
        return model

    def loss_pre(output: Any, batch: Any) -> Any:
        return output["main"], batch[1]

    hooks = small.hooks(create_model=create_model, loss_pre=loss_pre)
    hooks.create_opt = create_multi_optimizer
    state = train(hooks, **small.settings(STEPS, virtual_devices=devices))
    model, optimizer = create_model(has_second=False), create_multi_optimizer(RATE)
    for inputs, target in small.create_dataset(small.BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(small.squared_error((model(inputs)["main"], target)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    for name in ("base", "body", "main"):
        trained = state.train_model.get_layer(name).weights
        compare.assert_close(trained, model.get_layer(name).weights)


def test_a_multi_optimizer_with_a_layer_that_is_unfrozen_later(train: engine.Train) -> None:
    def thaw(train_model: keras.Model) -> None:
        train_model.layers[0].trainable = True

    def create_model() -> keras.Model:
        model = small.create_model()
        model.layers[0].trainable = False
        return model

    hooks = small.hooks(create_model=create_model, at_step={4: thaw})
    hooks.create_opt = lambda lr: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(lr), {})
    )
    state = train(hooks, **small.settings(8))
    model = small.plain(4, model=create_model())
    thaw(model)
    batches = small.create_dataset(small.BATCH).repeat().skip(4)
    expected = small.plain(4, model=model, batches=iter(batches))
    compare.assert_close(state.train_model.weights, expected.weights)


def test_optimizer_that_would_sum_over_replicas_again_is_refused(train: engine.Train) -> None:
    hooks = small.hooks(create_opt=lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(ctl_core.SetupError, match=re.escape("GradientDescentOptimizer")):
        train(hooks, **small.settings(1))


def test_rates_of_all_optimizers_are_reported(train: engine.Train, runs: Path) -> None:
    """The second optimizer of an objective has its own schedule, 0.5, 0.25, 0.125."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)

    def create_opt(lr: Any, train_model: Any) -> Any:
        variables = train_model.trainable_variables
        second = keras.optimizers.SGD(schedule)
        return [(keras.optimizers.SGD(lr), variables[:2]), (second, variables[2:])]

    def report(step: int, loss: tf.Tensor) -> None:
        ctl_core.report(step, loss=loss)

    hooks = small.hooks(create_opt=create_opt, every_steps={1: report})
    train(hooks, steps=2, learning_rate=0.01)
    lines = map(json.loads, (runs / "run" / "metrics.jsonl").read_text().splitlines())
    rates = [(line["learning_rate"], line["learning_rate/1"]) for line in lines]
    assert rates == [(0.01, 0.25), (0.01, 0.125)]
