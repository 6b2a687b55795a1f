"""A reader as tf.data: read ahead in steps, with the reader's state after each of them.

TensorFlow cannot save where a function in Python is, and reads ahead of the steps that are taken.
So whatever depends on the position is done here, before TensorFlow gets an element: passes, what
they leave out, and which elements make a step. Each process takes the same number of elements a
step, so that the number of steps taken says which state belongs to a checkpoint; those before are
dropped.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.errors import CtlError, RunError, SetupError, brief
from ctl_core.files import written_whole
from ctl_core.hooks import Hook
from ctl_core.readers.elements import ReadError, arrays, fits, rows, same, spec_of
from ctl_core.readers.kinds import END, Items, Reader, reader_of
from ctl_core.readers.saved import NotPlain, decoded, encoded

# So many elements are looked at to know their structure.
_LOOK = 4
# So many seconds a reader has for the element that it is reading when it is to end.
_PATIENCE = 10.0


class Unfitting(Exception):
    """A saved position that is none of this reader; the message says why."""


@dataclasses.dataclass(frozen=True)
class Looked:
    """What was found out on a reader that the run does not read.

    Attributes:
        made: what the hook returned then
        start: its position before that, if that takes a state to reach again
        spec: of an element
        notes: what a user should know
    """

    made: Any
    start: dict[str, Any] | None
    spec: Any
    notes: tuple[str, ...]


class Stream:
    """What one process reads.

    Attributes:
        reader: what is read
        looked: what is known of it
        why_not: why its position cannot be saved, or None
        left_out: what the first pass leaves out, as ``Found.left_out``, once it is known
        begun: whether anything was read for steps
    """

    def __init__(
        self,
        hook: Hook,
        reader: Reader,
        count: Callable[[Any], int | None] | None,
        looked: Looked | None,
        other: Callable[[], Reader | None] | None,
    ) -> None:
        """Looks at the first elements, and whether the state can be read back, if nobody has.

        Args:
            hook: that made it
            reader: as it was made
            count: how many examples an element holds, of tensors; None: its first dimension
            looked: what was found out before
            other: makes another such reader, which has to take the state of this one; None: nobody
                asks for it

        Raises:
            SetupError: reading fails, elements differ, or the state cannot be read back.
        """
        self.reader = reader
        self.why_not = reader.why_not
        self.left_out: tuple[int, int, int] | None = None
        self.begun = False
        self._hook = hook
        self._count = count
        self._ahead: list[Any] = []
        self._lock = threading.RLock()
        self._closed = False
        self._turn = 0
        self._read = self._taken = 0
        self._states: dict[int, dict[str, Any]] = {}
        self._shape: dict[str, Any] = {}
        if looked is None:
            looked = self._look(other)
        elif looked.made is reader.made:
            reader.check_shared()
            if looked.start is not None:
                with self._failing():
                    reader.begin_again(looked.start)
        self.looked = looked
        self._check = fits(looked.spec)

    # ---- Looking ---------------------------------------------------------------------------

    def _look(self, other: Callable[[], Reader | None] | None) -> Looked:
        reader, notes = self.reader, [self.reader.note] if self.reader.note else []
        with self._failing():
            start = copy.deepcopy(reader.start())
            first = self._element()
            if first is END:
                raise self._hook.reject("returned a reader without any element.")
            self._ahead = [first]
            if other is not None and reader.why_not is None:
                notes += self._check_state(other)
            while len(self._ahead) < _LOOK and self._ahead[-1] is not END:
                self._ahead.append(self._element())
            seen = [element for element in self._ahead if element is not END]
            spec = getattr(reader.made, "element_spec", None)
            spec = spec_of(seen) if spec is None else tf.nest.map_structure(_relaxed, spec)
            for element in seen:
                fits(spec)(element)
        return Looked(reader.made, start, spec, tuple(notes))

    def _check_state(self, other: Callable[[], Reader | None]) -> list[str]:
        """Gives another reader the state after the first element, as a checkpoint would hold it.

        Returns:
            What a user should know of it.
        """
        reader, text = self.reader, json.dumps(self._plain(self.reader.position()))
        second = self._element()
        self._ahead.append(second)
        resumed = other()
        if resumed is None:
            raise self._hook.reject("returned a reader first, and then none.")
        try:
            resumed.go_to(decoded(json.loads(text)))
            again = resumed.read()
        except CtlError:
            raise
        except Exception as error:
            raise self._hook.reject(
                f"the reader's state cannot be read back: {brief(error)}; a reader that is made "
                "anew has to take the state that another one gave."
            ) from error
        again = again if again is END else arrays(again)
        resumed.close()
        if again is second or (END not in (again, second) and same(again, second)):
            return []
        if reader.by_index:
            return [
                f"{self._hook}: an item of the PyDataset is another one when it is read again; "
                "what is random in __getitem__ has to be a function of the index, and of the pass, "
                "or a resumed run trains on other numbers."
            ]
        raise self._hook.reject(
            "the reader's state cannot be read back: a reader that is made anew, and given the "
            "state after the first element, gives another second one; the state has to hold "
            "whatever the next elements depend on, as it is after the element given last."
        )

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turns what a reader raises into one line that names the hook."""
        try:
            yield
        except CtlError:
            raise
        except ReadError as error:
            raise self._hook.reject(f"{error}.") from error
        except Exception as error:
            raise self._hook.reject(f"reading the data failed: {brief(error)}") from error

    def _plain(self, position: dict[str, Any]) -> Any:
        try:
            return encoded(position)
        except NotPlain as error:
            where = str(error).replace("['own']", "its state", 1)
            raise self._hook.reject(
                f"the reader's state cannot be written to a checkpoint: {where}; expected numbers, "
                "texts, bytes, arrays, and lists, tuples and dicts of such."
            ) from error

    def batches(self) -> tuple[int, int] | None:
        """Returns how many elements a pass has, and how many examples the last, without reading it.

        Returns:
            None where only a whole pass would tell.
        """
        if not isinstance(self.reader, Items) or self.reader.endless:
            return None
        with self._failing():
            number, last = self.reader.last()
            return number, self.examples_in(arrays(last)) or 0

    # ---- Reading ---------------------------------------------------------------------------

    def _element(self) -> Any:
        element = self.reader.read()
        return element if element is END else arrays(element)

    def _next(self) -> Any:
        with self._lock:
            if self._closed:
                return END
            element = self._ahead.pop(0) if self._ahead else self._element()
        if element is not END:
            self._check(element)
        return element

    def close(self) -> None:
        """Reads no more, though TensorFlow may still ask: others may read the same object now."""
        self._closed = True
        if self._lock.acquire(timeout=_PATIENCE):  # until an element that is being read is there
            try:
                self.reader.close()
            finally:
                self._lock.release()

    def examples_in(self, element: Any) -> int | None:
        """Returns how many examples an element of arrays holds."""
        if self._count is None:
            return rows(element)
        return self._count(tf.nest.map_structure(tf.convert_to_tensor, element))

    def _dataset(self, generator: Callable[[], Iterator[Any]], spec: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(generator, output_signature=spec)

    def one_pass(self) -> tf.data.Dataset:
        """Returns a pass; each time that it is iterated over, the next one."""

        def elements() -> Iterator[Any]:
            while (element := self._next()) is not END:
                yield element

        options = tf.data.Options()  # what is looked at is not read ahead
        options.experimental_optimization.inject_prefetch = False
        return self._dataset(elements, self.looked.spec).with_options(options)

    def from_start(self) -> tf.data.Dataset:
        """Returns a pass; each time that it is iterated over, the same, as an evaluation needs."""

        def elements() -> Iterator[Any]:
            with self._lock:
                self._turn += 1
                turn, self._ahead = self._turn, []
                self.reader.begin_again(self.looked.start)
            while True:
                with self._lock:
                    if turn != self._turn:  # an evaluation that was ended reads ahead no more
                        return
                    element = self._next()
                if element is END:
                    return
                yield element

        return self._dataset(elements, self.looked.spec)

    # ---- Steps -----------------------------------------------------------------------------

    def in_steps(
        self, size: int, together: int, elements: int | None, numbered: bool
    ) -> tf.data.Dataset:
        """Returns the endless stream of the elements that steps are made of.

        Args:
            size: examples in an element; others are left out, unless numbered
            together: elements of a step
            elements: of that size in a pass, or all of them if numbered; None if nobody knows
            numbered: whether a pass is kept to its last element, and each comes with its number in
                the pass, an int64 scalar
        """
        self._shape = {"size": size, "together": together, "kept": numbered}
        spec = self.looked.spec
        if not numbered:
            return self._dataset(lambda: self._counted(self._full(size, together, elements)), spec)
        assert elements is not None
        spec = (tf.TensorSpec([], tf.int64), spec)
        return self._dataset(lambda: self._counted(self._all(together, elements)), spec)

    def _counted(self, steps: Iterator[list[Any]]) -> Iterator[Any]:
        """Keeps the state after the elements of each step, and hands these out."""
        self.begun = True
        for group in steps:
            self._read += 1
            if self.why_not is None:
                self._states[self._read] = copy.deepcopy(self.reader.position())
            yield from group

    def _full(self, size: int, together: int, expected: int | None) -> Iterator[list[Any]]:
        """Yields the elements of one step after the other; what fills no step is left out."""
        while True:
            whole = self.reader.index == 0
            group: list[Any] = []
            used = odd = odd_examples = 0
            while (element := self._next()) is not END:
                number = self.examples_in(element) or 0
                if number != size:
                    odd, odd_examples = odd + 1, odd_examples + number
                    continue
                group.append(element)
                used += 1
                if len(group) == together:
                    yield group
                    group = []
            if self._closed:
                return
            if whole and used < together:
                raise ReadError(
                    f"a pass has {used} elements of {size} examples, fewer than one global batch"
                )
            if whole and self.left_out is None:
                self.left_out = odd, odd_examples, len(group) * size
                if expected not in (None, used) and self.reader.by_index:
                    raise ReadError(
                        f"a pass has {used} batches of {size} examples, {expected} were expected "
                        "of its length: where epochs are counted, all batches of a PyDataset but "
                        "the last hold as many; train by --steps"
                    )

    def _all(self, together: int, elements: int) -> Iterator[list[Any]]:
        """Yields all elements of a pass, numbered; the last step may have fewer."""
        while True:
            group: list[Any] = []
            index = self.reader.index
            while (element := self._next()) is not END:
                group.append((index, element))
                index += 1
                if index % together == 0 or index == elements:
                    yield group
                    group = []
            if self._closed:
                return
            if index != elements:
                raise ReadError(
                    f"a pass has {index} elements, and had {elements} when they were counted, "
                    "which last_batch keep needs"
                )

    def took(self, steps: int) -> None:
        """Notes that so many steps were taken; states before their end are dropped."""
        for step in range(self._taken, self._taken + steps):
            self._states.pop(step, None)
        self._taken += steps

    # ---- Checkpoints -----------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Writes the position after the last step taken, whole or not at all.

        Raises:
            OSError: it cannot be written.
            RunError: the state holds something by now that cannot be.
        """
        position = self._states.get(self._taken)
        try:
            plain = None if position is None else self._plain(position)
        except SetupError as error:
            raise RunError(str(error)) from error
        with written_whole(path) as beside:
            beside.write_text(json.dumps({**self._shape, "position": plain}), encoding="utf-8")

    def restore(self, path: Path) -> None:
        """Goes to a position that was saved; before anything is read.

        Raises:
            Unfitting: it is of other batches, its file is damaged, or the reader refuses it.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            position = decoded(content.pop("position"))
            if position is not None and not isinstance(position["index"] + position["pass"], int):
                raise ValueError(f"{path.name} has no position")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unfitting("the file of the reader's state is damaged or gone") from error
        if content != self._shape:
            raise Unfitting(
                f"it was saved with {content.get('together')} elements of {content.get('size')} "
                f"examples a step, not {self._shape['together']} of {self._shape['size']}"
            )
        self._read = self._taken = 0
        self._states = {}
        if position is None:
            return
        try:
            self.reader.go_to(copy.deepcopy(position))
        except Exception as error:
            raise Unfitting(f"the reader does not take its state back: {brief(error)}") from error
        self._states[0] = position


def stream_of(
    hook: Hook,
    made: Any,
    remake: Callable[[], Any],
    count: Callable[[Any], int | None] | None,
    looked: Looked | None = None,
    anew: Callable[[], Any] | None = None,
) -> Stream | None:
    """Returns how to read what a hook returned; None if it is nothing to be read.

    Args:
        hook: that made it
        made: what it returned
        remake: calls it again, for a pass after one that has used up an iterator
        count: how many examples an element holds, of tensors; None: its first dimension
        looked: what was found out on what it returned before
        anew: calls it as a resumed run does, for a reader that has to take the state of this one

    Raises:
        SetupError: it cannot be read as it should.
    """
    reader = reader_of(hook, made, remake)
    if reader is None:
        return None
    other = None if anew is None else lambda: reader_of(hook, anew(), remake)
    return Stream(hook, reader, count, looked, other)


def _relaxed(spec: tf.TensorSpec) -> tf.TensorSpec:
    """The same without a first dimension: the last batch of a pass may be smaller."""
    return tf.TensorSpec([None, *spec.shape[1:]] if spec.shape.rank else spec.shape, spec.dtype)
