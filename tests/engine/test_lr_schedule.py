"""The learning rate as settings say: warm-up, a curve, and a hook that ends them."""

from __future__ import annotations

import math
from typing import Any

import keras
import pytest

from tests.golden import small
from tests.helpers.cases import assert_weights
from tests.helpers.fixtures import Train

STEPS, BATCH, RATE, WARMUP = 12, 16, 0.2, 4


def by_keras(kind: str, warmup: int) -> Any:
    """The rate of a step, counted from 0, as Keras' schedules have it."""
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
    return lambda step: RATE * (step + 1) / warmup if step < warmup else float(after(step - warmup))


def by_hand(kind: str, warmup: int) -> tuple[keras.Model, list[float]]:
    """The model that a plain loop trains, and the rates of its steps."""
    rate = by_keras(kind, warmup)
    rates = [rate(step) for step in range(STEPS)]
    return small.plain(STEPS, lambda step: rates[step - 1]), rates


@pytest.mark.parametrize("kind", ["cosine", "exponential", "step"])
def test_the_rates_are_those_of_keras(train: Train, kind: str) -> None:
    seen: list[float] = []
    own = small.hooks(every_steps={1: lambda lr: seen.append(float(lr))})
    more: dict[str, Any] = {"lr_schedule": kind, "warmup": WARMUP, "learning_rate": RATE}
    state = train(own, steps=STEPS, virtual_devices=2, **more)
    model, rates = by_hand(kind, WARMUP)
    assert seen == pytest.approx(rates, rel=1e-5)
    assert_weights(state, model, rtol=2e-5)


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
    own = small.hooks(
        create_opt=lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(RATE, STEPS))
    )
    state = train(own, steps=STEPS, lr_schedule="linear", warmup=3, learning_rate=0.5)
    assert "lr_schedule and warmup change nothing: create_opt gives" in capsys.readouterr().out
    assert_weights(state, by_hand("cosine", 0)[0], rtol=2e-5)
