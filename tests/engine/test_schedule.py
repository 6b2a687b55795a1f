"""Tests of due hooks, checkpoints and evaluations, and of the learning rate."""

import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core import schedule, trainer
from tests.golden import small
from tests.helpers.cases import assert_weights, make_hooks, regression_data, sliced
from tests.helpers.project import Train

BATCH = 16


def plain_loop(steps: int) -> dict[int, list[Any]]:
    """Trains in a plain loop with SGD and returns the values of each step, keyed by step."""
    model, seen = small.create_model(), {}
    batches = small.create_dataset(BATCH).repeat().take(steps)
    for step, (inputs, target) in enumerate(batches, 1):
        with tf.GradientTape() as tape:
            output = model(inputs, training=True)
            loss = tf.reduce_mean(small.squared_error((output, target)))
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(small.RATE * gradient)
        seen[step] = [loss, output, inputs, target, *gradients, *model.get_weights()]
    return seen


def test_steps_and_values_equal_those_of_a_plain_loop(train: Train) -> None:
    calls: list[tuple[str, int]] = []
    expected = plain_loop(20)

    def hook(name: str) -> Any:
        def record(
            step: int, loss: Any, output: Any, batch: Any, gradients: Any, train_model: Any,
            display_gradients: Any,
        ) -> None:  # fmt: skip
            calls.append((name, step))
            for shown, value in zip(display_gradients, [loss, *gradients], strict=True):
                np.testing.assert_array_equal(shown, value)  # These are the inputs of update_pre.
            values = [loss, output, *batch, *gradients, *train_model.get_weights()]
            for value, other in zip(values, expected[step], strict=True):
                np.testing.assert_allclose(value, other, rtol=2e-5, atol=1e-6)

        return record

    hooks = small.hooks(
        every_steps={6: hook("sixth"), 7: [hook("seventh"), hook("too")]},
        at_step={4: hook("fourth"), 14: hook("fourteenth")},
        update_pre=lambda gradients, loss: (gradients, [loss, *gradients]),
    )
    train(hooks, steps=20, learning_rate=small.RATE, virtual_devices=2)
    assert calls == [
        *[("fourth", 4), ("sixth", 6), ("seventh", 7), ("too", 7), ("sixth", 12)],
        *[("seventh", 14), ("too", 14), ("fourteenth", 14), ("sixth", 18)],
    ]


def test_deferred_hooks_see_every_step_once_and_in_order(train: Train) -> None:
    order: list[Any] = []
    hooks = make_hooks(
        every_steps={
            1: ctl_core.deferred(lambda step: order.append(step)),
            10: lambda loss: order.append("ten"),
        }
    )
    train(hooks, steps=25, ckpt_every=5)
    assert order == [*range(1, 11), "ten", *range(11, 21), "ten", *range(21, 26)]


def test_a_step_is_traced_once_for_what_hooks_read_of_it(train: Train) -> None:
    def input_pre(batch: Any) -> Any:
        traced.append(batch)
        return batch[0]

    def quiet(step: int) -> None: ...
    def watch(loss: Any) -> None: ...
    def look(loss: Any, gradients: Any) -> None: ...
    def show(loss: Any, output: Any) -> None: ...

    traces: list[int] = []
    for hooks in ({50: quiet}, {7: quiet, 10: watch, 50: look}, {10: watch, 14: show, 50: show}):
        traced: list[Any] = []
        program = make_hooks(input_pre=input_pre, every_steps=hooks)
        train(program, steps=60, run_name=f"of-{len(traces)}")
        traces.append(len(traced))
    # Every forward pass returns the loss and the gradients. Another trace returns the output.
    assert traces[1] - traces[0] == 0
    assert traces[2] - traces[0] == 1


# ---- Checkpoints and evaluations with periods in epochs or in time -------------------------------


def hooks(**more: Any) -> Any:
    return make_hooks(**{"create_eval_dataset": sliced(regression_data()), **more})


def evaluated(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["split"] == "eval"]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in (folder / "ckpt/engine").glob("*.json"))


def test_an_epoch_is_a_pass_over_the_data(train: Train) -> None:
    """A pass over 100 examples in batches of 16 has six steps, because the remainder is dropped."""
    more = {"eval_every": "1epoch", "ckpt_every": "2epochs"}
    state = train(hooks(), steps=26, **more)
    assert evaluated(state.run_dir) == [6, 12, 18, 24, 26]
    assert saved(state.run_dir) == [12, 24, 26]
    again = train(hooks(), epochs=5, steps=None, **more)
    assert evaluated(again.run_dir)[-1] == 30
    assert saved(again.run_dir)[-1] == 30


