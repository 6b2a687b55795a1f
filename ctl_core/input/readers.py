"""Readers in Python, besides tf.data: what a hook returned, read as a dataset, and its position.

The protocol is an iterable, one pass each time, with ``get_state()`` and ``set_state(state)``: the
rest of this pass, or the next, begins where the state says. grain has it on its iterators,
torchdata by other names; a PyDataset is given it. An iterable without a state is read, too.

A position is the state before the element that holds the last row used, how many of its rows are
used, and a checksum of it, by which a reader is found out that does not give the same again. Rows
are numbered as they are read, so that it is known of each batch that is read ahead where it ends;
training says how many examples it used.
"""

from __future__ import annotations

import ast
import collections
import concurrent.futures
import copy
import functools
import itertools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.hooks.hooks import describe
from ctl_core.run.errors import brief

_END = object()
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_NO_READERS = (tf.data.Dataset, str, bytes, list, tuple, dict, set, np.ndarray, tf.Tensor, type)


def is_reader(made: Any) -> bool:
    """Whether something can be read; containers of arrays are no batches of theirs."""
    return isinstance(made, Iterable | keras.utils.PyDataset) and not isinstance(made, _NO_READERS)


class Reader:
    """Reads what a hook returned: each dataset of it begins at its start, or where ``go_to`` says.

    Attributes:
        made: what the hook returned
        spec: of its elements, with any number of rows
        why_not: why its position cannot be saved, or None
    """

    def __init__(self, made: Any, remake: Callable[[], Any]) -> None:
        """Reads the first element.

        Args:
            made: what the hook returned
            remake: calls it again, where an iterator is used up or cannot be put back

        Raises:
            ValueError: there is none; or whatever the reader raises.
        """
        self._remake = remake
        self._turn = 0
        self._open(made)
        self._start = self._source.get_state()
        self._begin([])
        first = self._draw()
        if first is None:
            raise ValueError("the reader has no element")
        self._begin([first])
        spec = getattr(made, "element_spec", None)
        self.spec = tf.nest.map_structure(_describe, first[1] if spec is None else spec)
        why = f"a {type(made).__name__} has no get_state and set_state"
        self.why_not = None if self._source.has_state else why

    # ---- Reading ---------------------------------------------------------------------------

    def _open(self, made: Any) -> None:
        self.made = made
        self._source = _Source(_Passes(made) if isinstance(made, keras.utils.PyDataset) else made)

    def _open_anew(self) -> None:
        made = self._remake()
        if made is self.made:
            raise ValueError(
                f"the {type(made).__name__} is made outside of the hook, and cannot be read again; "
                "make it inside"
            )
        self._open(made)

    def _return_to(self, state: Any) -> None:
        if not self._source.can_return:
            self._open_anew()
        self._source.set_state(copy.deepcopy(state))

    def _begin(self, ahead: list[Any], position: Any = None, skip: int = 0) -> None:
        """Notes that nothing is used of what the next dataset reads, but rows of its first."""
        self._ahead, self._position, self._skip = ahead, position, skip
        self._unread = True
        self._numbered = self._given = self._used = 0
        # Of elements the number of the first row, the state before them, and themselves; of
        # batches how many examples were given with them, and the number of their last row.
        self._elements: collections.deque[tuple[int, Any, Any]] = collections.deque()
        self._batches: collections.deque[tuple[int, int]] = collections.deque()

    def _draw(self) -> tuple[Any, Any] | None:
        """Returns the state before the next element of the pass, and this; None at its end."""
        if self._ahead:
            return self._ahead.pop()
        state = self._source.get_state()
        element = next(self._source.iterator, _END)
        return None if element is _END else (state, _make_arrays(element))

    def _take_turn(self) -> int:
        """Begins to read for one dataset, and ends what is read for another."""
        self._turn += 1
        if not self._unread:
            self._return_to(self._start)
            self._begin([])
        self._unread = False
        return self._turn

    def _read_pass(self, turn: int) -> Iterator[tuple[Any, Any]]:
        """Yields states and elements of a pass, or of its rest; of the next if that is empty."""
        drawn = self._draw()
        if drawn is None:
            self._source.begin_pass()
            drawn = self._draw()
        if drawn is None and hasattr(self.made, "__next__"):  # an iterator that is used up
            self._open_anew()
            drawn = self._draw()
        while drawn is not None and turn == self._turn:
            found = tf.nest.map_structure(_describe, drawn[1])
            fits = tf.nest.map_structure(lambda a, b: a.is_compatible_with(b), self.spec, found)
            if not all(tf.nest.flatten(fits)):
                raise ValueError(
                    f"an element is {describe(found)}, expected {describe(self.spec)}; where sizes "
                    "vary, give the reader an attribute element_spec of tf.TensorSpec with None"
                )
            yield drawn
            drawn = self._draw()

    def read_elements(self, endless: bool = False) -> tf.data.Dataset:
        """Returns a pass of elements: the first one each time, or the next if it is endless."""
        turns: list[int] = []

        def read() -> Iterator[Any]:
            if not (endless and turns):
                turns.append(self._take_turn())
            for _, element in self._read_pass(turns[-1]):
                yield element

        return self._generate(read, self.spec)

    def read_batches(
        self,
        make_pass: Callable[[tf.data.Dataset, bool], tf.data.Dataset],
        per_element: int | None = None,
    ) -> tf.data.Dataset:
        """Returns the endless dataset of what steps take, whose position can be saved.

        Args:
            make_pass: makes batches of a pass; of pairs, since rows have numbers, as it is told
            per_element: how many examples an element holds where these are used as they are;
                default: as many as it has rows
        """
        turns: list[int] = []

        def read() -> Iterator[Any]:
            turns[:] = turns or [self._take_turn()]
            for state, element in self._read_pass(turns[0]):
                rows = _count_rows(element) if per_element is None else 1
                first, skipped = self._numbered, self._skip
                self._numbered, self._skip = first + rows, 0
                if skipped < rows:
                    self._elements.append((first, state, element))
                    numbers = np.arange(first + skipped, first + rows)
                    yield (_drop_rows(element, skipped) if skipped else element), numbers

        def note(numbers: np.ndarray) -> None:
            if turns[0] == self._turn:
                self._given += per_element or len(numbers)
                self._batches.append((self._given, int(numbers[-1])))

        def take_batch(batch: Any, numbers: tf.Tensor) -> Any:
            with tf.control_dependencies([tf.numpy_function(note, [numbers], [])]):
                return tf.nest.map_structure(tf.identity, batch)

        spec = self.spec, tf.TensorSpec([None], tf.int64)
        one = make_pass(self._generate(read, spec), True)
        # The rest of the pass that a resumed run is in may have no batch, at which repeat ends.
        return one.concatenate(one.repeat()).map(take_batch)

    def _generate(self, read: Callable[[], Iterator[Any]], spec: Any) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_generator(read, output_signature=spec)
        if getattr(self.made, "num_batches", 0) is None:  # a PyDataset without an end
            number = tf.data.INFINITE_CARDINALITY
            return dataset.apply(tf.data.experimental.assert_cardinality(number))
        return dataset

    # ---- Checkpoints -----------------------------------------------------------------------

    def note_used(self, examples: int) -> None:
        """Notes that training has used so many more; earlier positions are dropped."""
        self._used += examples
        while self._batches and self._batches[0][0] < self._used:
            self._batches.popleft()
        last = self._batches[0][1] if self._used else -1
        while len(self._elements) > 1 and self._elements[1][0] <= last:
            self._elements.popleft()

    def write_position(self) -> str:
        """Returns the position after the last example used, as a text.

        Raises:
            ValueError: the state holds something that has no text.
        """
        if self._used:
            first, state, element = self._elements[0]
            given, last = self._batches[0]
            assert given == self._used
            self._position = state, last - first + 1, _compute_checksum(element)
        return write_literal(self._position)

    def go_to(self, text: str) -> str | None:
        """Goes to a position that was saved, before anything is read; or returns why it cannot."""
        try:
            if (position := read_literal(text)) is None:  # nothing had been used
                return None
            state, rows, checksum = position
            self._unread, self._ahead = False, []  # if it fails, the next goes back to the start
            self._return_to(state)
            drawn = self._draw()
            if drawn is None or _compute_checksum(drawn[1]) != checksum:
                raise ValueError("by it, it gives other elements than it did")
        except Exception as error:
            return f"the reader does not take its state back: {brief(error)}"
        self._begin([drawn], position, rows)
        return None


