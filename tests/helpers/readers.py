"""Readers in Python as people have them, over the regression data, and what they have read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tests.helpers.cases import EXAMPLES, regression_data

Batch = tuple[np.ndarray, np.ndarray]


class Batches(keras.utils.PyDataset):
    """As Keras' documentation has it, shuffled after each epoch; notes what was read."""

    def __init__(self, batch_size: int, reads: list[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.x, self.y = regression_data()
        self.batch_size = batch_size
        self.reads: list[Any] = [] if reads is None else reads
        self.random = np.random.default_rng(7)
        self.order = self.random.permutation(EXAMPLES)

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        self.reads.append(index)
        rows = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        self.random.shuffle(self.order)


class Loader:
    """In the shape of torchdata's StatefulDataLoader: the loader has the state, iter begins at it.

    Each pass is shuffled by a generator that goes on, and examples get noise from it as they are
    read, so that nothing but the state leads to the middle of a pass.
    """

    def __init__(self, batch_size: int, reads: list[Any] | None = None, part: Any = None) -> None:
        """``part``, an InputContext, says which part of the examples is this process's."""
        first, step = (part.input_pipeline_id, part.num_input_pipelines) if part else (0, 1)
        self.x, self.y = (array[first::step] for array in regression_data())
        self.batch_size = batch_size
        self.reads: list[Any] = [] if reads is None else reads
        self.random = np.random.default_rng(3)
        self.order = np.zeros(0, int)
        self.position = 0
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The random state is NumPy's own; the order is an array that the loader goes on using."""
        state = self.random.bit_generator.state
        return {"random": state, "order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def __iter__(self) -> Iterator[Batch]:
        state, self.loaded = self.loaded, None
        if state is not None:
            self.random.bit_generator.state = state["random"]
        if state is None or not len(state["order"]):
            self.order, self.position = self.random.permutation(len(self.x)), 0
        else:
            self.order, self.position = state["order"], state["position"]
        while self.position < len(self.order):
            rows = self.order[self.position : self.position + self.batch_size]
            self.reads.append(self.position)
            self.position += self.batch_size
            noise = self.random.normal(size=self.x[rows].shape).astype("float32")
            yield self.x[rows] + 0.01 * noise, self.y[rows]


class Endless:
    """An iterator with a state of its own, in the shape of grain's; it never ends."""

    def __init__(self, batch_size: int, reads: list[Any] | None = None) -> None:
        self.x, self.y = regression_data()
        self.batch_size = batch_size
        self.reads: list[Any] = [] if reads is None else reads
        self.number = 0

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> dict[str, Any]:
        self.reads.append(self.number)
        rows = (np.arange(self.batch_size) + self.number * self.batch_size) % len(self.x)
        self.number += 1
        return {"x": self.x[rows], "y": self.y[rows]}

    def get_state(self) -> bytes:
        return str(self.number).encode()

    def set_state(self, state: bytes) -> None:
        self.number = int(state.decode())


def generator(batch_size: int) -> Iterator[Batch]:
    x, y = regression_data()
    for start in range(0, len(x), batch_size):
        yield x[start : start + batch_size], y[start : start + batch_size]


def grain_loader(batch_size: int, seed: int = 5) -> Any:
    """A shuffled pass of grain's, with noise that depends on the example's place in it."""
    import grain

    x, y = regression_data()

    def noisy(row: int, random: np.random.Generator) -> Batch:
        return x[row] + random.normal(scale=0.01, size=x[row].shape).astype("float32"), y[row]

    rows = grain.MapDataset.range(len(x)).seed(seed).shuffle()
    return rows.random_map(noisy).batch(batch_size).to_iter_dataset()


def passes(make: Callable[[], Any]) -> Iterator[Any]:
    """The batches of a plain loop over a reader, pass after pass."""
    reader = make()
    while True:
        some = False
        if isinstance(reader, keras.utils.PyDataset):
            for index in range(len(reader)):
                yield reader[index]
            reader.on_epoch_end()
            continue
        for batch in reader:
            some = True
            yield tuple(batch.values()) if isinstance(batch, dict) else batch
        if not some:  # an iterator that is used up
            reader = make()
