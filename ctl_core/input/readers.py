"""Reads Python objects as datasets, and saves and restores their position.

A reader is an iterable. Each of its iterators reads one pass over the data. A reader may have a
state, which ``get_state()`` returns. After ``set_state(state)``, reading continues from this state
to the end of the pass. In grain, the iterators have these methods. In torchdata, the methods are
called ``state_dict`` and ``load_state_dict``. For a PyDataset, this module implements them.
Iterables without a state can be read, too.

A position has three parts: the state before the element that contains the last used example, the
number of examples of this element that were used, and a checksum of the element. The checksum
detects readers that return different elements after their state is restored.

For example, if each element has 4 examples and training has used 6, the position consists of the
state before the second element, the number 2, and the checksum of the second element. A resumed run
reads the second element again, and drops its first 2 examples.

TensorFlow prefetches elements before training uses them. Therefore, each element is stored until
training reports that its examples have been used. The index of its first example, counted over all
examples that steps use, is stored with it. In the example, the resumed run uses the third example
of the second element first. This example has the index 0, so the first example of the second
element has the index -2, and the first example of the third element has the index 2.
"""

from __future__ import annotations

import ast
import collections
import concurrent.futures
import copy
import itertools
import pickle
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ctl_core.hooks.hooks import Hook, describe, name_kind
from ctl_core.run.errors import format_error
from ctl_core.types import BatchSpec, Structure

# An iterable of batches, or a PyDataset.
Readable: TypeAlias = Any

# A structure of arrays.
Element: TypeAlias = Structure

# The result of ``get_state``.
ReaderState: TypeAlias = Any

# How many elements at the beginning of two passes are compared.
_COMPARED = 2

# Values that ``ast.literal_eval`` can parse.
Literals: TypeAlias = Any

# The state before an element, the number of used examples in the element, and its checksum.
Position: TypeAlias = tuple[ReaderState, int, int]

# Objects of these types are not accepted as readers. Most can be iterated over, but their items are
# not batches.
_NO_READERS = (str, bytes, list, tuple, dict, set, np.ndarray, tf.Tensor, type)


def open_reader(
    hook: Hook,
    returned: Readable | tf.data.Dataset,
    call_again: Callable[[], Readable],
    previous: Reader | None = None,
) -> Reader | None:
    """Returns a reader for the object that a hook returned, or None for a tf.data.Dataset.

    Args:
        hook: the hook
        returned: the object that the hook returned
        call_again: a function that calls the hook again
        previous: the reader that an earlier call returned. It is returned again if it reads the
            same object

    Raises:
        SetupError: the object cannot be read.
    """
    if isinstance(returned, tf.data.Dataset):
        return None
    is_readable = isinstance(returned, Iterable | keras.utils.PyDataset)
    if not is_readable or isinstance(returned, _NO_READERS):
        kind = name_kind(returned)
        raise hook.reject(f"returned {kind}, expected a tf.data.Dataset, or a reader.")
    if previous is not None and previous.readable is returned:
        return previous
    try:
        return Reader(returned, call_again)
    except Exception as error:
        raise hook.reject(f"reading the data: {format_error(error)}") from error


class StateMethods(NamedTuple):
    """The methods that get and set the state of an object."""

    get_state: Callable[[], ReaderState]
    set_state: Callable[[ReaderState], object]

    def copy_state(self) -> ReaderState:
        """Returns a copy of the state, which does not change when the object is read."""
        return copy.deepcopy(self.get_state())

    def restore(self, state: ReaderState | None) -> None:
        """Sets the state of the object to a copy of ``state``; None leaves it unchanged."""
        if state is not None:
            self.set_state(copy.deepcopy(state))


class DrawnElement(NamedTuple):
    """An element that was read from a reader.

    Attributes:
        state: the state of the reader immediately before the element was read
        element: the element itself
        used: the number of its first examples that had been used when the position was saved; 0 for
            all elements except the first one after a restored position
    """

    state: ReaderState
    element: Element
    used: int = 0


class UsedElement(NamedTuple):
    """An element whose examples are used by steps.

    Attributes:
        first_example: the index of the element's first example, counted over all examples that
            steps use from this reading; negative if the example had been used when the position was
            saved
        state: the state of the reader immediately before the element was read
        element: the element itself
    """

    first_example: int
    state: ReaderState
    element: Element


