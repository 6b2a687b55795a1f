"""``last_batch: keep`` with other kinds of batches, models and settings, and what it refuses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import (
    FEATURES,
    assert_weights,
    l2_model,
    regression_data,
    set_weights,
    squared_error,
)
from tests.helpers.fixtures import Train
from tests.helpers.kept import examples, hooks, keep, of_replicas, of_steps, plain

pytestmark = pytest.mark.slow


def words(number: int) -> tf.data.Dataset:
    ids = [[1 + (i * j) % 9 for j in range(1 + i % 5)] for i in range(number)]
    lengths = np.array([[len(row)] for row in ids], np.float32)
    return tf.data.Dataset.from_tensor_slices((tf.ragged.constant(ids, dtype=tf.int32), lengths))


def bag_model() -> keras.Model:
    return set_weights(Bag())


class Bag(keras.Model):
    """The mean of the words' vectors, by a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = keras.layers.Embedding(10, 4), keras.layers.Dense(1)
        self.table.build()
        self.out.build((None, 4))

    def call(self, inputs: Any) -> Any:
        vectors = self.table(inputs.to_tensor())
        mask = tf.sequence_mask(inputs.row_lengths(), tf.shape(vectors)[1], tf.float32)
        return self.out(tf.reduce_sum(vectors * mask[..., None], axis=1))