@pytest.mark.parametrize("epochs", [10**9, 2**60])
def test_a_number_of_epochs_may_have_any_number_of_digits(train: Train, epochs: int) -> None:
    """The run trains until a hook ends it, or the number of steps is refused as too large."""

    def stop(step: int) -> None:
        if step == 8:
            raise ctl_core.StopTraining

    program = hooks(create_opt=small.create_opt, update_pre=small.update_pre, every_steps={1: stop})
    rate = small.settings(0)["learning_rate"]
    state = train(program, epochs=epochs, steps=None, eval_every=0, learning_rate=rate)
    assert_weights(state, small.plain(8), rtol=1e-5)
    assert state.step == 8
    with pytest.raises(ctl_core.SetupError, match="epochs of 6 steps are more than 9223372036854"):
        train(hooks(), epochs=2**62, steps=None, run_name="too_many")


class Clock:
    """A clock that advances by a fixed number of seconds each time it is read."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def monotonic(self) -> float:
        self.now += self.seconds
        return self.now


@pytest.mark.slow
def test_saving_by_the_clock_changes_no_bit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither checkpoints at time intervals nor a stop by ``max_time`` change the final weights."""
    plain = train(hooks(), steps=40, run_name="plain", ckpt_every=0)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "MOST_STEPS", 4)
        patch.setattr(schedule, "time", Clock(25.0))
        for steps in (17, 40):
            state = train(hooks(), steps=steps, ckpt_every="1min")
    tensors = saved(state.run_dir)
    assert len(tensors) > 4
    assert any(step not in (17, 40) for step in tensors)
    assert_weights(state, plain)

    more: dict[str, Any] = {"run_name": "limited", "steps": 40}
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "MOST_STEPS", 2)
        patch.setattr(schedule, "time", Clock(20.0))
        state = train(hooks(), max_time="1m30s", **more)
    assert state.stopped_by == signal.SIGTERM
    assert 0 < state.step < 40
    assert saved(state.run_dir) == [state.step]
    printed = capsys.readouterr().out
    assert "max_time is over." in printed
    assert f"stopped by SIGTERM, saved: step {state.step}; " in printed
    assert "  ./train.sh --run-name limited  # resumes it\n" in printed
    rest = train(hooks(), max_time="1h", **more)
    assert rest.step == 40
    assert rest.stopped_by is None
    assert_weights(rest, plain)


