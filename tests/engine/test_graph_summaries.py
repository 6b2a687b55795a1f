"""tf.summary in hooks of the graph: each step once, whatever the devices, into the run's folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train

Seen = list[tuple[int, str, float]]


def seen(folder: Path) -> Seen:
    """Returns (step, name, value) of each scalar summary, in no order."""
    found = []
    for file in folder.glob("events.out.tfevents.*"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if not value.tag.startswith("progress/"):  # the engine's own
                    found.append((event.step, value.tag, float(tf.make_ndarray(value.tensor))))
    return sorted(found)


class Watched(keras.layers.Dense):
    """A layer that writes a summary of its inputs."""

    def call(self, inputs: Any) -> Any:
        with tf.summary.record_if(tf.summary.experimental.get_step() > 0):
            tf.summary.scalar("model", tf.reduce_sum(inputs))
        return super().call(inputs)


def watched_hooks(**hooks: Any) -> SimpleNamespace:
    """Each hook of the graph writes the number of the step, as tf.summary has it."""

    def note(name: str) -> None:
        tf.summary.scalar(name, tf.cast(tf.summary.experimental.get_step(), tf.float32))

    def input_pre(batch: Any) -> Any:
        note("input")
        return batch[0]

    def train_loss(loss_input: Any) -> Any:
        note("loss")
        return tf.reduce_sum((loss_input[0] - loss_input[1]) ** 2, 1)

    def grad_pre(loss: Any, train_model: Any) -> Any:
        note("grad")
        return loss, 0.0, train_model.trainable_variables

    def update_pre(gradients: Any) -> Any:
        tf.summary.scalar("norm", tf.linalg.global_norm(gradients))
        return gradients, gradients

    base = {
        "create_model": lambda: keras.Sequential(
            [keras.Input((5,)), Watched(1, name="watched")], name="net"
        ),
        "create_loss": lambda: train_loss,
        "input_pre": input_pre,
        "grad_pre": grad_pre,
        "update_pre": update_pre,
        "every_steps": {3: lambda loss: tf.summary.scalar("host", loss)},
    }
    return make_hooks(**{**base, **hooks})


def test_a_summary_leaves_the_replicas_variables_equal(train: Train) -> None:
    """What one replica alone used would be computed, and rounded, in another way there."""

    def update_pre(gradients: Any) -> Any:
        third = [gradient * 0.3 for gradient in gradients]
        tf.summary.scalar("third", tf.linalg.global_norm(third))
        return [gradient * 0.7 for gradient in third], gradients

    state = train(make_hooks(update_pre=update_pre), steps=30, virtual_devices=2)
    for weight in state.train_model.weights:
        one, other = state.strategy.experimental_local_results(weight.value)
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_micro_batches_write_one_each(train: Train, tmp_path: Path) -> None:
    train(watched_hooks(), steps=2, accumulate_steps=2, virtual_devices=2)
    found = seen(tmp_path / "runs/run/tb/train")
    assert [step for step, name, _ in found if name == "input"] == [1, 1, 2, 2]
    assert [step for step, name, _ in found if name == "norm"] == [1, 2]


def test_a_compiled_step_refuses_it(train: Train, tmp_path: Path) -> None:
    said = "tf.summary in a step that jit_compile compiles;"
    with pytest.raises(ctl_core.SetupError, match=rf"^input_pre \(\w+.py:\d+\): .*{said}"):
        train(watched_hooks(), steps=1, jit_compile=True)
    hooks = make_hooks(update_pre=watched_hooks().update_pre)
    with pytest.raises(ctl_core.SetupError, match=rf"^update_pre \(.*{said}"):
        train(hooks, steps=2, jit_compile=True)
    train(hooks, steps=2, jit_compile=True, virtual_devices=2, run_name="update")
    assert [step for step, *_ in seen(tmp_path / "runs/update/tb/train")] == [1, 2]


@pytest.mark.parametrize("settings", [{}, {"virtual_devices": 2}, {"precision": "float16"}])
def test_after_the_update_each_step_once(train: Train, settings: dict[str, Any]) -> None:
    def update_post(train_model: Any, step: Any) -> None:
        tf.summary.scalar("post", tf.cast(step, tf.float32))

    hooks = make_hooks(update_post=update_post, every_steps={3: lambda loss: None})
    state = train(hooks, steps=7, **settings)
    found = [(step, name) for step, name, value in seen(state.run_dir / "tb" / "train")]
    skipped = 7 - int(state.optimizer.iterations.numpy())
    assert len(found) == len(set(found)) == 7 - skipped
    assert {name for _, name in found} == {"post"}
