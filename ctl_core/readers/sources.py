"""What hooks return to be read, behind one interface: passes of elements, and a state.

The protocol is an iterable, one pass each time, with ``get_state()`` and ``set_state(state)``; the
next pass, or the rest of this one, begins where the state says. grain has it on its iterators,
torchdata by the names ``state_dict`` and ``load_state_dict``, and of a PyDataset the state is a
number of passes and an index. An iterable without a state is read, too.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_NO_READERS = (tf.data.Dataset, str, bytes, list, tuple, dict, set, np.ndarray, tf.Tensor, type)


def is_reader(made: Any) -> bool:
    """Whether something can be read; containers of arrays are no batches of theirs."""
    return isinstance(made, Iterable | keras.utils.PyDataset) and not isinstance(made, _NO_READERS)


def find_methods(owner: Any) -> tuple[str, str] | None:
    """Returns the names by which an object gives and takes a state, if it does."""
    for names in _METHODS:
        if all(callable(getattr(owner, name, None)) for name in names):
            return names
    return None


class IterableSource:
    """Reads an iterable pass after pass; it, or what ``iter`` makes of it, may have a state.

    Attributes:
        iterator: of the pass that is read
        has_state: whether its position can be saved
        can_return: whether it can be read again from an earlier position
    """

    endless = False

    def __init__(self, made: Any) -> None:
        self._made = made
        self.iterator = iter(made)
        own = find_methods(made)
        self._holds = own is not None  # or its iterator does
        self._names = own or find_methods(self.iterator)
        self.has_state = self._names is not None
        self.can_return = self.has_state or self.iterator is not made

    def begin_pass(self) -> None:
        """Reads the next pass, or what a state that was set says."""
        self.iterator = iter(self._made)

    def get_state(self) -> Any:
        """Returns where the next element is read; None without a state."""
        if self._names is None:
            return None
        return getattr(self._made if self._holds else self.iterator, self._names[0])()

    def set_state(self, state: Any) -> None:
        """Reads on from a state; without one, from the start."""
        if self._names and self._holds:
            getattr(self._made, self._names[1])(state)
        self.begin_pass()
        if self._names and not self._holds:
            getattr(self.iterator, self._names[1])(state)


class PyDatasetSource:
    """Reads a ``PyDataset`` in order, with as many threads as it has workers.

    What ``on_epoch_begin`` and ``on_epoch_end`` do is done again for each pass, to reach a state.
    """

    has_state = True

    def __init__(self, made: keras.utils.PyDataset) -> None:
        self._made = made
        self.endless = made.num_batches is None
        self._state = {"pass": 0, "index": 0}
        self.begin_pass()

    @property
    def can_return(self) -> bool:
        """Whether no pass changes what it holds."""
        own, plain = type(self._made), keras.utils.PyDataset
        begin, end = plain.on_epoch_begin, plain.on_epoch_end
        return own.on_epoch_begin is begin and own.on_epoch_end is end

    def begin_pass(self) -> None:
        """Reads the next pass, or what a state that was set says."""
        self.iterator = self._read()

    def get_state(self) -> Any:
        """Returns how many passes were read, and the index of the next element."""
        return dict(self._state)

    def set_state(self, state: Any) -> None:
        """Reads on from a state; only before anything is read, unless it can return."""
        for _ in range(state["pass"]):
            self._made.on_epoch_begin()
            self._made.on_epoch_end()
        self._state = dict(state)
        self.begin_pass()

    def _read(self) -> Iterator[Any]:
        made, state = self._made, self._state
        made.on_epoch_begin()
        total, following = made.num_batches, state["index"]
        ahead: collections.deque[Any] = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(max(made.workers, 1)) as pool:
            while total is None or state["index"] < total:
                while len(ahead) < max(made.workers, 1) and (total is None or following < total):
                    ahead.append(pool.submit(made.__getitem__, following))
                    following += 1
                element = ahead.popleft().result()
                state["index"] += 1
                yield element
        made.on_epoch_end()
        state["pass"], state["index"] = state["pass"] + 1, 0


def open_source(made: Any) -> IterableSource | PyDatasetSource:
    """Returns how to read what a hook returned."""
    is_py_dataset = isinstance(made, keras.utils.PyDataset)
    return PyDatasetSource(made) if is_py_dataset else IterableSource(made)