class Reading:
    """The elements that follow a position, over all passes, and a record of the examples used.

    Attributes:
        passes: an iterator over elements, which yields None after each pass
        is_taken: whether a dataset already reads these elements
    """

    def __init__(
        self, passes: Iterator[DrawnElement | None], position: Position | None = None
    ) -> None:
        """Starts at a position; None means the start of the data."""
        self.passes = passes
        self.is_taken = False
        self._position = position
        self._examples_used = 0
        self._elements: collections.deque[UsedElement] = collections.deque()

    def add(self, element: UsedElement) -> None:
        """Keeps an element until all of its examples have been used."""
        self._elements.append(element)

    def note_used(self, examples: int) -> None:
        """Records that training used more examples.

        Elements before the one that contains the last used example are dropped.
        """
        self._examples_used += examples
        while len(self._elements) > 1 and self._elements[1].first_example < self._examples_used:
            self._elements.popleft()

    def find_position(self) -> Position | None:
        """Returns the position after the last used example; None means the start of the data."""
        if self._examples_used == 0:
            return self._position
        first_example, state, element = self._elements[0]
        return state, self._examples_used - first_example, _compute_checksum(element)


class Reader:
    """Reads the object that a hook returned, from its start or from a position set by ``go_to``.

    Attributes:
        readable: the object that the hook returned
        first_element: the first element of the data
        spec: the specification of the elements, which allows any number of rows
        obstacle: the reason why the position of the reader cannot be saved; None if it can be saved
    """

    def __init__(self, readable: Readable, call_again: Callable[[], Readable]) -> None:
        """Reads the first element.

        Args:
            readable: the object that the hook returned
            call_again: a function that calls the hook again

        Raises:
            ValueError: the object has no element. Errors that the object raises are passed on.
        """
        self.readable = readable
        self._call_again = call_again
        self._goes_on = False  # whether a dataset has read one pass after another
        passes = _read_passes(readable)
        first = next(passes)
        if first is None:
            raise ValueError("the reader has no elements")
        self._start = first.state
        self.first_element = first.element
        self._reading = Reading(itertools.chain([first], passes))
        spec = getattr(readable, "element_spec", None)
        if spec is None:
            spec = first.element
        self.spec: BatchSpec = tf.nest.map_structure(_describe, spec)
        self.obstacle: str | None = None
        if self._start is None:
            self.obstacle = f"a {type(readable).__name__} has no get_state and set_state"

    def _open(self, state: ReaderState) -> Iterator[DrawnElement | None]:
        """Returns an iterator over the elements of all passes, starting at a position.

        If the object cannot restore a position, or if reading may have changed the object, the hook
        is called again to create a new object.
        """
        if self._start is not None and not self._can_have_changed():
            return _read_passes(self.readable, state, self._start, self.first_element)
        readable = self._call_again()
        is_used_up = self.obstacle is not None and hasattr(readable, "__next__")
        if readable is self.readable and (
            is_used_up or isinstance(readable, keras.utils.PyDataset)
        ):
            raise ValueError(
                f"the {type(readable).__name__} was created outside the hook, and can be read "
                "only once; create it inside the hook"
            )
        self.readable = readable
        return _read_passes(readable, state, self._start, self.first_element)

    def _can_have_changed(self) -> bool:
        """Returns whether reading may have changed the object, so that it cannot be read again."""
        kind = type(self.readable)
        if hasattr(kind, "__next__"):
            return True
        if not issubclass(kind, keras.utils.PyDataset):
            return False
        methods = ["on_epoch_begin"]
        if self._goes_on:
            methods.append("on_epoch_end")
        base = keras.utils.PyDataset
        return any(getattr(kind, method) is not getattr(base, method) for method in methods)

    def read(
        self, goes_on: bool, count: Callable[[Element], int] | None = None, multiple: int = 1
    ) -> tf.data.Dataset:
        """Returns a dataset of the elements of one pass.

        The dataset ends early if another dataset begins to read the same object.

        Args:
            goes_on: True if each iteration over the dataset reads the next pass; False if each
                iteration reads the first pass again
            count: a function that returns the number of examples that steps use from an element. It
                is passed only for the dataset whose position is saved
            multiple: the number of examples that steps use in a pass is a multiple of this number,
                because batches that are not full are dropped
        """
        generate_pass = _PassGenerator(self, goes_on, count, multiple)
        dataset = tf.data.Dataset.from_generator(generate_pass, output_signature=self.spec)
        if getattr(self.readable, "num_batches", 0) is None:  # the object is an endless PyDataset
            endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            dataset = dataset.apply(endless)
        return dataset

    def take_reading(self) -> Reading:
        """Returns the elements for one dataset.

        If another dataset already reads the elements, the data are read from their start again.
        """
        if self._reading.is_taken:
            self._reading = Reading(self._open(self._start))
        self._reading.is_taken = True
        return self._reading

    def note_going_on(self) -> None:
        """Records that a dataset reads one pass after another."""
        self._goes_on = True

    def draw_first(self, reading: Reading) -> DrawnElement | None:
        """Draws the first element of a pass; returns None if the pass is empty."""
        drawn = next(reading.passes)
        if drawn is None and hasattr(self.readable, "__next__"):
            # An iterator is exhausted after one pass, so the hook is called to create a new one.
            reading.passes = self._open(self._start)
            drawn = next(reading.passes)
        return drawn

    def draw_next(self, reading: Reading) -> DrawnElement | None:
        """Draws the next element of a pass.

        Returns None at the end of the pass, or if another dataset has begun to read the object.
        """
        if reading is not self._reading:
            return None
        return next(reading.passes)

    def check(self, element: Element) -> None:
        """Checks that an element matches the specification of elements.

        Raises:
            ValueError: the element has another structure, or other shapes or dtypes.
        """
        spec = tf.nest.map_structure(_describe, element)
        tf.nest.assert_same_structure(self.spec, spec)
        pairs = zip(tf.nest.flatten(self.spec), tf.nest.flatten(spec), strict=True)
        if not all(expected.is_compatible_with(actual) for expected, actual in pairs):
            raise ValueError(
                f"an element is {describe(spec)}, expected {describe(self.spec)}; if sizes "
                "vary, define an element_spec with None"
            )

    def note_used(self, examples: int) -> None:
        """Records that training used more examples."""
        self._reading.note_used(examples)

    def write_position(self) -> str:
        """Returns the position after the last used example, as a string.

        Raises:
            ValueError: the state contains a value that ``encode`` does not support.
        """
        return repr(encode(self._reading.find_position()))

    def go_to(self, text: str) -> str | None:
        """Restores a saved position. Must be called before a dataset reads the elements.

        Args:
            text: the result of ``write_position``

        Returns:
            The reason why the position cannot be restored; None if it was restored.
        """
        try:
            position = decode(ast.literal_eval(text))
            if position is None:  # no example had been used when the position was saved
                return None
            state, used, checksum = position
            self._reading.is_taken = True  # on failure, the next dataset reads from the start
            passes = self._open(state)
            drawn = next(passes)
            if drawn is None or _compute_checksum(drawn.element) != checksum:
                raise ValueError(
                    "after restoring its state, the reader returned other elements than before"
                )
        except Exception as error:
            return f"the reader cannot restore its state: {format_error(error)}"
        first = drawn._replace(used=used)
        self._reading = Reading(itertools.chain([first], passes), position)
        return None

    def discard_position(self) -> None:
        """Lets the next dataset read from the start of the data, even if ``go_to`` succeeded."""
        if self._reading.find_position() is not None:
            self._reading.is_taken = True