def test_max_time_counts_the_time_before_the_first_step(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is started again and again takes at least the steps of one graph call."""
    program = hooks()
    create_dataset = program.create_dataset

    def read_slowly(per_replica_batch_size: int) -> tf.data.Dataset:
        time.sleep(1.1)
        return create_dataset(per_replica_batch_size)

    program.create_dataset = read_slowly
    monkeypatch.setattr(trainer, "MOST_STEPS", 2)
    for expected in (2, 4):
        state = train(program, steps=40, max_time="1s")
        assert (state.step, state.stopped_by) == (expected, signal.SIGTERM)
    assert capsys.readouterr().out.count("max_time is over.") == 2


# ---- The learning rate: schedules of settings and create_opt, and hooks that read or assign it ---

STEPS, RATE, WARMUP = 12, 0.2, 4


def by_keras(kind: str, warmup: int) -> list[float]:
    """Returns the learning rates of all steps, computed by the schedules of Keras."""
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


@pytest.mark.parametrize("kind", small.slow_but("cosine", of=["cosine", "exponential", "step"]))
def test_learning_rates_are_those_of_keras(train: Train, kind: str) -> None:
    seen: list[float] = []
    hooks = small.hooks(every_steps={1: lambda lr: seen.append(float(lr))})
    more: dict[str, Any] = {"lr_schedule": kind, "warmup": WARMUP, "learning_rate": RATE}
    state = train(hooks, steps=STEPS, virtual_devices=2, **more)
    rates = by_keras(kind, WARMUP)
    assert seen == pytest.approx(rates, rel=1e-5)
    assert_weights(state, small.plain(STEPS, lambda step: rates[step - 1]), rtol=2e-5)


def test_a_hook_that_assigns_lr_ends_the_schedule(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[float] = []
    hooks = small.hooks(
        at_step={6: lambda lr: lr.assign(0.05)},
        every_steps={1: lambda lr: seen.append(round(float(lr), 6))},
    )
    more: dict[str, Any] = {"lr_schedule": "linear", "learning_rate": RATE, "ckpt_every": 4}
    for steps in (9, STEPS):  # The resumed run does not use the schedule either.
        train(hooks, steps=steps, **more)
    printed = capsys.readouterr().out
    assert printed.count("a hook assigned lr, so lr_schedule and warmup no longer apply.") == 1
    assert seen[:6] == pytest.approx([RATE * (1 - step / 9) for step in range(6)], abs=1e-6)
    assert seen[6:] == [0.05] * 6


@pytest.mark.slow
def test_a_finished_run_that_is_trained_on_says_how_its_rate_jumps(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[int, float] = {}

    def note(step: int, lr: Any) -> None:
        seen[step] = float(lr)

    hooks = small.hooks(every_steps={1: note})
    more: dict[str, Any] = {"lr_schedule": "cosine", "learning_rate": RATE, "ckpt_every": 4}
    train(hooks, steps=8, run_name="a", **more)
    last_rate = seen[8]
    train(hooks, steps=8, run_name="same", fork="a@4", **more)
    assert "jumps" not in capsys.readouterr().out
    train(hooks, steps=8, run_name="a", **more)  # No step is left to train.
    assert "jumps" not in capsys.readouterr().out
    train(hooks, steps=16, run_name="a", **more)
    out = capsys.readouterr().out
    line = (
        f"warning: lr jumps from {last_rate:.3g} to {seen[9]:.3g}: lr_schedule cosine is computed"
    )
    assert out.count("lr jumps") == out.count(line) == 1
    assert seen[9] > 5 * last_rate
    train(hooks, steps=20, run_name="a", **{**more, "lr_schedule": "constant"}, virtual_devices=2)
    assert "jumps" not in capsys.readouterr().out
    assert seen[20] == seen[16]
    constant = {**more, "lr_schedule": "constant", "learning_rate": 0.05}
    train(hooks, steps=24, run_name="a", **constant)
    assert "learning_rate is 0.05 from now on." in capsys.readouterr().out
    assert seen[24] == pytest.approx(0.05)


@pytest.mark.slow
def test_a_curve_that_another_learning_rate_scales_is_no_jump(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    more: dict[str, Any] = {"lr_schedule": "linear", "ckpt_every": 4}
    train(small.hooks(), steps=8, run_name="a", learning_rate=RATE, **more)
    train(small.hooks(), steps=8, run_name="b", fork="a@4", learning_rate=RATE / 2, **more)
    out = capsys.readouterr().out
    assert "learning_rate is 0.1 from now on." in out
    assert "jumps" not in out


def test_schedule_of_create_opt_overrides_the_setting(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hooks receive the rates of the schedule that ``create_opt`` passes to the optimizer."""
    seen: list[tuple[int, float, float, float]] = []

    def look(step: int, lr: Any, optimizer: Any, display_gradients: Any) -> None:
        seen.append((step, float(lr), float(optimizer.learning_rate), float(display_gradients[0])))

    hooks = small.hooks(
        create_opt=lambda lr: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(lr, 1, 0.9)
        ),
        update_pre=lambda gradients, lr: (gradients, [tf.reshape(lr * 1.0, [])]),
        every_steps={1: look},
    )
    more: dict[str, Any] = {"lr_schedule": "linear", "warmup": 3, "learning_rate": RATE}
    state = train(hooks, steps=STEPS, virtual_devices=2, **more)
    assert "lr_schedule and warmup have no effect: create_opt gives" in capsys.readouterr().out
    for step, rate, used, in_graph in seen:
        # Host hooks run after an update and see the rate of the next update. Graph hooks run during
        # an update and see its own rate.
        assert rate == used == pytest.approx(RATE * 0.9**step)
        assert in_graph == pytest.approx(RATE * 0.9 ** (step - 1))
    assert_weights(state, small.plain(STEPS, lambda step: RATE * 0.9 ** (step - 1)), rtol=1e-5)


def test_a_rate_that_no_hook_uses_is_said(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    hooks = small.hooks(create_opt=lambda: keras.optimizers.SGD(0.1))
    train(hooks, steps=1, learning_rate=0.5)
    assert "learning_rate has no effect: create_opt does not use lr." in capsys.readouterr().out
