"""The helpers of ctl_core.data: each example once a pass, other orders and seeds, exact resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.data import index_shuffle, index_shuffle_with_seeds, with_seeds

EXAMPLES = 60
Pipeline = Callable[[], tf.data.Dataset]


def read(dataset: tf.data.Dataset, count: int) -> list[Any]:
    return [tf.nest.map_structure(lambda t: t.numpy(), e) for e in dataset.take(count)]


def indices(batch_size: int, count: int, seed: int = 6) -> np.ndarray:
    return np.concatenate(read(index_shuffle(EXAMPLES, batch_size, seed), count))


def test_each_index_once_a_pass_in_another_order() -> None:
    passes = indices(7, 60).reshape(7, EXAMPLES)
    for one in range(7):
        np.testing.assert_array_equal(np.sort(passes[one]), np.arange(EXAMPLES))
        for other in range(one):
            assert (passes[one] == passes[other]).mean() < 0.2
    assert abs(np.corrcoef(passes[0], np.arange(EXAMPLES))[0, 1]) < 0.5


@pytest.mark.parametrize("batch_size", [1, EXAMPLES])
def test_the_order_does_not_depend_on_the_batch_size(batch_size: int) -> None:
    reference = indices(5, 48)
    np.testing.assert_array_equal(indices(batch_size, 240 // batch_size), reference)


def test_the_seed_decides_and_nothing_else() -> None:
    tf.random.set_seed(1)
    one = indices(5, 12)
    tf.random.set_seed(2)
    np.testing.assert_array_equal(indices(5, 12), one)
    for other in (0, 7, 2**31):
        assert not np.array_equal(indices(5, 12, seed=other), one)


def test_seeds_are_unique_and_independent_of_the_batch_size() -> None:
    seeds = [
        np.concatenate([s for _, s in read(index_shuffle_with_seeds(EXAMPLES, b, 3), 360 // b)])
        for b in (4, 10)
    ]
    np.testing.assert_array_equal(seeds[0], seeds[1])
    assert len(np.unique(seeds[0], axis=0)) == 360
    elements = tf.data.Dataset.range(20)
    singly = read(with_seeds(elements, 3), 60)
    assert [int(element) for element, _ in singly] == [*range(20)] * 3
    assert len({tuple(seed) for _, seed in singly}) == 60


def noise(element: Any, seed: tf.Tensor) -> tf.Tensor:
    return tf.cast(element, tf.float32) + tf.random.stateless_normal([], seed)


PIPELINES: dict[str, Pipeline] = {
    "indices": lambda: index_shuffle(EXAMPLES, 7, 6),
    "shuffled before": lambda: (
        with_seeds(tf.data.Dataset.range(20).shuffle(20, seed=4), 5)
        .map(noise, num_parallel_calls=2)
        .batch(4)
    ),
    "shuffled after": lambda: (
        with_seeds(tf.data.Dataset.range(20), 5).map(noise).shuffle(20, seed=2).batch(4)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_a_restored_iterator_goes_on_exactly(tmp_path: Path, name: str) -> None:
    """Saved after every number of elements over three passes, at their ends too."""

    def pipeline() -> tf.data.Dataset:
        tf.random.set_seed(0)
        return PIPELINES[name]().prefetch(3)

    expected = read(pipeline(), 30)
    for cut in range(0, 20):
        iterator = iter(pipeline())
        before = [next(iterator).numpy() for _ in range(cut)]
        path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position"))
        restored = iter(pipeline())
        tf.train.Checkpoint(iterator=restored).read(path)
        after = [next(restored).numpy() for _ in range(30 - cut)]
        for one, other in zip(before + after, expected, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"saved after {cut}")


def test_the_saved_position_is_small(tmp_path: Path) -> None:
    iterator = iter(index_shuffle(200_000, 64, seed=1))
    next(iterator)
    path = Path(tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position")))
    assert sum(file.stat().st_size for file in path.parent.glob(path.name + "*")) < 50_000