class _PassGenerator:
    """A generator function for the dataset of ``Reader.read``. Each call generates one pass."""

    def __init__(
        self,
        reader: Reader,
        goes_on: bool,
        count: Callable[[Element], int] | None,
        multiple: int,
    ) -> None:
        self._reader = reader
        self._goes_on = goes_on
        self._count = count
        self._multiple = multiple
        self._reading: Reading | None = None
        self._examples = 0  # the number of generated examples that steps use

    def __call__(self) -> Iterator[Element]:
        if self._goes_on:
            self._reader.note_going_on()
        if self._reading is None or not self._goes_on:
            self._reading = self._reader.take_reading()
        # The last examples of a pass are not used if they do not fill a batch.
        self._examples -= self._examples % self._multiple
        drawn = self._reader.draw_first(self._reading)
        while drawn is not None:
            self._reader.check(drawn.element)
            unused = self._drop_used(self._reading, drawn)
            if unused is not None:
                yield unused
            drawn = self._reader.draw_next(self._reading)

    def _drop_used(self, reading: Reading, drawn: DrawnElement) -> Element | None:
        """Returns an element without the examples that were used earlier; None if none is left.

        If the position of the dataset is saved, ``reading`` keeps the whole element.
        """
        if self._count is None:  # the position of the dataset is neither saved nor restored
            return drawn.element
        examples = self._count(drawn.element)
        first_example = self._examples - drawn.used
        reading.add(UsedElement(first_example, drawn.state, drawn.element))
        self._examples = first_example + examples
        if drawn.used == 0:
            return drawn.element
        if drawn.used >= examples:
            return None
        return tf.nest.map_structure(lambda array: _drop_rows(array, drawn.used), drawn.element)


