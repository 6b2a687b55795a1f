"""The learning rate: a curve of the settings or of create_opt, and as hooks see and set it."""

from __future__ import annotations

import math
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.golden import small
from tests.helpers.cases import assert_weights
from tests.helpers.fixtures import Train

STEPS, RATE, WARMUP = 12, 0.2, 4


def by_keras(kind: str, warmup: int) -> list[float]:
    """The rates of all steps, as Keras' schedules have them."""
    rest = STEPS - warmup
    schedules = keras.optimizers.schedules
    after: Any = {
        "cosine": schedules.CosineDecay(RATE, rest),
        "exponential": schedules.ExponentialDecay(RATE, rest, 0.01),
        "step": schedules.PiecewiseConstantDecay(
            [math.ceil(0.5 * rest) - 1, math.ceil(0.75 * rest) - 1],
            [RATE, RATE / 10, RATE / 100],
        ),
    }[kind]
    rising = [RATE * (step + 1) / warmup for step in range(warmup)]
    return rising + [float(after(step)) for step in range(rest)]


@pytest.mark.parametrize("kind", ["cosine", "exponential", "step"])
def test_the_rates_are_those_of_keras(train: Train, kind: str) -> None:
    seen: list[float] = []
    own = small.hooks(every_steps={1: lambda lr: seen.append(float(lr))})
    more: dict[str, Any] = {"lr_schedule": kind, "warmup": WARMUP, "learning_rate": RATE}
    state = train(own, steps=STEPS, virtual_devices=2, **more)
    rates = by_keras(kind, WARMUP)
    assert seen == pytest.approx(rates, rel=1e-5)
    assert_weights(state, small.plain(STEPS, lambda step: rates[step - 1]), rtol=2e-5)


def test_a_hook_that_assigns_lr_ends_the_schedule(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[float] = []
    own = small.hooks(
        at_step={6: lambda lr: lr.assign(0.05)},
        every_steps={1: lambda lr: seen.append(round(float(lr), 6))},
    )
    more: dict[str, Any] = {"lr_schedule": "linear", "learning_rate": RATE, "ckpt_every": 4}
    for steps in (9, STEPS):  # it stays ended
        train(own, steps=steps, **more)
    said = capsys.readouterr().out
    assert said.count("a hook assigns lr, which ends lr_schedule and warmup.") == 1
    assert seen[:6] == pytest.approx([RATE * (1 - step / 9) for step in range(6)], abs=1e-6)
    assert seen[6:] == [0.05] * 6


def test_a_schedule_of_create_opt_goes_before(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hooks are given the rate that it gives the optimizer."""
    seen: list[tuple[int, float, float, float]] = []

    def look(step: int, lr: Any, optimizer: Any, display_gradients: Any) -> None:
        seen.append((step, float(lr), float(optimizer.learning_rate), float(display_gradients[0])))

    own = small.hooks(
        create_opt=lambda lr: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(lr, 1, 0.9)
        ),
        update_pre=lambda gradients, lr: (gradients, [tf.reshape(lr * 1.0, [])]),
        every_steps={1: look},
    )
    more: dict[str, Any] = {"lr_schedule": "linear", "warmup": 3, "learning_rate": RATE}
    state = train(own, steps=STEPS, virtual_devices=2, **more)
    assert "lr_schedule and warmup change nothing: create_opt gives" in capsys.readouterr().out
    for step, rate, used, in_graph in seen:
        assert rate == used == pytest.approx(RATE * 0.9**step)  # of the next update
        assert in_graph == pytest.approx(RATE * 0.9 ** (step - 1))  # of this one
    assert_weights(state, small.plain(STEPS, lambda step: RATE * 0.9 ** (step - 1)), rtol=1e-5)
