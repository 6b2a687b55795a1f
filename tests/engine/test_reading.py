"""A run reads the examples that a plain loop over the dataset reads, however it is cut or counted.

The oracle is ``for element in create_dataset(b).repeat()`` after setting the seed: the ids of the
examples, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.errors import SetupError
from tests.helpers.cases import make_hooks, regression_data, sgd
from tests.helpers.fixtures import Train

pytestmark = pytest.mark.slow

EXAMPLES, BATCH = 50, 8
Make = Callable[..., tf.data.Dataset]


def ids() -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES)


def kept(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """All but a few examples: its length is unknown."""
    return dataset.filter(lambda index: index % 10 != 3)


def records(folder: Path) -> list[str]:
    """Four files of 12 records."""
    for number in range(4):
        with tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord")) as writer:
            for index in range(12):
                writer.write(str(12 * number + index).encode())
    return sorted(map(str, folder.glob("*.tfrecord")))


def parse(record: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_number(record, tf.int64)


def generated() -> tf.data.Dataset:
    def examples() -> Iterator[int]:
        yield from range(EXAMPLES - 4)

    return tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec([], tf.int64))


def files(folder: Path, shuffled: bool = False) -> tf.data.Dataset:
    def read(name: tf.Tensor) -> tf.data.Dataset:
        dataset = tf.data.TFRecordDataset(name)
        return dataset.shuffle(12, seed=3) if shuffled else dataset

    names = tf.data.Dataset.from_tensor_slices(records(folder)).shuffle(4, seed=1)
    return names.interleave(read, cycle_length=2).map(parse)


PIPELINES: dict[str, Callable[[Path], tf.data.Dataset]] = {
    "a filter after a shuffle": lambda _: kept(ids().shuffle(30, seed=1)),
    "a shuffle without a seed": lambda _: kept(ids()).shuffle(30),
    "two shuffles": lambda _: kept(ids().shuffle(20, seed=1)).shuffle(30, seed=2),
    "records": lambda folder: files(folder).shuffle(20, seed=2),
    "shuffled files interleaved": lambda folder: files(folder, shuffled=True),
    "a generator": lambda _: generated().shuffle(20, seed=2),
    "a cache before a shuffle": lambda _: kept(ids()).cache().shuffle(30, seed=1),
    "a cache after a shuffle": lambda _: kept(ids().shuffle(30, seed=1)).cache(),
    "a length that depends on the pass": lambda _: kept(ids().shuffle(50, seed=1).take(30)),
    "shuffled batches cut up": lambda _: ids().shuffle(50, seed=1).batch(7).unbatch(),
}


def trained_on(seen: list[Any], make: Make, **hooks: Any) -> SimpleNamespace:
    """Hooks that write down the ids of each step's examples."""
    inputs, target = (tf.constant(part[:EXAMPLES]) for part in regression_data())

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        dataset = make(per_replica_batch_size)
        return dataset.map(
            lambda index: (tf.gather(inputs, index), tf.gather(target, index), index)
        )

    return make_hooks(
        **{
            "create_dataset": create_dataset,
            "create_opt": sgd,
            "input_pre": lambda batch: batch[0],
            "loss_pre": lambda output, batch: (output, batch[1]),
            "every_steps": {1: lambda batch: seen.append(batch[2].numpy().tolist())},
            **hooks,
        }
    )


def plain_loop(make: Make, steps: int) -> list[list[int]]:
    """The ids of the steps of a plain loop; a pass ends with its last whole batch."""
    keras.utils.set_random_seed(0)
    stream = (element.numpy().tolist() for element in make(BATCH).repeat())
    batches = (batch for batch in stream if len(batch) == BATCH)
    return [next(batches) for _ in range(steps)]


FIRST = ("a filter after a shuffle", "records", "a generator")  # the others are slow


@pytest.mark.parametrize(
    "name",
    [*FIRST, *(pytest.param(n, marks=pytest.mark.slow) for n in PIPELINES if n not in FIRST)],
)
def test_the_order_of_a_plain_loop(train: Train, tmp_path: Path, name: str) -> None:
    """In steps, in epochs, and in parts, of which one ends at a pass's last batch but one."""

    def make(batch_size: int) -> tf.data.Dataset:
        return PIPELINES[name](tmp_path).batch(batch_size)

    expected = plain_loop(make, 12)
    seen: list[Any] = []
    train(trained_on(seen, make), steps=12, batch_size=BATCH, run_name="steps")
    assert seen == expected
    seen.clear()
    for steps in (4, 7, 12):
        train(trained_on(seen, make), steps=steps, batch_size=BATCH, run_name="parts")
    assert seen == expected
    seen.clear()
    for epochs in (1, 2):
        train(
            trained_on(seen, make), steps=None, epochs=epochs, batch_size=BATCH, run_name="epochs"
        )
    assert len(seen) in (6, 8, 10, 12) and seen == expected[: len(seen)]


@pytest.mark.parametrize("name", ["a filter after a shuffle", "two shuffles"])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_the_same_order_on_two_replicas(
    train: Train, tmp_path: Path, name: str, accumulate_steps: int
) -> None:
    def make(batch_size: int) -> tf.data.Dataset:
        return PIPELINES[name](tmp_path).batch(batch_size)

    seen: list[Any] = []
    settings = {"batch_size": BATCH, "virtual_devices": 2, "accumulate_steps": accumulate_steps}
    for steps in (7, 12):
        train(trained_on(seen, make), steps=steps, **settings)
    assert [sorted(step) for step in seen] == [sorted(step) for step in plain_loop(make, 12)]


