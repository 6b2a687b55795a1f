"""An update made of micro-batches is the update of one step with the whole batch."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import (
    FEATURES,
    make_hooks,
    regression_data,
    sgd,
    sliced,
    unclipped,
)
from tests.helpers.fixtures import Train

BATCH = 16


class Pair(tf.Module):
    """A sparse and a dense variable, for an objective each."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.factor = tf.Variable(tf.ones([7, 2])), tf.Variable([1.0])

    def __call__(self, words: Any) -> Any:
        return tf.gather(self.table, words), tf.cast(words, tf.float32) * self.factor


def test_one_all_reduce_an_update_and_no_retracing(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = np.random.default_rng(0).integers(0, 7, (64, 3)).astype("int32")
    reduced: list[Any] = []
    original = tf.distribute.ReplicaContext.all_reduce

    def all_reduce(self: Any, op: Any, value: Any, options: Any = None) -> Any:
        reduced.append(value)
        return original(self, op, value, options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", all_reduce)
    seen: list[Any] = []
    hooks = make_hooks(
        create_dataset=sliced(words),
        create_model=Pair,
        create_opt=lambda lr: {"table": sgd(0.5), "factor": sgd(0.25)},
        create_loss=lambda: lambda loss_input: loss_input,
        input_pre=lambda batch: batch,
        loss_pre=lambda output: output,
        grad_pre=lambda output, train_model: {
            "table": (tf.reduce_sum(output[0] ** 2), 0.0, [train_model.table]),
            "factor": (tf.reduce_sum(output[1]), train_model.factor[0], [train_model.factor]),
        },
        update_pre=unclipped,
        every_steps={3: lambda loss, gradients: seen.append((loss, gradients))},
    )
    state = train(hooks, steps=6, virtual_devices=2, accumulate_steps=4)
    assert len(reduced) == 4  # each replica once in each of two graphs
    devices = {part.device.split("/")[-1] for value in reduced for part in tf.nest.flatten(value)}
    assert devices == {"device:CPU:0", "device:CPU:1"}  # each sum is where its replica is
    assert state.functions.trace_counts() == [1, 1]
    table, factor = np.ones([7, 2], "float32"), 1.0
    for step in range(6):
        batch = words[step % 4 * BATCH : (step % 4 + 1) * BATCH]
        counts = np.bincount(batch.reshape(-1), minlength=7)[:, None]
        loss = {"table": (counts * table**2).sum() / BATCH, "factor": factor * batch.sum() / BATCH}
        table_gradient, factor_gradient = 2 * counts * table / BATCH, batch.sum() / BATCH + 1.0
        if step % 3 == 2:
            np.testing.assert_allclose(seen[step // 3][0]["table"], loss["table"], rtol=1e-5)
            np.testing.assert_allclose(seen[step // 3][0]["factor"], loss["factor"] + factor, 1e-5)
            rows = seen[step // 3][1]["table"][0]
            assert isinstance(rows, tf.IndexedSlices)
            np.testing.assert_allclose(tf.convert_to_tensor(rows), table_gradient, rtol=1e-5)
        table, factor = table - 0.5 * table_gradient, factor - 0.25 * factor_gradient
    np.testing.assert_allclose(state.train_model.table, table, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.train_model.factor, [factor], rtol=1e-5)


def test_micro_batches_run_one_after_the_other(train: Train) -> None:
    """Side by side they would need the memory of the whole batch."""
    events: list[str] = []

    def noted(tensor: tf.Tensor, event: str) -> tf.Tensor:
        def note(value: np.ndarray) -> np.ndarray:
            events.append(f"{event} begins")
            time.sleep(0.03 * (event == "backward"))
            events.append(f"{event} ends")
            return value

        # Not stateful: TensorFlow keeps stateful ops in order by itself.
        return tf.ensure_shape(
            tf.numpy_function(note, [tensor], tensor.dtype, stateful=False), tensor.shape
        )

    @tf.custom_gradient
    def watched(tensor: tf.Tensor) -> Any:
        return noted(tensor, "forward"), lambda gradient: noted(gradient, "backward")

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = tf.Variable([0.5]), tf.Variable(tf.ones([FEATURES, 1]))

        def __call__(self, inputs: Any) -> Any:
            return watched(inputs * self.first) @ self.second

    train(make_hooks(create_model=Model), steps=2, accumulate_steps=4)
    one = ["forward begins", "forward ends", "backward begins", "backward ends"]
    assert events == one * 8


@pytest.mark.parametrize("filtered", [False, True])
def test_a_pass_ends_with_its_last_full_global_batch(train: Train, filtered: bool) -> None:
    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(regression_data())
        if filtered:  # its length is unknown then
            data = data.filter(lambda *_: True)
        return data.batch(per_replica_batch_size)

    state = train(
        make_hooks(create_dataset=create_dataset), steps=None, epochs=2, accumulate_steps=4
    )
    assert state.step == 2 * (100 // BATCH)
