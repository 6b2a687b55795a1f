"""The helpers for pipelines: full shuffles without a buffer, a seed for each example, exact resume.

Each dataset is built anew for each iterator: two live iterators of one dataset share the state of
its random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.data import index_shuffle, index_shuffle_with_seeds, with_seeds

EXAMPLES = 60


def batches(dataset: tf.data.Dataset, count: int | None = None) -> list[Any]:
    """Returns the elements as NumPy arrays."""
    return list((dataset if count is None else dataset.take(count)).as_numpy_iterator())


def passes(dataset: tf.data.Dataset, count: int) -> np.ndarray:
    """Returns the examples of some passes, a row for each pass."""
    return np.concatenate(batches(dataset.repeat(count))).reshape(count, -1)


@pytest.mark.parametrize("batch_size", [1, 4, 12, EXAMPLES])
def test_each_pass_holds_each_index_once_in_another_order(batch_size: int) -> None:
    rows = passes(index_shuffle(EXAMPLES, batch_size, seed=1), 8)
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(np.sort(rows, axis=1), np.tile(np.arange(EXAMPLES), (8, 1)))
    assert len({tuple(row) for row in [*rows, np.arange(EXAMPLES)]}) == 9


def test_a_remainder_is_left_out_and_differs_from_pass_to_pass() -> None:
    dataset = index_shuffle(EXAMPLES, 16, seed=1)
    assert int(dataset.cardinality()) == 3 and dataset.element_spec.shape == [16]
    rows = passes(dataset, 20)
    assert rows.shape == (20, 48) and all(len(set(row)) == 48 for row in rows)
    assert set(rows.ravel()) == set(range(EXAMPLES)), "each example has its turn"


def test_a_shuffle_is_even() -> None:
    """How often each index comes first, over many passes: a chi-squared test."""
    first = passes(index_shuffle(6, 6, seed=3), 1200)[:, 0]
    counts = np.bincount(first, minlength=6)
    assert ((counts - 200) ** 2 / 200).sum() < 25.7, "of 5 degrees of freedom: 1 in 10,000"


@pytest.mark.parametrize("batch_size", [2, 5, 30])
def test_the_stream_does_not_depend_on_the_batch_size(batch_size: int) -> None:
    one = passes(index_shuffle(EXAMPLES, 60, seed=5), 3)
    np.testing.assert_array_equal(one, passes(index_shuffle(EXAMPLES, batch_size, seed=5), 3))
    whole = batches(index_shuffle_with_seeds(EXAMPLES, 60, seed=5).repeat(3))
    parts = batches(index_shuffle_with_seeds(EXAMPLES, batch_size, seed=5).repeat(3))
    for column in (0, 1):
        np.testing.assert_array_equal(
            np.concatenate([element[column] for element in whole]),
            np.concatenate([element[column] for element in parts]),
        )


def plain_with_seeds(seed: int) -> tf.data.Dataset:
    return with_seeds(tf.data.Dataset.range(EXAMPLES), seed)


MAKERS: dict[str, Callable[[int], tf.data.Dataset]] = {
    "index_shuffle": lambda seed: index_shuffle(EXAMPLES, 4, seed),
    "index_shuffle_with_seeds": lambda seed: index_shuffle_with_seeds(EXAMPLES, 4, seed),
    "with_seeds": plain_with_seeds,
}


@pytest.mark.parametrize("maker", MAKERS)
def test_the_seed_decides(maker: str) -> None:
    def numbers(seed: int) -> np.ndarray:
        flat = [np.ravel(part) for e in batches(MAKERS[maker](seed).repeat(2)) for part in e]
        return np.concatenate(flat)

    tf.random.set_seed(1)
    one = numbers(7)
    tf.random.set_seed(2)  # the helper's own seed is all that counts
    np.testing.assert_array_equal(one, numbers(7))
    for other in (0, 8, 2**31):
        assert not np.array_equal(one, numbers(other))


def test_index_shuffle_with_seeds_has_the_indices_of_index_shuffle() -> None:
    with_them = batches(index_shuffle_with_seeds(EXAMPLES, 4, seed=9).repeat(2))
    alone = batches(index_shuffle(EXAMPLES, 4, seed=9).repeat(2))
    np.testing.assert_array_equal([index for index, _ in with_them], alone)
    spec = index_shuffle_with_seeds(EXAMPLES, 4, seed=9).element_spec
    assert (spec[0].shape, spec[0].dtype) == ([4], tf.int64)
    assert (spec[1].shape, spec[1].dtype) == ([4, 2], tf.int64)


@pytest.mark.parametrize("maker", ["index_shuffle_with_seeds", "with_seeds"])
def test_no_two_examples_of_any_pass_have_the_same_seed(maker: str) -> None:
    elements = batches(MAKERS[maker](11).repeat(20))
    seeds = np.concatenate([np.atleast_2d(seed) for _, seed in elements])
    assert seeds.shape == (20 * EXAMPLES, 2) and len({tuple(seed) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("maker", ["index_shuffle_with_seeds", "with_seeds"])
def test_the_seeds_give_unrelated_numbers(maker: str) -> None:
    """As independent uniform numbers would be: in mean, in spread, from neighbour to neighbour."""

    def draw(_: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        one = lambda s: tf.random.stateless_uniform([], s)  # noqa: E731
        return tf.map_fn(one, seed, fn_output_signature=tf.float32)

    dataset = MAKERS[maker](13).repeat(20)
    if maker == "with_seeds":
        dataset = dataset.batch(4)
    drawn = np.concatenate(batches(dataset.map(draw)))
    count = len(drawn)
    assert count == 20 * EXAMPLES
    assert abs(drawn.mean() - 0.5) < 4 * math.sqrt(1 / 12 / count)
    assert abs(drawn.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / count)
    for lag in (1, 2, EXAMPLES):
        correlation = np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]
        assert abs(correlation) < 4 / math.sqrt(count)


def test_with_seeds_keeps_the_elements_and_renews_the_seeds_each_pass() -> None:
    data = tf.data.Dataset.from_tensor_slices({"a": [1, 2, 3], "b": [[1.0], [2.0], [3.0]]})
    elements = batches(with_seeds(data, seed=4).repeat(2))
    assert [element["a"] for element, _ in elements] == [1, 2, 3, 1, 2, 3]
    assert [element["b"].tolist() for element, _ in elements[3:]] == [[1.0], [2.0], [3.0]]
    seeds = [tuple(seed) for _, seed in elements]
    assert len(set(seeds)) == 6 and elements[0][1].dtype == np.int64
    assert int(with_seeds(data, seed=4).cardinality()) == 3


def augmented(seed: int) -> tf.data.Dataset:
    """A pipeline of the kind that callbacks.py has: shuffled, augmented in parallel, prefetched."""
    images = tf.random.stateless_uniform([EXAMPLES, 3], [0, 1])

    def augment(image: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        return image + tf.random.stateless_normal([3], own)

    def batch(index: tf.Tensor, seeds: tf.Tensor) -> Any:
        pairs = (tf.gather(images, index), seeds)
        return index, tf.map_fn(lambda p: augment(*p), pairs, fn_output_signature=tf.float32)

    dataset = index_shuffle_with_seeds(EXAMPLES, 7, seed).repeat()
    return dataset.map(batch, num_parallel_calls=2).prefetch(2)


def one_by_one(seed: int) -> tf.data.Dataset:
    """The same with examples one by one and a buffer."""
    data = tf.data.Dataset.range(EXAMPLES).shuffle(16, seed=seed)

    def augment(number: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
        return tf.cast(number, tf.float32) + tf.random.stateless_uniform([], own)

    return with_seeds(data, seed).map(augment, num_parallel_calls=2).batch(7).repeat().prefetch(2)


def only_indices(seed: int) -> tf.data.Dataset:
    return index_shuffle(EXAMPLES, 7, seed).repeat()


@pytest.mark.parametrize("pipeline", [augmented, one_by_one, only_indices])
@pytest.mark.parametrize("cut", [0, 1, 8, 9, 13, 30])
def test_a_restored_iterator_goes_on_exactly(tmp_path: Path, pipeline: Any, cut: int) -> None:
    """Passes have 8 or 9 elements; ``cut`` elements are read before the position is saved."""
    expected = batches(pipeline(6), 45)

    iterator = iter(pipeline(6))
    before = [tf.nest.map_structure(lambda t: t.numpy(), next(iterator)) for _ in range(cut)]
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position"))
    del iterator

    restored = iter(pipeline(6))
    next(restored)
    tf.train.Checkpoint(iterator=restored).read(path).assert_consumed()
    after = [tf.nest.map_structure(lambda t: t.numpy(), next(restored)) for _ in range(45 - cut)]
    assert len(before + after) == len(expected)
    for one, other in zip(before + after, expected, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


def test_the_saved_position_of_an_index_shuffle_is_small(tmp_path: Path) -> None:
    """However many examples there are; the buffer of ``Dataset.shuffle`` holds them all."""

    def size(dataset: tf.data.Dataset) -> int:
        iterator = iter(dataset.repeat())
        next(iterator)
        path = Path(tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position")))
        return sum(file.stat().st_size for file in path.parent.glob(path.name + "*"))

    count = 200_000
    assert size(index_shuffle(count, 64, seed=1)) < 50_000
    assert size(tf.data.Dataset.range(count).shuffle(count, seed=1).batch(64)) > 8 * count


@pytest.mark.parametrize("helper", [index_shuffle, index_shuffle_with_seeds])
@pytest.mark.parametrize(("examples", "batch_size"), [(10, 11), (10, 0), (10, -1), (0, 1)])
def test_a_batch_must_fit_into_the_examples(helper: Any, examples: int, batch_size: int) -> None:
    message = f"between 1 and {examples} examples, got {batch_size}"
    with pytest.raises(ValueError, match=message):
        helper(examples, batch_size, seed=1)


def test_one_example_is_enough() -> None:
    assert batches(index_shuffle(1, 1, seed=1).repeat(3)) == [[0], [0], [0]]
