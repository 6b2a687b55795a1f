"""When host hooks run and with which values, against a plain loop; also across a resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core import trainer
from tests.helpers.cases import (
    assert_weights,
    make_hooks,
    regression_data,
    sgd,
    small_model,
    squared_error,
)
from tests.helpers.fixtures import Train

BATCH = 16


def plain_loop(steps: int) -> dict[int, dict[str, Any]]:
    """Trains by hand with SGD and returns what there was to see at each step."""
    inputs, target = regression_data()
    model, seen = small_model(), {}
    for step in range(1, steps + 1):
        start = (step - 1) % (len(inputs) // BATCH) * BATCH
        x, y = inputs[start : start + BATCH], target[start : start + BATCH]
        with tf.GradientTape() as tape:
            output = model(x, training=True)
            loss = tf.reduce_sum(squared_error((output, y))) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        clipped = tf.clip_by_global_norm(gradients, 10.0)[0]
        for variable, gradient in zip(model.trainable_variables, clipped, strict=True):
            variable.assign_sub(0.01 * gradient)
        seen[step] = {
            "loss": loss.numpy(),
            "output": output.numpy(),
            "batch": (x, y),
            "gradients": [g.numpy() for g in gradients],
            "weights": model.get_weights(),
        }
    return seen


class Recorder:
    """Hooks that write down the step and the values they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, Any]]] = []

    def hook(self, name: str) -> Any:
        def record(
            step: int, loss: Any, output: Any, batch: Any, gradients: Any, train_model: Any
        ) -> None:
            values = {
                "loss": loss.numpy(),
                "output": output.numpy(),
                "batch": tuple(part.numpy() for part in batch),
                "gradients": [g.numpy() for g in gradients],
                "weights": train_model.get_weights(),
            }
            self.calls.append((name, step, values))

        return record

    def steps(self, name: str) -> list[int]:
        return [step for called, step, _ in self.calls if called == name]


def recording_hooks(recorder: Recorder) -> Any:
    return make_hooks(
        create_opt=sgd,
        every_steps={
            3: recorder.hook("third"),
            7: [recorder.hook("seventh"), recorder.hook("too")],
        },
        at_step={4: recorder.hook("fourth"), 14: recorder.hook("fourteenth")},
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_and_values_equal_those_of_a_plain_loop(train: Train, replicas: int) -> None:
    recorder = Recorder()
    train(recording_hooks(recorder), steps=20, virtual_devices=replicas)
    assert recorder.steps("third") == [3, 6, 9, 12, 15, 18]
    assert recorder.steps("seventh") == recorder.steps("too") == [7, 14]
    assert (recorder.steps("fourth"), recorder.steps("fourteenth")) == ([4], [14])
    assert [name for name, step, _ in recorder.calls if step == 14] == [
        "seventh",
        "too",
        "fourteenth",
    ]
    expected = plain_loop(20)
    for _, step, values in recorder.calls:
        for (path, value), (_, reference) in zip(flat(values), flat(expected[step]), strict=True):
            np.testing.assert_allclose(value, reference, rtol=2e-5, atol=1e-6, err_msg=path)


def flat(values: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(k, leaf) for k in sorted(values) for leaf in tf.nest.flatten(values[k])]


def test_each_function_is_traced_once(train: Train) -> None:
    def quiet(step: int) -> None: ...
    def watch(loss: Any) -> None: ...
    def look(loss: Any, gradients: Any) -> None: ...

    hooks = make_hooks(every_steps={1: ctl_core.deferred(quiet), 7: quiet, 10: watch, 50: look})
    state = train(hooks, steps=200)
    assert state.step == 200
    # One function runs chunks; two observe, for loss and for loss with gradients.
    assert state.functions.trace_counts() == [1, 1, 1]


def test_a_hook_at_every_step_traces_once_too(train: Train) -> None:
    losses: list[float] = []
    hooks = make_hooks(every_steps={1: lambda loss: losses.append(float(loss))})
    state = train(hooks, steps=200)
    assert state.functions.trace_counts() == [1]
    assert len(losses) == 200


def test_deferred_hooks_see_every_step_once_and_in_order(train: Train) -> None:
    order: list[Any] = []
    hooks = make_hooks(
        every_steps={
            1: ctl_core.deferred(lambda step: order.append(step)),
            10: lambda loss: order.append("ten"),
        }
    )
    train(hooks, steps=25, ckpt_every=5)
    expected: list[Any] = []
    for step in range(1, 26):
        expected += [step] + (["ten"] if step % 10 == 0 else [])
    assert order == expected


def test_where_a_graph_call_ends_changes_nothing(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctl_core.graph import StepFunctions

    lengths: list[int] = []
    original = StepFunctions.train_steps

    def run(self: StepFunctions, steps: int) -> None:
        lengths.append(steps)
        original(self, steps)

    monkeypatch.setattr(StepFunctions, "train_steps", run)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "MOST_STEPS", 3)
        short = train(make_hooks(), steps=50, run_name="short")
    assert max(lengths) <= 3 and sum(lengths) == 50
    long = train(make_hooks(), steps=50, run_name="long")
    assert_weights(short, long, rtol=0)


def test_hooks_may_name_everything(train: Train) -> None:
    seen: dict[str, Any] = {}

    def every(
        dev, step, update_gradients, loss, output, batch, train_model, train_loss, lr, optimizer,
        display_gradients, gradients, ckpt, manager, config, hparams,
    ):  # fmt: skip
        seen.update(locals())

    state = train(
        make_hooks(every_steps={2: every}), steps=2, virtual_devices=2, hparams={"width": 3}
    )
    assert len(seen["dev"]) == 2 and all("CPU" in device for device in seen["dev"])
    assert seen["output"].shape == (BATCH, 1) and seen["batch"][0].shape == (BATCH, 5)
    assert seen["train_model"] is state.train_model
    assert seen["manager"].directory == state.manager.directory
    assert seen["hparams"] == {"width": 3} and seen["config"] is state.config
    assert seen["loss"].shape == () and len(seen["update_gradients"]) == 4


def test_scalars_in_outputs_become_one_entry_per_replica(train: Train) -> None:
    class WithScalar(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(tf.ones([5, 1]))

        def __call__(self, inputs: Any, training: bool) -> Any:
            return {"value": inputs @ self.weight, "mean": tf.reduce_mean(inputs)}

    shapes: list[Any] = []
    for replicas in (1, 2):
        train(
            make_hooks(
                create_model=WithScalar,
                loss_pre=lambda output, batch: (output["value"], batch[1]),
                every_steps={1: lambda output: shapes.append(output["mean"].shape.as_list())},
            ),
            steps=1,
            virtual_devices=replicas,
            run_name=f"of-{replicas}",
        )
    assert shapes == [[1], [2]]