def _drop_rows(array: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    """Returns an array without its first ``rows`` rows.

    A scalar is returned unchanged, because it belongs to all rows.
    """
    if array.ndim == 0:
        return array
    return array[rows:]


def _read_passes(
    readable: Readable,
    state: ReaderState | None = None,
    start: ReaderState | None = None,
    first_element: Element | None = None,
) -> Iterator[DrawnElement | None]:
    """Yields elements, each with the state of the reader before it, and None after each pass.

    Args:
        readable: the object that a hook returned. The object or its iterators may have a state
        state: the state to start from; None leaves the state of the object unchanged
        start: the state at the start of the data
        first_element: the first element of the data
    """
    passes = readable
    if isinstance(readable, keras.utils.PyDataset):
        passes = _PyDatasetPasses(readable)
    methods_of_passes = _find_state_methods(passes)
    if methods_of_passes is not None:
        methods_of_passes.restore(state)
        if state is not None and first_element is not None:
            yield from _read_restored(passes, methods_of_passes, start, first_element)
            state = None
    while True:
        iterator = iter(passes)
        methods = methods_of_passes
        if methods is None:
            methods = _find_state_methods(iterator)
            if methods is not None:
                methods.restore(state)
        yield from _read_pass(iterator, methods)
        yield None
        state = None  # all later passes are read from their start


def _read_restored(
    passes: Readable, methods: StateMethods, start: ReaderState, first_element: Element
) -> Iterator[DrawnElement | None]:
    """Yields the rest of a pass after a state was restored, then None, and then the next pass.

    A streamed dataset of Hugging Face begins all later passes at the restored state, too. In this
    case, its state at the start of the data is restored.

    Args:
        passes: an iterable over passes
        methods: the methods that get and set its state
        start: the state at the start of the data
        first_element: the first element of the data

    Raises:
        ValueError: the second pass begins at the restored state, whatever state is set.
    """
    rest = _read_pass(iter(passes), methods)
    beginning = _draw_beginning(rest)
    yield from beginning
    yield from rest
    yield None
    second_pass = _read_pass(iter(passes), methods)
    second_beginning = _draw_beginning(second_pass)
    restored = [_compute_checksum(drawn.element) for drawn in beginning]
    first = _compute_checksum(first_element)
    is_again = restored == [_compute_checksum(drawn.element) for drawn in second_beginning]
    if is_again and restored[:1] != [first]:
        methods.restore(start)
        second_pass = _read_pass(iter(passes), methods)
        second_beginning = _draw_beginning(second_pass)
        if [_compute_checksum(drawn.element) for drawn in second_beginning[:1]] != [first]:
            raise ValueError("after its state was restored, the reader begins each pass there")
    yield from second_beginning
    yield from second_pass
    yield None


def _draw_beginning(elements: Iterator[DrawnElement]) -> list[DrawnElement]:
    """Draws the first elements of a pass; copies them, because a reader may reuse its arrays."""
    return [
        drawn._replace(element=tf.nest.map_structure(np.array, drawn.element))
        for drawn in itertools.islice(elements, _COMPARED)
    ]


def _read_pass(
    iterator: Iterator[Structure], methods: StateMethods | None
) -> Iterator[DrawnElement]:
    """Yields the elements of one pass, each with the state before it.

    Args:
        iterator: an iterator over the pass
        methods: the methods that get and set the state; None if there is no state
    """
    while True:
        state = None
        if methods is not None:
            state = methods.copy_state()
        try:
            element = next(iterator)
        except StopIteration:
            return
        yield DrawnElement(state, _make_arrays(element))


def _find_state_methods(readable: Readable) -> StateMethods | None:
    """Returns the methods that get and set the state of an object; None if it has no state."""
    for getter, setter in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        get_state = getattr(readable, getter, None)
        set_state = getattr(readable, setter, None)
        if callable(get_state) and callable(set_state):
            return StateMethods(get_state, set_state)
    return None


class _PyDatasetPasses:
    """Turns a ``PyDataset`` into an iterable with a state.

    The ``workers`` of the ``PyDataset`` become threads. The state is the number of elements read so
    far. To restore a state, ``on_epoch_begin`` and ``on_epoch_end`` are called once for each
    earlier pass. ``on_epoch_end`` of a pass is called only when the next pass begins.
    """

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        self._dataset = dataset
        self._number = 0
        self._has_begun = False
        self._size: int = sys.maxsize
        if dataset.num_batches is not None:
            self._size = dataset.num_batches

    def get_state(self) -> int:
        """Returns the index of the next element, counted over all passes."""
        return self._number

    def set_state(self, number: int) -> None:
        """Sets the index of the next element. Must be called before an element is read."""
        for _ in range(number // self._size):
            self._dataset.on_epoch_begin()
            self._dataset.on_epoch_end()
        self._number = number

    def __iter__(self) -> Iterator[Structure]:
        if self._has_begun:
            self._dataset.on_epoch_end()
        self._has_begun = True
        self._dataset.on_epoch_begin()
        threads = max(self._dataset.workers, 1)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for first in range(self._number % self._size, self._size, threads):
                indices = range(first, min(first + threads, self._size))
                for element in pool.map(self._dataset.__getitem__, indices):
                    self._number += 1
                    yield element


def _make_arrays(element: Structure) -> Element:
    """Converts an element to a structure of arrays. Lists become tuples, as in Keras."""
    if isinstance(element, dict):
        return {key: _make_arrays(value) for key, value in element.items()}
    if isinstance(element, list | tuple) and not all(map(np.isscalar, element)):
        return tuple(map(_make_arrays, element))
    return np.asarray(element)


def _describe(array: np.ndarray[Any, Any] | tf.TensorSpec) -> tf.TensorSpec:
    """Returns the specification of an array for any number of rows.

    The argument may also be a specification, whose number of rows is then replaced.
    """
    shape: list[int | None] = []
    if len(array.shape) > 0:
        shape = [None, *array.shape[1:]]
    return tf.TensorSpec(shape, tf.as_dtype(array.dtype))


def _compute_checksum(element: Element) -> int:
    return zlib.crc32(pickle.dumps(element))


# The only key of a dict that represents an encoded array.
_ARRAY = "__array__"


def encode(value: ReaderState) -> Literals:
    """Converts a state to Python literals.

    A checkpoint may come from an untrusted source, so it must be readable without pickle, which can
    run any code. NumPy arrays and PyTorch tensors become dicts with the dtype, the shape, the
    content and the type of the array.

    Raises:
        ValueError: the state contains a value that is neither a number, a string, bytes, an array
            or None, nor a list, tuple or dict of such values.
    """
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(encode, value))
    if isinstance(value, dict):
        return {encode(key): encode(item) for key, item in value.items()}
    is_torch_tensor = kind.__module__ == "torch" and kind.__name__ == "Tensor"
    if is_torch_tensor or isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return {_ARRAY: (array.dtype.str, array.shape, array.tobytes(), kind.__name__)}
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    raise ValueError(f"the reader's state contains a {kind.__name__}: {value!r:.50}")


def decode(value: Literals) -> ReaderState:
    """Returns the state that ``encode`` converted to ``value``."""
    if isinstance(value, list | tuple):
        return type(value)(map(decode, value))
    if not isinstance(value, dict):
        return value
    if set(value) != {_ARRAY}:
        return {decode(key): decode(item) for key, item in value.items()}
    dtype, shape, content, kind = value[_ARRAY]
    array = np.frombuffer(content, dtype).reshape(shape).copy()
    if kind == "Tensor":
        return sys.modules["torch"].from_numpy(array)
    if kind == "ndarray":
        return array
    return array[()]  # a NumPy scalar