# ---- Sources -----------------------------------------------------------------------------------


def find_methods(owner: Any) -> tuple[str, str] | None:
    """Returns the names by which an object gives and takes a state, if it does."""
    for names in _METHODS:
        if all(callable(getattr(owner, name, None)) for name in names):
            return names
    return None


class _Source:
    """Reads ``iterator`` pass after pass; it, or what it is made of, may have a state.

    ``can_return`` says whether it can be read again from an earlier position.
    """

    def __init__(self, made: Any) -> None:
        self._made, self.iterator = made, iter(made)
        own = find_methods(made)
        self._holds = own is not None  # or its iterator does
        self._names = own or find_methods(self.iterator)
        self.has_state = self._names is not None
        can_return = self.has_state or self.iterator is not made
        self.can_return = getattr(made, "can_return", can_return)

    def begin_pass(self) -> None:
        """Reads the next pass, or what a state that was set says."""
        self.iterator = iter(self._made)

    def get_state(self) -> Any:
        """Returns where the next element is read; None without a state."""
        if self._names is None:
            return None
        owner = self._made if self._holds else self.iterator
        return copy.deepcopy(getattr(owner, self._names[0])())

    def set_state(self, state: Any) -> None:
        """Reads on from a state; without one, from the start."""
        if self._names and self._holds:
            getattr(self._made, self._names[1])(state)
        self.begin_pass()
        if self._names and not self._holds:
            getattr(self.iterator, self._names[1])(state)


