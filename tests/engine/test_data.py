"""The helpers of ctl_core.data: each example once a pass, other orders and seeds, exact resume."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.data import index_shuffle, index_shuffle_with_seeds, with_seeds
from ctl_core.input.readers import read_literal, write_literal

EXAMPLES = 60


def read(dataset: tf.data.Dataset, count: int) -> list[Any]:
    return [tf.nest.map_structure(lambda t: t.numpy(), e) for e in dataset.take(count)]


def indices(batch_size: int, count: int, seed: int = 6) -> np.ndarray:
    return np.concatenate(read(index_shuffle(EXAMPLES, batch_size, seed), count))


@pytest.mark.parametrize("batch_size", [1, 7, EXAMPLES])
def test_each_index_once_a_pass_in_an_order_of_the_seed(batch_size: int) -> None:
    tf.random.set_seed(batch_size)
    passes = indices(batch_size, 420 // batch_size).reshape(7, EXAMPLES)
    np.testing.assert_array_equal(passes.ravel(), indices(5, 84))
    for seed in (0, 7, 2**31):
        assert not np.array_equal(indices(5, 12, seed), passes[0])
    for one in range(7):
        np.testing.assert_array_equal(np.sort(passes[one]), np.arange(EXAMPLES))
        for other in range(one):
            assert (passes[one] == passes[other]).mean() < 0.2


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


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.range(20).shuffle(20, seed=4)


PIPELINES: dict[str, Callable[[], tf.data.Dataset]] = {
    "indices": lambda: index_shuffle(EXAMPLES, 7, 6),
    "seeds": lambda: with_seeds(shuffled(), 5).map(noise, num_parallel_calls=2).batch(4),
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


def test_the_state_of_a_reader_may_hold_a_tensor_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for its module: the state of a sampler's generator is such a tensor."""
    Tensor = type("Tensor", (list,), {"__module__": "torch"})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=Tensor))
    found = read_literal(write_literal({"generator": Tensor(range(5))}))["generator"]
    assert isinstance(found, Tensor) and found == [*range(5)]