def test_repeat_before_a_filter(train: Train) -> None:
    def make(batch_size: int) -> tf.data.Dataset:
        return kept(ids().shuffle(30, seed=1).repeat()).batch(batch_size)

    seen: list[Any] = []
    for steps in (7, 12):
        train(trained_on(seen, make), steps=steps, batch_size=BATCH)
    assert seen == plain_loop(make, 12)


def test_every_evaluation_reads_the_same(train: Train) -> None:
    """A random part of the data: the one that a plain loop would evaluate, also after a resume."""
    inputs, target = regression_data()

    def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((inputs, target))
        return data.shuffle(100, seed=5).take(20).batch(per_replica_batch_size)

    keras.utils.set_random_seed(0)
    expected = np.concatenate([x for x, _ in create_eval_dataset(16)]).mean()
    seen = []
    hooks = make_hooks(
        create_eval_dataset=create_eval_dataset,
        create_metrics=lambda: {"mean": keras.metrics.Mean()},
        metric_pre=lambda batch: (batch[0],),
    )
    for steps in (2, 4):
        seen.append(train(hooks, steps=steps, eval_every=1).metrics["mean"])
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


# ---- What is left out -------------------------------------------------------------------------


# ---- What counts as examples ------------------------------------------------------------------

GRAPHS = 48


def graphs(sizes: list[int], labels: int = 4) -> Make:
    """Batches of graphs: the atoms of all of them one behind the other, which graph each is of."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        def flat(index: tf.Tensor) -> Any:
            atoms = tf.gather(tf.constant(sizes), index)
            owner = tf.repeat(tf.range(tf.shape(index)[0]), atoms)
            points = tf.cast(tf.gather(index, owner), tf.float32)[:, None] / GRAPHS
            return (points, owner), tf.cast(index, tf.float32)[:, None] / GRAPHS, index

        dataset = tf.data.Dataset.range(len(sizes))
        return dataset.batch(per_replica_batch_size, drop_remainder=True).map(flat)

    return create_dataset


class SumOfAtoms(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.dense.build((None, 1))
        self.built = True

    def call(self, inputs: Any) -> tf.Tensor:
        points, owner = inputs
        return tf.math.segment_sum(self.dense(points), owner)


def graph_hooks(sizes: list[int], **hooks: Any) -> SimpleNamespace:
    return make_hooks(
        **{
            "create_dataset": graphs(sizes),
            "create_model": SumOfAtoms,
            "create_opt": sgd,
            "input_pre": lambda batch: batch[0],
            "loss_pre": lambda output, batch: (output, batch[1]),
            **hooks,
        }
    )


MIXED = [1 + index % 5 for index in range(GRAPHS)]
# Each of the first four batches of 4 has 4 atoms, as if they were the examples.
UNLUCKY = [1] * 20 + MIXED[20:]


def count_labels(batch: Any) -> Any:
    return tf.shape(batch[1])[0]


def test_graphs_without_a_hook_are_refused(train: Train) -> None:
    with pytest.raises(SetupError) as caught:
        train(graph_hooks(MIXED), batch_size=4, steps=2)
    message = str(caught.value)
    assert "differ in their first dimension" in message and "def count_examples(batch)" in message
    assert "create_dataset (test_reading.py" in message and "\n" not in message


def test_graphs_that_look_like_examples_at_first_are_not_left_out(train: Train) -> None:
    with pytest.raises(SetupError, match=r"create_dataset.*differ in their first dimension"):
        train(graph_hooks(UNLUCKY), batch_size=4, steps=12)


@pytest.mark.parametrize("sizes", [MIXED, UNLUCKY])
def test_graphs_counted_by_their_labels(train: Train, sizes: list[int]) -> None:
    """One and two replicas, training and evaluation, by hand."""
    kernel, bias, rate = 1.0, 0.0, 0.05
    index = np.arange(GRAPHS)
    count = np.array(sizes)
    for step in range(12):
        own = slice(4 * step, 4 * step + 4)
        x, n, y = index[own] / GRAPHS, count[own], index[own] / GRAPHS
        error = n * (x * kernel + bias) - y
        kernel, bias = (
            kernel - rate * 2 * (error * n * x).mean(),
            bias - rate * 2 * (error * n).mean(),
        )
    error = count * (index / GRAPHS * kernel + bias) - index / GRAPHS
    for replicas in (1, 2):
        state = train(
            graph_hooks(
                sizes,
                count_examples=count_labels,
                create_eval_dataset=graphs(sizes),
                metric_pre=lambda output, batch: (batch[1], output),
            ),
            batch_size=4, steps=12, virtual_devices=replicas, learning_rate=rate,
            run_name=f"on-{replicas}",
        )  # fmt: skip
        found = [float(w.numpy().item()) for w in state.train_model.weights]
        np.testing.assert_allclose(found, [kernel, bias], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.metrics["loss"], (error**2).mean(), rtol=1e-5)


def test_leading_dimension() -> None:
    ragged = tf.ragged.constant([[1], [2, 3]])
    assert ctl_core.leading_dimension((tf.zeros([2, 3]), ragged, tf.constant(1.0))) == 2
    assert ctl_core.leading_dimension(tf.constant(1)) is None
    with pytest.raises(ValueError, match="differ"):
        ctl_core.leading_dimension({"a": tf.zeros([2]), "b": tf.zeros([3])})