class _Passes:
    """Makes of a ``PyDataset`` an iterable with a state, read by as many threads as it has workers.

    To reach a state, ``on_epoch_begin`` and ``on_epoch_end`` do for each pass what they do again:
    where they are the user's, nothing leads back.
    """

    def __init__(self, made: keras.utils.PyDataset) -> None:
        self._made = made
        self._state = {"pass": 0, "index": 0}
        own, plain = type(made), keras.utils.PyDataset
        hooks = own.on_epoch_begin, own.on_epoch_end
        self.can_return = hooks == (plain.on_epoch_begin, plain.on_epoch_end)

    def get_state(self) -> dict[str, int]:
        """Returns how many passes were read, and the index of the next element."""
        return self._state

    def set_state(self, state: dict[str, int]) -> None:
        """Reads on from a state; only before anything is read, unless it can return."""
        for _ in range(state["pass"]):
            self._made.on_epoch_begin()
            self._made.on_epoch_end()
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        made, state = self._made, self._state
        made.on_epoch_begin()
        indices: Iterator[int] = itertools.count(state["index"])
        if made.num_batches is not None:
            indices = iter(range(state["index"], made.num_batches))
        threads = max(made.workers, 1)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            submit = functools.partial(pool.submit, made.__getitem__)
            ahead = collections.deque(map(submit, itertools.islice(indices, threads)))
            while ahead:
                element = ahead.popleft().result()
                ahead.extend(map(submit, itertools.islice(indices, 1)))
                state["index"] += 1
                yield element
        made.on_epoch_end()
        state["pass"], state["index"] = state["pass"] + 1, 0


# ---- Elements ----------------------------------------------------------------------------------


def _make_arrays(element: Any) -> Any:
    """Returns an element of arrays; lists of arrays become tuples, as in Keras."""
    if isinstance(element, dict):
        return {key: _make_arrays(part) for key, part in element.items()}
    if isinstance(element, list | tuple) and not all(map(np.isscalar, element)):
        parts = tuple(map(_make_arrays, element))
        return type(element)(*parts) if hasattr(element, "_fields") else parts
    return np.asarray(element)


def _describe(part: Any) -> tf.TensorSpec:
    """Returns the specification of an array, or of another one, with any number of rows."""
    shape = [None, *part.shape[1:]] if len(part.shape) else []
    return tf.TensorSpec(shape, tf.as_dtype(part.dtype))


def _count_rows(element: Any) -> int:
    return next(len(part) for part in tf.nest.flatten(element) if part.ndim)


def _drop_rows(element: Any, first: int) -> Any:
    return tf.nest.map_structure(lambda part: part[first:] if part.ndim else part, element)


def _compute_checksum(element: Any) -> int:
    total = 0
    for part in tf.nest.flatten(element):
        content = repr(part.tolist()).encode() if part.dtype == object else part.tobytes()
        total = zlib.crc32(content, total)
    return total


# ---- States as texts ---------------------------------------------------------------------------

_ARRAY = "__array__"


def write_literal(value: Any) -> str:
    """Returns a state as a Python literal, without pickle: a checkpoint may come from anywhere.

    Arrays, and tensors of PyTorch, are dicts that say what they are.

    Raises:
        ValueError: part of it is no number, text, bytes, array, nor a list, tuple or dict of such.
    """
    return repr(_encode(value))


def read_literal(text: str) -> Any:
    """Returns the state of a text.

    Raises:
        ValueError, SyntaxError: it is none.
    """
    return _decode(ast.literal_eval(text))


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(_encode, value))
    if isinstance(value, dict):
        return {_encode(key): _encode(part) for key, part in value.items()}
    of_torch = kind.__module__ == "torch" and kind.__name__ == "Tensor"
    if of_torch or isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if not array.dtype.hasobject:
            return {_ARRAY: (array.dtype.str, array.shape, array.tobytes(), kind.__name__)}
    if value is None or kind in (bool, int, str, bytes) or (kind is float and np.isfinite(value)):
        return value
    raise ValueError(f"the reader's state holds a {kind.__name__}: {value!r:.50}")


def _decode(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_decode, value))
    if not isinstance(value, dict):
        return value
    if set(value) != {_ARRAY}:
        return {_decode(key): _decode(part) for key, part in value.items()}
    dtype, shape, content, kind = value[_ARRAY]
    array = np.frombuffer(content, dtype).reshape(shape).copy()
    if kind == "Tensor":
        return sys.modules["torch"].from_numpy(array)
    return array if kind == "ndarray" else array[()]