@pytest.mark.parametrize("form", ["replicas", "steps"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ragged_batches_and_sparse_gradients(train: Train, form: str, accumulate: int) -> None:
    def per_replica(per_replica_batch_size: int) -> tf.data.Dataset:
        return words(9).ragged_batch(per_replica_batch_size)

    def per_step(global_batch_size: int) -> tf.data.Dataset:
        return words(9).ragged_batch(global_batch_size)

    data = {"replicas": per_replica, "steps": per_step}[form]
    some = hooks(create_dataset=data, create_model=bag_model)
    state = keep(train, some, virtual_devices=2, accumulate_steps=accumulate, learning_rate=0.01)
    assert_weights(state, plain(words(9).ragged_batch(8), bag_model(), rate=0.01), 1e-5)


def test_dicts_and_several_inputs(train: Train) -> None:
    def data(batch_size: int) -> tf.data.Dataset:
        inputs, target = regression_data()
        whole = {"left": inputs[:9], "right": inputs[9:18], "y": target[:9]}
        return tf.data.Dataset.from_tensor_slices(whole).batch(batch_size)

    def model() -> keras.Model:
        left, right = keras.Input((FEATURES,)), keras.Input((FEATURES,))
        return set_weights(
            keras.Model([left, right], keras.layers.Dense(1)(left) * keras.layers.Dense(1)(right))
        )

    some = hooks(
        create_dataset=lambda per_replica_batch_size: data(per_replica_batch_size),
        create_model=model,
        input_pre=lambda batch: [batch["left"], batch["right"]],
        loss_pre=lambda output, batch: (output, batch["y"]),
    )
    state = keep(train, some, virtual_devices=2)
    pairs = data(8).map(lambda batch: ((batch["left"], batch["right"]), batch["y"]))
    assert_weights(state, plain(pairs, model()))


def test_examples_that_are_not_rows(train: Train) -> None:
    """A batch of graphs: nodes of all of them, and which graph each belongs to."""
    inputs, target = regression_data()

    def graphs(batch_size: int) -> tf.data.Dataset:
        data = tf.data.Dataset.range(9).batch(batch_size)

        def join(index: tf.Tensor) -> Any:
            nodes = tf.reshape(tf.stack([2 * index, 2 * index + 1], 1), [-1])
            owner = tf.repeat(tf.range(tf.size(index)), 2)
            return (tf.gather(inputs, nodes), owner), tf.gather(target, index)

        return data.map(join)

    class Pool(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.dense.build((None, FEATURES))

        def call(self, batch: Any) -> Any:
            nodes, owner = batch
            return tf.math.segment_sum(self.dense(nodes), owner)

    some = hooks(
        create_dataset=lambda per_replica_batch_size: graphs(per_replica_batch_size),
        create_model=lambda: set_weights(Pool()),
        count_examples=lambda batch: tf.shape(batch[1])[0],
    )
    state = keep(train, some, virtual_devices=2, learning_rate=0.1)
    assert_weights(state, plain(graphs(8), set_weights(Pool())))


def test_shares_of_the_hooks_own_and_whole_elements(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """``input_context`` is named; and elements of one fixed size that fill no step."""

    def own(per_replica_batch_size: int, input_context: Any) -> tf.data.Dataset:
        data = examples(13).shard(input_context.num_input_pipelines, 0)
        return data.batch(per_replica_batch_size)

    expected = plain(examples(13).batch(8), l2_model())
    assert_weights(keep(train, hooks(create_dataset=own), virtual_devices=2), expected)

    def fixed(per_replica_batch_size: int) -> tf.data.Dataset:
        return examples(12).batch(per_replica_batch_size, drop_remainder=True)

    def model(per_replica_batch_size: int) -> keras.Model:
        return set_weights(
            keras.Sequential(
                [
                    keras.Input((FEATURES,), batch_size=per_replica_batch_size),
                    keras.layers.Dense(1),
                ]
            )
        )

    some = hooks(create_dataset=fixed, create_model=model)
    state = keep(train, some, virtual_devices=2, run_name="fixed")
    assert_weights(state, plain(examples(12).batch(8), model(None)))  # type: ignore[arg-type]
    assert state.progress.examples == 36
    assert "leave out drop_remainder=True to keep every example" in capsys.readouterr().out


def test_global_batches_may_be_smaller_anywhere(train: Train) -> None:
    """As those of length buckets, whose remainders come in any order."""

    def data() -> tf.data.Dataset:
        return (
            examples(14)
            .batch(8)
            .concatenate(examples(5).batch(8))
            .concatenate(examples(16).batch(8))
        )

    state = keep(train, hooks(create_dataset=lambda global_batch_size: data()), virtual_devices=2)
    assert_weights(state, plain(data(), l2_model()))
    assert (state.step, state.progress.examples) == (15, 105)


def test_what_replicas_exchange_is_of_true_examples(train: Train) -> None:
    """Sums, means and gathered rows, with a gradient through them."""

    def gathered(output: Any, batch: Any) -> Any:
        rows = ctl_core.all_gather(output)
        number = ctl_core.all_reduce(tf.cast(tf.shape(output)[0], tf.float32))
        mean = ctl_core.all_reduce(tf.reduce_sum(output, axis=0)) / number
        with tf.control_dependencies(
            [tf.debugging.assert_equal(tf.cast(tf.shape(rows)[0], tf.float32), number)]
        ):
            return output - tf.identity(mean), batch[1]

    def centred(batch: Any, output: Any) -> Any:
        centre = tf.reduce_mean(output, axis=0)
        return tf.reduce_mean(squared_error((output - centre, batch[1])))

    some = hooks(create_dataset=of_replicas(9), loss_pre=gathered)
    state = keep(train, some, virtual_devices=2)
    assert_weights(state, plain(examples(9).batch(8), l2_model(), loss=centred), 1e-5)


def test_endless_data_have_nothing_to_keep(train: Train) -> None:
    some = hooks(
        create_dataset=lambda: examples(10),
        make_batches=lambda dataset, per_replica_batch_size: dataset.batch(per_replica_batch_size),
    )
    state = keep(train, some, epochs=None, steps=4, virtual_devices=2)
    assert state.progress.examples == 32


def test_periods_of_epochs(train: Train) -> None:
    some = hooks(
        create_dataset=of_steps(10),
        create_eval_dataset=lambda per_replica_batch_size: examples(8).batch(4),
    )
    state = keep(train, some, eval_every="1epoch", ckpt_every="1epoch", batch_size=4)
    assert [line["step"] for line in state.history if line["split"] == "eval"] == [3, 6, 9]


def test_passes_of_different_lengths_are_refused(train: Train) -> None:
    """Their last step would not be where it was counted to be."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        some = examples(40).shuffle(40, seed=1).take(20)
        return some.filter(lambda _, target: target[0] > 0.0).batch(per_replica_batch_size)

    with pytest.raises(ctl_core.RunError, match=r"create_dataset \(.*a pass is not as long as"):
        keep(train, hooks(create_dataset=create_dataset), epochs=None, steps=40, virtual_devices=2)
