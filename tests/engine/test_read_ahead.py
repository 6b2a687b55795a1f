"""Data that host hooks change, which are read ahead of the steps, are pointed out."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import FEATURES, make_hooks, sgd
from tests.helpers.fixtures import Train

BATCH = 4
REPLAY: collections.deque[np.ndarray] = collections.deque(maxlen=8)
TABLE = np.ones((8, FEATURES), "float32")
FIXED = np.ones((8, FEATURES), "float32")
LEVEL = 1.0
DIFFICULTY = tf.Variable(1.0, name="difficulty")
CLASSES = {"names": ["a", "b"]}


def batch(rows: Any) -> Any:
    return np.asarray(rows, "float32"), np.zeros((BATCH, 1), "float32")


class Buffer:
    """A reader of its own class, which names the global."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Buffer:
        return self

    def __next__(self) -> Any:
        self.read += 1
        return batch([REPLAY[-1]] * BATCH)

    def get_state(self) -> dict[str, int]:
        return {"read": self.read}

    def set_state(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def from_replay(global_batch_size: int) -> Any:
    REPLAY.extend(np.ones((8, FEATURES), "float32"))
    return Buffer()


def from_table(global_batch_size: int) -> Any:
    def rows() -> Iterator[Any]:
        while True:
            yield batch(TABLE[:BATCH])

    return rows()


def from_level(global_batch_size: int) -> Any:
    def rows() -> Iterator[Any]:
        while True:
            yield batch(np.full((BATCH, FEATURES), LEVEL))

    return rows()


def from_variable(global_batch_size: int) -> tf.data.Dataset:
    def row(_: Any) -> Any:
        return tf.fill([FEATURES], DIFFICULTY), tf.zeros([1])

    return tf.data.Dataset.range(10_000).map(row).batch(global_batch_size)


def fixed(global_batch_size: int) -> tf.data.Dataset:
    assert CLASSES
    return tf.data.Dataset.from_tensor_slices(batch(FIXED[:BATCH])).repeat(50).batch(BATCH)


def add() -> None:
    REPLAY.append(np.zeros(FEATURES, "float32"))  # one goes as one comes


def fill(step: int) -> None:
    TABLE[step % 8] = step


def harder() -> None:
    global LEVEL
    LEVEL = LEVEL + 1.0


def assign() -> None:
    DIFFICULTY.assign_add(1.0)


def look(loss: float) -> None:
    assert CLASSES["names"] and FIXED.any() and loss is not None


@pytest.mark.parametrize(
    ("create_dataset", "hook", "name"),
    [
        (from_replay, add, "REPLAY"),
        (from_table, fill, "TABLE"),
        (from_level, harder, "LEVEL"),
        (from_variable, assign, "DIFFICULTY"),
        (fixed, look, None),
        (fixed, add, None),
    ],
)
def test_what_a_host_hook_changes_of_the_data_is_said_once(
    train: Train,
    capsys: pytest.CaptureFixture[str],
    create_dataset: Callable[[int], Any],
    hook: Callable[..., None],
    name: str | None,
) -> None:
    own = make_hooks(create_dataset=create_dataset, create_opt=sgd, every_steps={1: hook})
    train(own, steps=4, batch_size=BATCH)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("of which create_dataset makes data") == (name is not None)
    if name is not None:
        line = hook.__code__.co_firstlineno
        assert f"every_steps[1] (test_read_ahead.py:{line}) changes {name}, of which" in said
