"""The kinds of readers, with one interface: read an element, say where that was, go there.

- a ``keras.utils.PyDataset``, whose position is a number of passes and an index;
- an iterable with ``get_state`` and ``set_state`` (grain's iterators), or with ``state_dict`` and
  ``load_state_dict`` (PyTorch's stateful loader): the iterable itself, or what ``iter`` makes of
  it; its state says where it is;
- any other iterable, such as a generator, which has no position.

Each is read by one thread at a time.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from ctl_core.errors import brief
from ctl_core.hooks import Hook
from ctl_core.readers.elements import ReadError

END = object()  # what ``read`` returns instead of an element where a pass ends
METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_NO_READERS = (str, bytes, list, tuple, dict, set, np.ndarray, tf.Tensor, tf.Variable)


class Reader(Protocol):
    """What is read pass after pass.

    Attributes:
        made: what the hook returned
        why_not: why its position cannot be saved, or None
        note: what a user should know of how it is read, or None
        endless: whether a pass is known to have no end
        by_index: whether elements are found by their number, so that the last one can be looked at
        index: how many elements of the pass were read
    """

    made: Any
    why_not: str | None
    note: str | None
    endless: bool
    by_index: bool
    index: int

    def read(self) -> Any:
        """Returns the next element, or END; after that, the first of the next pass."""

    def position(self) -> dict[str, Any]:
        """Returns where the next ``read`` reads: pass, index in it and state, which is no copy."""

    def go_to(self, position: dict[str, Any]) -> None:
        """Reads on from a position, perhaps that of another process."""

    def start(self) -> dict[str, Any] | None:
        """Returns the position before anything is read, if that takes a state to reach again."""

    def begin_again(self, start: dict[str, Any] | None) -> None:
        """Reads on from the first element; ``start`` is what ``start`` returned at first."""

    def is_sure_to_begin_again(self) -> bool:
        """Whether the pass after that is the first one once more, as far as one can know."""

    def check_shared(self) -> None:
        """Refuses an object that the hook has returned before, if it cannot begin again."""

    def close(self) -> None:
        """Lets go of threads, and of iterators and the processes that they have; reads no more."""


def reader_of(hook: Hook, made: Any, remake: Callable[[], Any]) -> Reader | None:
    """Returns how to read what a hook returned; None if it is nothing to be read.

    Args:
        hook: for messages
        made: what it returned
        remake: calls it again, for a pass after one that has used up an iterator
    """
    if not is_reader(made):
        return None
    if isinstance(made, keras.utils.PyDataset):
        return Items(hook, made)
    return Iterated(hook, made, remake)


def is_reader(made: Any) -> bool:
    """Whether something can be read; containers of arrays are no batches of theirs."""
    return isinstance(made, Iterable) and not isinstance(made, (*_NO_READERS, type))


class Items:
    """Reads a ``PyDataset`` by index, in order, with as many threads as it has workers.

    What ``on_epoch_end`` does is done again, for each pass, to reach a position.
    """

    by_index = True
    why_not: str | None = None

    def __init__(self, hook: Hook, made: keras.utils.PyDataset) -> None:
        self.made = made
        self._hook = hook
        self.endless = self._batches() is None
        self.note: str | None = None
        if made.use_multiprocessing:
            self.note = (
                f"{hook}: use_multiprocessing is left out; the PyDataset is read by "
                f"{max(made.workers, 1)} threads of this process."
            )
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._ahead: collections.deque[Any] = collections.deque()
        self._passes = self.index = 0
        self._total: int | None = None
        self._begun = False

    def _batches(self) -> int | None:
        try:
            return self.made.num_batches
        except NotImplementedError as error:
            raise self._hook.reject(
                "returned a PyDataset without __len__, expected its number of batches; or "
                "num_batches, which is None for one without an end."
            ) from error

    def read(self) -> Any:
        if not self._begun:
            self.made.on_epoch_begin()
            self._total, self._begun = self._batches(), True
        if self._total is not None and self.index >= self._total:
            self._end_pass()
            return END
        item = self._item()
        self.index += 1
        return item

    def _end_pass(self) -> None:
        self.made.on_epoch_end()
        self._passes, self.index, self._begun = self._passes + 1, 0, False

    def _item(self) -> Any:
        if self.made.workers <= 1:
            return self.made[self.index]
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(self.made.workers, "PyDataset")
        most = max(self.made.workers, self.made.max_queue_size)
        following = self.index + len(self._ahead)
        while len(self._ahead) < most and (self._total is None or following < self._total):
            self._ahead.append(self._pool.submit(self.made.__getitem__, following))
            following += 1
        return self._ahead.popleft().result()

    def last(self) -> tuple[int, Any]:
        """Returns how many elements a pass has, and the last of them."""
        number = self._batches() or 0
        return number, self.made[number - 1]

    def position(self) -> dict[str, Any]:
        return {"pass": self._passes, "index": self.index}

    def go_to(self, position: dict[str, Any]) -> None:
        self._forget()
        self._passes, self._begun = 0, False
        for _ in range(position["pass"]):
            self.made.on_epoch_begin()
            self._end_pass()
        self.index = position["index"]
        if self.index:
            self.made.on_epoch_begin()
            self._total, self._begun = self._batches(), True

    def _forget(self) -> None:
        while self._ahead:
            future = self._ahead.pop()
            if not future.cancel():
                concurrent.futures.wait([future])

    def start(self) -> None:
        return None

    def begin_again(self, start: dict[str, Any] | None) -> None:
        self._forget()
        self.index = 0

    def is_sure_to_begin_again(self) -> bool:
        of_keras = keras.utils.PyDataset
        return all(
            getattr(type(self.made), name) is getattr(of_keras, name)
            for name in ("on_epoch_begin", "on_epoch_end")
        )

    def check_shared(self) -> None:
        if not self.is_sure_to_begin_again():
            raise self._hook.reject(
                "returns a PyDataset made outside of it that changes from epoch to epoch, and "
                "looking at it, to find out its sizes, has been such an epoch; make it inside the "
                "function."
            )

    def close(self) -> None:
        self._forget()
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


class Iterated:
    """Reads an iterable pass after pass; its own state, if it has one, says where it is."""

    by_index = endless = False
    note: str | None = None

    def __init__(self, hook: Hook, made: Iterable[Any], remake: Callable[[], Any]) -> None:
        self.made = made
        self._hook = hook
        self._remake = remake
        self._passes = self.index = 0
        self._iterator: Any = None
        self.why_not: str | None = None
        # An iterator is for one pass, as a rule.
        self._itself = hasattr(made, "__next__") and self._iter() is made
        self._held = None if self._itself else methods(made)
        if self._held is None:
            self._iterator = self._iter()
            if methods(self._iterator) is None:
                self.why_not = (
                    f"a {type(made).__name__} has neither get_state and set_state nor state_dict "
                    "and load_state_dict"
                )

    def _iter(self) -> Any:
        try:
            return iter(self.made)
        except Exception as error:
            raise self._hook.reject(f"reading the data failed: {brief(error)}") from error

    def read(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.made)
        element = next(self._iterator, END)
        if element is END and self.index == 0 and self._passes and self._itself:
            self.made = self._made_anew()
            self._iterator = iter(self.made)
            element = next(self._iterator, END)
        if element is END:
            self._passes, self.index, self._iterator = self._passes + 1, 0, None
        else:
            self.index += 1
        return element

    def _made_anew(self) -> Any:
        made = self._remake()
        if made is self.made or not hasattr(made, "__next__"):
            raise ReadError(
                f"for the next pass the hook returned a {type(self.made).__name__} that had been "
                "read to its end; make it inside the function"
            )
        return made

    def position(self) -> dict[str, Any]:
        return {"pass": self._passes, "index": self.index, "own": self._state()}

    def _state(self) -> Any:
        keeper = self.made if self._held else self._iterator
        names = methods(keeper)
        return getattr(keeper, names[0])() if names else None

    def go_to(self, position: dict[str, Any]) -> None:
        state = position["own"]
        if self._held:  # as PyTorch's loader has it: the next iterator begins at the state
            getattr(self.made, self._held[1])(state)
            self._iterator = iter(self.made)
        else:  # an iterator of its own begins at the start, wherever the last one is
            self._iterator = iter(self.made)
            names = methods(self._iterator)
            assert names is not None
            getattr(self._iterator, names[1])(state)
        self._passes, self.index = position["pass"], position["index"]

    def start(self) -> dict[str, Any] | None:
        return self.position() if self._held or (self._itself and self.why_not is None) else None

    def begin_again(self, start: dict[str, Any] | None) -> None:
        if start is not None:
            self.go_to(start)
            return
        if self._itself and (self.index or self._passes):
            self.made = self._made_anew()
        self._iterator, self._passes, self.index = iter(self.made), 0, 0

    def is_sure_to_begin_again(self) -> bool:
        return self.start() is not None

    def check_shared(self) -> None:
        if self._itself and self.why_not is not None:
            raise self._hook.reject(
                f"returns a {type(self.made).__name__} made outside of it, and reading some of it, "
                "to find out its sizes, has moved it on; make it inside the function."
            )

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if callable(close) and not self._itself:
            close()


def methods(reader: Any) -> tuple[str, str] | None:
    """Returns the names of the two methods that get and set a reader's state, if it has both."""
    for names in METHODS:
        if all(callable(getattr(reader, name, None)) for name in names):
            return names
    return None
