"""Tests that a run reads the same examples in the same order as a plain loop over the dataset.

This must hold for resumed runs and for runs whose length is given in epochs. The plain loop is
``for element in create_dataset(b).repeat()`` after setting the seed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.input.readers import Reader
from tests.golden import small
from tests.golden.logical_features import Rows
from tests.helpers.cases import assert_weights, make_hooks, regression_data, sgd
from tests.helpers.project import Train

EXAMPLES, BATCH = 50, 8


def ids() -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES)


def kept(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Removes a few examples with a filter, so that the length of the dataset is unknown."""
    return dataset.filter(lambda index: index % 10 != 3)


def generated() -> tf.data.Dataset:
    def examples() -> Iterator[int]:
        yield from range(EXAMPLES - 4)

    return tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec([], tf.int64))


def files(folder: Path) -> tf.data.Dataset:
    """Writes four files of 12 records, and returns a dataset that shuffles files and records."""
    for number in range(4):
        with tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord")) as writer:
            for index in range(12):
                writer.write(str(12 * number + index).encode())
    names = tf.data.Dataset.list_files(str(folder / "*.tfrecord"), seed=1)
    records = names.interleave(lambda name: tf.data.TFRecordDataset(name).shuffle(12, seed=3), 2)
    return records.map(lambda record: tf.strings.to_number(record, tf.int64))


PIPELINES: dict[str, Callable[[Path], tf.data.Dataset]] = {
    "a filter after a shuffle": lambda _: kept(ids().shuffle(30, seed=1)),
    "a shuffle without a seed": lambda _: kept(ids()).shuffle(30),
    "two shuffles": lambda _: kept(ids().shuffle(20, seed=1)).shuffle(30, seed=2),
    "shuffled files interleaved": files,
    "a generator": lambda _: generated().shuffle(20, seed=2),
    "a cache before a shuffle": lambda _: kept(ids()).cache().shuffle(30, seed=1),
    "a cache after a shuffle": lambda _: kept(ids().shuffle(30, seed=1)).cache(),
    "a length that depends on the pass": lambda _: kept(ids().shuffle(50, seed=1).take(30)),
    "shuffled batches cut up": lambda _: ids().shuffle(50, seed=1).batch(7).unbatch(),
    "prefetched batches cut up": lambda _: ids().shuffle(9, seed=1).batch(20).prefetch(2).unbatch(),
    "random numbers": lambda _: tf.data.Dataset.zip(
        ids().shuffle(9), tf.data.Dataset.random(seed=3, rerandomize_each_iteration=True)
    ).map(lambda index, number: (index + number) % EXAMPLES),
    "a mixture": lambda _: tf.data.Dataset.sample_from_datasets(
        [ids().shuffle(9), ids()], rerandomize_each_iteration=True
    ),
}


@pytest.mark.parametrize(
    "name",
    [name if index == 0 else pytest.param(name, marks=pytest.mark.slow)
     for index, name in enumerate(PIPELINES)],
)  # fmt: skip
def test_data_are_read_in_the_order_of_a_plain_loop(
    train: Train, tmp_path: Path, name: str
) -> None:
    """The order is right in a run of two epochs and in a run that is resumed near pass ends."""
    inputs, target = (tf.constant(array[:EXAMPLES]) for array in regression_data())

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return PIPELINES[name](tmp_path).batch(per_replica_batch_size).map(
            lambda index: (tf.gather(inputs, index), tf.gather(target, index), index)
        )  # fmt: skip

    seen: list[Any] = []
    hooks = make_hooks(
        create_dataset=create_dataset,
        create_opt=sgd,
        input_pre=lambda batch: batch[0],
        loss_pre=lambda output, batch: (output, batch[1]),
        every_steps={1: lambda batch: seen.append(batch[2].numpy().tolist())},
    )

    def read(run: str, *ends: int, **settings: Any) -> list[Any]:
        seen.clear()
        for steps in ends:
            train(hooks, batch_size=BATCH, run_name=run, **{"steps": steps, **settings})
        return list(seen)

    keras.utils.set_random_seed(0)
    stream = (element[2].numpy().tolist() for element in create_dataset(BATCH).repeat())
    # A run drops the last batch of a pass if the batch is not complete.
    batches = (batch for batch in stream if len(batch) == BATCH)
    expected = [next(batches) for _ in range(14)]
    assert read("parts", 4, 7, 14) == expected
    passes = read("epochs", 0, steps=None, epochs=2)
    assert len(passes) >= 6
    assert passes == expected[: len(passes)] + passes[14:]


