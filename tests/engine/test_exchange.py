"""Graph hooks that exchange values with the other replicas: what no row of theirs may change."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import make_hooks, set_weights
from tests.helpers.fixtures import Train


def mean(values: Any) -> Any:
    return tf.reduce_mean(ctl_core.all_gather(values), 0)


def test_a_stand_in_of_ragged_and_sparse_rows_counts_nowhere(train: Train) -> None:
    """Nine examples in batches of four, on two replicas: the last has none in the second step."""
    numbers = np.arange(1, 73, dtype="float32").reshape(9, 8) / 72
    ragged = tf.RaggedTensor.from_row_lengths(numbers.ravel(), [8 - i % 3 for i in range(8)] + [15])
    sparse = tf.sparse.from_dense(numbers * (numbers > 0.4))

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        rows = {"dense": numbers, "ragged": ragged, "sparse": sparse}
        dataset = tf.data.Dataset.from_tensor_slices(rows).batch(per_replica_batch_size)
        return dataset.map(lambda row: {**row, "scale": tf.constant(2.0)})

    def features(batch: dict[str, Any]) -> Any:
        sums = [tf.reduce_sum(batch["dense"], 1), tf.reduce_sum(batch["ragged"], 1)]
        sums.append(tf.reshape(tf.sparse.reduce_sum(batch["sparse"], 1), [-1]))
        return batch["scale"] * tf.stack(sums, 1)

    def create_model() -> keras.Model:
        return set_weights(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))

    hooks = make_hooks(
        create_dataset=create_dataset,
        create_eval_dataset=create_dataset,
        create_model=create_model,
        create_loss=lambda: lambda output: output[:, 0] - mean(output[:, 0]),
        input_pre=features,
        loss_pre=lambda output: output,
        count_examples=lambda batch: tf.shape(batch["dense"])[0],
        # Means over what a replica has itself: of nothing, they are no numbers.
        eval_pre=lambda loss: (loss + tf.reduce_mean(loss), 0.0),
    )
    state = train(hooks, steps=0, batch_size=8, virtual_devices=2)
    outputs = create_model()(features(next(iter(create_dataset(9))))).numpy()[:, 0]
    means = [outputs[:8].mean()] * 2 + [outputs[8]]
    parts = zip((outputs[:4], outputs[4:8], outputs[8:]), means, strict=True)
    losses = [part - whole for part, whole in parts]
    expected = np.concatenate([loss + loss.mean() for loss in losses]).mean()
    np.testing.assert_allclose(state.metrics["loss"], expected, rtol=1e-4, atol=1e-6)


def in_function(batch: Any) -> Any:
    return tf.function(lambda values: values - mean(values))(batch[0])


def in_branch(batch: Any) -> Any:
    inputs = batch[0]
    if tf.reduce_sum(inputs) > 0.0:
        inputs = inputs - mean(inputs)
    return inputs


def in_body(batch: Any) -> Any:
    return batch[0] - mean(batch[0])


@pytest.mark.parametrize(
    ("hook", "jit_compile"), [(in_function, False), (in_branch, False), (in_body, True)]
)
def test_an_exchange_where_replicas_cannot_meet_is_refused(
    train: Train, hook: Any, jit_compile: bool
) -> None:
    """One replica meets itself anywhere."""
    hooks = make_hooks(input_pre=hook)
    with pytest.raises(ctl_core.SetupError, match=r"^input_pre \(\w+.py:\d+\): .*merge_call"):
        train(hooks, steps=1, virtual_devices=2, jit_compile=jit_compile)
    assert train(hooks, steps=2, jit_compile=True).step == 2
