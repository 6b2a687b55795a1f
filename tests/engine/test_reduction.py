"""Gradients are summed over the replicas once, whatever applies them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import small
from tests.helpers.cases import make_hooks, regression_data
from tests.helpers.fixtures import Train

STEPS, BATCH, RATE = 12, 16, 0.02


def test_gradients_are_summed_once_an_update(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of micro-batches: it is what several devices cost."""
    sums: list[int] = []
    reduce = tf.distribute.ReplicaContext.all_reduce

    def count(self: Any, *args: Any, **options: Any) -> Any:
        sums.append(1)
        return reduce(self, *args, **options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", count)
    train(small.hooks(), steps=6, virtual_devices=2, accumulate_steps=4)
    assert len(sums) == 2, "one for all gradients, on each replica"


def applying(made: SimpleNamespace) -> SimpleNamespace:
    """Hooks of which ``grad_pre`` applies an optimizer of its own to ``made.scale``."""

    def create_model() -> keras.Model:
        made.scale, made.optimizer = keras.Variable([1.0]), keras.optimizers.SGD(0.1)
        made.optimizer.build([made.scale])
        return small.create_model()

    def grad_pre(loss: Any, batch: Any, train_model: Any) -> Any:
        gradient = tf.reduce_sum(batch[1])[None] / BATCH
        made.optimizer.apply_gradients([(gradient, made.scale)])
        return loss, 0.0, train_model.trainable_variables

    return make_hooks(create_model=create_model, grad_pre=grad_pre)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_optimizer_that_a_hook_applies_gets_the_sum_over_the_replicas(
    train: Train, replicas: int
) -> None:
    """In ``grad_pre`` nothing is summed yet: Keras' own sum is what a critic needs there."""
    made = SimpleNamespace()
    train(applying(made), steps=1, virtual_devices=replicas)
    expected = 1.0 - 0.1 * regression_data()[1][:BATCH].mean()
    np.testing.assert_allclose(made.scale.numpy(), [expected], rtol=1e-5)


def test_an_optimizer_that_a_hook_applies_to_each_micro_batch_is_refused(train: Train) -> None:
    made = SimpleNamespace()
    with pytest.raises(ctl_core.SetupError, match="grad_pre: applies an optimizer by itself"):
        train(applying(made), steps=1, accumulate_steps=2)
    assert made.scale.numpy() == [1.0]


# ---- What Keras' optimizers do besides ---------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"global_clipnorm": 0.05},
    {"weight_decay": 0.1},
    {"use_ema": True, "ema_momentum": 0.8},
]
ON_ONE_REPLICA: dict[str, Any] = {"gradient_accumulation_steps": 3}


def by_keras(**options: Any) -> list[np.ndarray]:
    """The weights of a plain loop with an SGD of Keras', and its variables but the rate."""
    model, optimizer = small.create_model(), with_options(**options).create_opt(RATE)
    for inputs, target in small.create_dataset(BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(small.squared_error((model(inputs), target)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    others = (v.numpy() for v in optimizer.variables if not v.path.endswith("learning_rate"))
    return [*model.get_weights(), *others]


def with_options(**options: Any) -> SimpleNamespace:
    return small.hooks(create_opt=lambda lr: keras.optimizers.SGD(lr, momentum=0.5, **options))


@pytest.mark.parametrize(
    ("options", "replicas"),
    [*((options, 2) for options in OPTIONS), (ON_ONE_REPLICA, 1)],
    ids=str,
)
def test_an_option_of_a_keras_optimizer_does_what_it_does_in_a_plain_loop(
    train: Train, options: dict[str, Any], replicas: int
) -> None:
    expected = by_keras(**options)
    assert np.abs(expected[0] - by_keras()[0]).max() > 1e-3 or "use_ema" in options
    settings = {"steps": STEPS, "learning_rate": RATE, "virtual_devices": replicas}
    state = train(with_options(**options), **settings)
    found = [*state.train_model.get_weights(), *(v.numpy() for v in state.optimizer.variables)]
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)