def test_every_evaluation_reads_the_same(train: Train) -> None:
    """Even after a resume, an evaluation reads the random subset that a plain loop would read."""
    inputs, target = regression_data()

    def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((inputs, target))
        return data.shuffle(100, seed=5).take(20).batch(per_replica_batch_size)

    keras.utils.set_random_seed(0)
    expected = np.concatenate([x for x, _ in create_eval_dataset(16)]).mean()
    hooks = make_hooks(
        create_eval_dataset=create_eval_dataset,
        create_metrics=lambda: {"mean": keras.metrics.Mean()},
        metric_pre=lambda batch: (batch[0],),
    )
    seen = [train(hooks, steps=n, eval_every=1).metrics["mean"] for n in (2, 4)]
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


# ---- Other ways to read ------------------------------------------------------------------------


@pytest.mark.slow
def test_overfitting_more_batches_than_there_are_goes_on_into_the_next_pass(train: Train) -> None:
    settings = {"batch_size": small.BATCH, "learning_rate": small.RATE, "virtual_devices": 2}
    state = train(small.hooks(), steps=20, overfit_batches=7, accumulate_steps=2, **settings)
    batches = small.create_dataset(small.BATCH)
    assert_weights(state, small.plain(20, batches=batches.concatenate(batches.take(1))), 1e-5)


@pytest.mark.slow
def test_elements_whose_tensors_differ_in_size_need_a_hook(train: Train) -> None:
    """Batches whose tensors have different first dimensions need ``count_examples``.

    In the first batches, the dimensions are equal by chance: four graphs have four atoms.
    """
    atoms = tf.ragged.range([1] * 20 + [1 + index % 5 for index in range(20)])
    graphs = tf.data.Dataset.from_tensor_slices((atoms, tf.ones([40, 1]))).batch(4)
    wide = graphs.map(lambda x, y: (tf.cast(x.values[:, None], tf.float32) * tf.ones([5]), y))
    hooks = make_hooks(create_dataset=lambda: wide)
    message = r"create_dataset \(test_reading.*differ in their first"
    with pytest.raises(ctl_core.SetupError, match=message):
        train(hooks, batch_size=4, steps=10)


@pytest.mark.parametrize("looks", [False, True])
def test_all_processes_drop_used_examples_if_one_cannot_restore_its_position(
    train: Train,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    looks: bool,
) -> None:
    """A process that has restored its position reads from the start, even if a hook looks first.

    The hook returns the same reader whenever it is called.
    """
    go_to = Reader.go_to

    def fail_on_another_process(reader: Reader, text: str) -> str:
        assert go_to(reader, text) is None
        return "another process has failed"

    def make_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
        if looks:
            assert len(next(iter(dataset))[0]) == 10
        return dataset

    def train_to(step: int) -> ctl_core.State:
        reader = Rows()
        hooks = small.hooks(create_dataset=lambda: reader, make_batches=make_batches)
        return train(hooks, **small.settings(step))

    monkeypatch.setattr(Reader, "go_to", fail_on_another_process)
    train_to(4)
    assert_weights(train_to(9), small.plain(9), 1e-5)
    assert "dropping 64 examples" in capsys.readouterr().out


def test_leading_dimension() -> None:
    ragged = tf.ragged.constant([[1], [2, 3]])
    assert ctl_core.leading_dimension((tf.zeros([2, 3]), ragged, tf.constant(1.0))) == 2
    assert ctl_core.leading_dimension(tf.constant(1)) is None
    with pytest.raises(ValueError, match="differ"):
        ctl_core.leading_dimension({"a": tf.zeros([2]), "b": tf.zeros([3])})
