"""A reader in Python as a dataset of global batches, and the position that a step has left it at.

A position is the state before the element that holds the last row used, how many of its rows are
used, and a checksum of that row, by which a reader is found out that does not give the same again.
Positions are kept for the batches that are read ahead; training says how many examples it used.
"""

from __future__ import annotations

import collections
import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.checks.contract import describe
from ctl_core.defaults import DIFFER
from ctl_core.errors import brief
from ctl_core.readers.saved import read_literal, write_literal
from ctl_core.readers.sources import open_source

_END = object()
_SCALARS = (bool, int, float, str, bytes, np.generic)
Position = tuple[Any, int, int]  # the state, rows used (0: all), checksum of the last of them
Step = tuple[list[Any], int, Position]  # its batches, how many examples they have, where it ends


class Reader:
    """Reads what a hook returned: each dataset of it begins at its start, or where ``go_to`` says.

    Attributes:
        made: what the hook returned
        spec: of its elements, without a first dimension
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
        self.made, self._remake = made, remake
        self._turn = 0
        self._source = open_source(made)
        self._start = copy.deepcopy(self._source.get_state())
        first = self._draw()
        if first[1] is _END:
            raise ValueError("the reader has no element")
        self._begin([first])
        spec = getattr(made, "element_spec", None)
        self.spec = tf.nest.map_structure(_describe, first[1] if spec is None else spec)
        why = f"a {type(made).__name__} has no get_state and set_state"
        self.why_not = None if self._source.has_state else why

    # ---- Reading ---------------------------------------------------------------------------

    def _begin(self, ahead: list[Any], position: Position | None = None, skip: int = 0) -> None:
        """Notes that nothing is used of what the next dataset reads, but rows of its first."""
        self._ahead, self._position, self._skip = ahead, position, skip
        self._fresh = True
        self._used = self._given = 0
        self._positions: collections.deque[tuple[int, Position]] = collections.deque()

    def _draw(self) -> tuple[Any, Any]:
        """Returns the state before the next element of the pass, and this, or the end."""
        state = copy.deepcopy(self._source.get_state())
        element = next(self._source.iterator, _END)
        return state, element if element is _END else _make_arrays(element)

    def _set_state(self, state: Any) -> None:
        if not self._source.can_return:
            self._open_anew()
        self._source.set_state(copy.deepcopy(state))

    def _open_anew(self) -> None:
        made = self._remake()
        if made is self.made:
            raise ValueError(
                f"the {type(made).__name__} is made outside of the hook, and cannot be read again; "
                "make it inside"
            )
        self.made, self._source = made, open_source(made)

    def _take_turn(self) -> int:
        """Begins to read for one dataset, and ends what is read for another."""
        self._turn += 1
        if not self._fresh:
            self._set_state(self._start)
            self._begin([])
        self._fresh = False
        return self._turn

    def _read_pass(self, turn: int) -> Iterator[tuple[Any, Any]]:
        """Yields states and elements of a pass, or of its rest; of the next if that is empty."""
        some = False
        for again in (False, True):
            while turn == self._turn:
                state, element = self._ahead.pop() if self._ahead else self._draw()
                if element is _END:
                    break
                some = True
                self._check(element)
                yield state, element
            if turn != self._turn:
                return
            if not some and not again and hasattr(self.made, "__next__"):
                self._open_anew()
            else:
                self._source.begin_pass()
            if some:
                return

    def _check(self, element: Any) -> None:
        found = tf.nest.map_structure(_describe, element)
        pairs = zip(tf.nest.flatten(self.spec), tf.nest.flatten(found), strict=True)
        if not all(spec.is_compatible_with(one) for spec, one in pairs):
            raise ValueError(
                f"an element is {describe(found)}, expected {describe(self.spec)}; where sizes "
                "vary, give the reader an attribute element_spec of tf.TensorSpec with None"
            )

    def read_elements(self, endless: bool = False) -> tf.data.Dataset:
        """Returns a pass of elements, the first one each time, or all passes."""

        def read() -> Iterator[Any]:
            turn, some = self._take_turn(), True
            while some:
                some = False
                for _, element in self._read_pass(turn):
                    some = endless
                    yield element

        dataset = tf.data.Dataset.from_generator(read, output_signature=self.spec)
        if self._source.endless:
            dataset = dataset.apply(
                tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            )
        return dataset

    def read_batches(
        self,
        size: int,
        rows: int | None,
        together: int,
        keeps: bool,
        count: Callable[[Any], int] | None,
    ) -> tf.data.Dataset:
        """Returns the endless dataset of what steps take, whose position can be saved.

        Args:
            size: examples in a batch
            rows: first dimension of its tensors, if that is fixed
            together: batches of a step
            keeps: whether a smaller last batch of a pass is kept
            count: how many examples an element holds, if elements are batches as they are; others
                are joined and cut
        """

        def read() -> Iterator[Any]:
            turn, empty = self._take_turn(), 0
            while empty < 2:  # passes: the rest of a resumed one may have too few
                elements, empty = self._read_pass(turn), empty + 1
                steps = (
                    self._cut(elements, size, keeps)
                    if count is None
                    else _group(elements, size, together, keeps, count)
                )
                for batches, examples, position in steps:
                    empty = 0
                    self._given += examples
                    self._positions.append((self._given, position))
                    yield from batches

        spec = tf.nest.map_structure(lambda part: _describe(part, rows), self.spec)
        return tf.data.Dataset.from_generator(read, output_signature=spec)

    def _cut(self, elements: Iterator[Any], size: int, keeps: bool) -> Iterator[Step]:
        """Yields batches of so many rows, how many they have, and the position after them."""
        held: collections.deque[tuple[Any, Any, int]] = collections.deque()
        total = 0

        def take(rows: int) -> Step:
            parts, need = [], rows
            while need:
                state, element, first = held.popleft()
                stop = min(first + need, _count_rows(element))
                parts.append(_slice(element, first, stop))
                need -= stop - first
                position = state, stop, _sum_row(element, stop - 1)
                if stop < _count_rows(element):
                    held.appendleft((state, element, stop))
            batch = parts[0] if len(parts) == 1 else tf.nest.map_structure(_join, *parts)
            return [batch], rows, position

        for state, element in elements:
            first, self._skip = self._skip, 0
            held.append((state, element, first))
            total += _count_rows(element) - first
            while total >= size:
                yield take(size)
                total -= size
        if keeps and total:
            yield take(total)

    # ---- Checkpoints -----------------------------------------------------------------------

    def note_used(self, examples: int) -> None:
        """Notes that training has used so many more; earlier positions are dropped."""
        self._used += examples
        while self._positions and self._positions[0][0] < self._used:
            self._positions.popleft()

    def write_position(self) -> str:
        """Returns the position after the last example used, as a text.

        Raises:
            ValueError: the state holds something that has no text.
        """
        if not self._used:
            return write_literal(self._position)
        given, position = self._positions[0]
        assert given == self._used
        return write_literal(position)

    def go_to(self, text: str) -> str | None:
        """Goes to a position that was saved, before anything is read; or returns why it cannot."""
        try:
            if (position := read_literal(text)) is None:  # nothing had been used
                return None
            state, rows, sum_of_row = position
            self._fresh = False  # if it fails, the next dataset goes back to the start
            self._set_state(state)
            _, element = self._draw()
            if element is _END or _sum_row(element, rows - 1) != sum_of_row:
                raise ValueError("by it, it gives other elements than it did")
            whole = rows == 0 or rows == _count_rows(element)
        except Exception as error:
            return f"the reader does not take its state back: {brief(error)}"
        self._begin([] if whole else [(state, element)], position, 0 if whole else rows)
        return None


def _group(
    elements: Iterator[Any], size: int, together: int, keeps: bool, count: Callable[[Any], int]
) -> Iterator[Step]:
    """Yields as many elements as a step takes, which are left as they are."""
    group: list[Any] = []
    examples = 0
    for state, element in elements:
        number = count(element)
        if number == size or keeps:
            group.append(element)
            examples += number
        if len(group) == together:
            yield group, examples, (state, 0, _sum_row(element, -1))
            group, examples = [], 0


def _make_arrays(element: Any) -> Any:
    """Returns an element of arrays; lists of arrays become tuples, as in Keras."""
    if isinstance(element, dict):
        return {key: _make_arrays(part) for key, part in element.items()}
    if isinstance(element, list | tuple) and not all(isinstance(p, _SCALARS) for p in element):
        parts = tuple(map(_make_arrays, element))
        return type(element)(*parts) if hasattr(element, "_fields") else parts
    return np.asarray(element)


def _describe(part: Any, rows: int | None = None) -> tf.TensorSpec:
    """Returns the specification of an array, or of another one, with so many rows."""
    dtype = tf.as_dtype(part.dtype)
    return tf.TensorSpec([rows, *part.shape[1:]] if len(part.shape) else [], dtype)


def _count_rows(element: Any) -> int:
    """Returns the first dimension, which all arrays have to share."""
    found = {len(part) for part in tf.nest.flatten(element) if part.ndim}
    if len(found) != 1:
        raise ValueError(DIFFER)
    return found.pop()


def _slice(element: Any, first: int, stop: int) -> Any:
    return tf.nest.map_structure(lambda part: part[first:stop] if part.ndim else part, element)


def _join(*parts: Any) -> Any:
    return np.concatenate(parts) if parts[0].ndim else parts[0]


def _sum_row(element: Any, row: int) -> int:
    """Returns a checksum of one row of each array."""
    total = 0
    for part in tf.nest.flatten(element):
        one = part[row] if part.ndim and len(part) else part
        total = zlib.crc32(
            repr(one.tolist()).encode() if one.dtype == object else one.tobytes(), total
        )
    return total
