"""Reads Python objects as datasets, and saves and restores their position.

A reader is an iterable whose iterators each read a pass. It may have a state: ``get_state()`` and
``set_state(state)``, after which the rest of a pass is read from that state on. grain has these
methods on its iterators, torchdata calls them ``state_dict`` and ``load_state_dict``, and for a
PyDataset they are added here. Iterables without a state can be read, too.

A position consists of the state before the element that holds the last example used, the number of
its examples that were used, and a checksum of the element. The checksum detects readers that return
other elements when their state is restored. Because TensorFlow reads ahead, each element is stored
with the index of its first example among those that steps use, until training reports that they
have been used.
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

# Values that ``ast.literal_eval`` reads.
Literals: TypeAlias = Any

# The state before an element, the number of its examples that were used, and its checksum.
Position: TypeAlias = tuple[ReaderState, int, int]

_END = object()
# An array or a list can be iterated over, but its rows are not batches.
_NO_READERS = (str, bytes, list, tuple, dict, set, np.ndarray, tf.Tensor, type)


def open_reader(
    hook: Hook,
    returned: Readable | tf.data.Dataset,
    call_again: Callable[[], Readable],
    previous: Reader | None = None,
) -> Reader | None:
    """Returns the reader of the object that a hook returned; None for a tf.data.Dataset.

    Args:
        hook: the hook
        returned: the object that the hook returned
        call_again: calls the hook again
        previous: the reader of an earlier call, which is returned if it reads the same object

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


class DrawnElement(NamedTuple):
    """An element, and the state of its reader before it."""

    state: ReaderState
    element: Element


class UsedElement(NamedTuple):
    """An element of which steps use examples.

    Attributes:
        first_example: the index of its first example among those that steps use
        state: the state of the reader before it
        element: the element
    """

    first_example: int
    state: ReaderState
    element: Element


class Reading:
    """The elements from one position on, pass after pass, and how many of them were used.

    Attributes:
        passes: yields elements, and None after each pass
        skipped: the number of examples of the next element that had been used at the position
        is_taken: whether a dataset reads the elements
    """

    def __init__(
        self,
        passes: Iterator[DrawnElement | None],
        position: Position | None = None,
        skipped: int = 0,
    ) -> None:
        """Begins at a position; None is the start."""
        self.passes = passes
        self.skipped = skipped
        self.is_taken = False
        self._position = position
        self._examples_used = 0
        self._elements: collections.deque[UsedElement] = collections.deque()

    def add(self, element: UsedElement) -> None:
        """Keeps an element until all of its examples have been used."""
        self._elements.append(element)

    def note_used(self, examples: int) -> None:
        """Notes that training used more examples, and drops elements before the last of them."""
        self._examples_used += examples
        while len(self._elements) > 1 and self._elements[1].first_example < self._examples_used:
            self._elements.popleft()

    def find_position(self) -> Position | None:
        """Returns the position after the last example used; None at the start."""
        if self._examples_used == 0:
            return self._position
        first_example, state, element = self._elements[0]
        return state, self._examples_used - first_example, _compute_checksum(element)


class Reader:
    """Reads the object that a hook returned, from its start or from the position of ``go_to``.

    Attributes:
        readable: the object that the hook returned
        first_element: the first element
        spec: the specification of elements, with any number of rows
        obstacle: the reason why its position cannot be saved, or None
    """

    def __init__(self, readable: Readable, call_again: Callable[[], Readable]) -> None:
        """Reads the first element; ``call_again`` calls the hook again.

        Raises:
            ValueError: there is no element. Errors of the object itself are raised unchanged.
        """
        self.readable = readable
        self._call_again = call_again
        self._goes_on = False  # whether passes were read one after the other
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
        """Reads from a state; calls the hook again for objects without one or that have changed."""
        if self._start is not None and not self._can_have_changed():
            return _read_passes(self.readable, state)
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
        return _read_passes(readable, state)

    def _can_have_changed(self) -> bool:
        """Returns whether reading may have changed the object, so that it cannot start again."""
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
        """Returns a dataset of the elements of a pass, which ends when another begins to be read.

        Args:
            goes_on: whether each iteration reads the next pass, or the first pass again
            count: returns how many examples of an element steps use; only for the dataset whose
                position is saved
            multiple: the number of examples of a pass that steps use is a multiple of this
        """
        generate_pass = _PassGenerator(self, goes_on, count, multiple)
        dataset = tf.data.Dataset.from_generator(generate_pass, output_signature=self.spec)
        if getattr(self.readable, "num_batches", 0) is None:  # a PyDataset without an end
            endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            dataset = dataset.apply(endless)
        return dataset

    def take_reading(self) -> Reading:
        """Returns elements for a dataset, which no other dataset reads."""
        if self._reading.is_taken:
            self._reading = Reading(self._open(self._start))
        self._reading.is_taken = True
        return self._reading

    def note_going_on(self) -> None:
        """Notes that passes are read one after the other."""
        self._goes_on = True

    def draw_first(self, reading: Reading) -> DrawnElement | None:
        """Draws the first element of a pass; None if the pass is empty."""
        drawn = next(reading.passes)
        if drawn is None and hasattr(self.readable, "__next__"):
            # An iterator is used up after a pass: the hook returns another one.
            reading.passes = self._open(self._start)
            drawn = next(reading.passes)
        return drawn

    def draw_next(self, reading: Reading) -> DrawnElement | None:
        """Draws the next element; None if the pass ends, or if another dataset began to read."""
        if reading is not self._reading:
            return None
        return next(reading.passes)

    def check(self, element: Element) -> None:
        """Compares an element with the specification.

        Raises:
            ValueError: it has other shapes or types.
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
        """Notes that training used more examples."""
        self._reading.note_used(examples)

    def write_position(self) -> str:
        """Returns the position after the last example used, as text.

        Raises:
            ValueError: the state has a value that cannot be written as text.
        """
        return repr(encode(self._reading.find_position()))

    def go_to(self, text: str) -> str | None:
        """Restores a saved position before anything is read; returns the reason if it cannot."""
        try:
            position = decode(ast.literal_eval(text))
            if position is None:  # nothing had been used
                return None
            state, skipped, checksum = position
            self._reading.is_taken = True  # if it fails, the next dataset begins at the start
            passes = self._open(state)
            drawn = next(passes)
            if drawn is None or _compute_checksum(drawn.element) != checksum:
                raise ValueError(
                    "after restoring its state, the reader returned other elements than before"
                )
        except Exception as error:
            return f"the reader cannot restore its state: {format_error(error)}"
        self._reading = Reading(itertools.chain([drawn], passes), position, skipped)
        return None


class _PassGenerator:
    """Generates the elements of a pass at each call, for a dataset of ``Reader.read``."""

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
        self._examples = 0  # the number of examples so far that steps use

    def __call__(self) -> Iterator[Element]:
        if self._goes_on:
            self._reader.note_going_on()
        if self._reading is None or not self._goes_on:
            self._reading = self._reader.take_reading()
        # The last examples of a pass that fill no batch are not used.
        self._examples -= self._examples % self._multiple
        drawn = self._reader.draw_first(self._reading)
        while drawn is not None:
            self._reader.check(drawn.element)
            unused = self._drop_used(self._reading, drawn)
            if unused is not None:
                yield unused
            drawn = self._reader.draw_next(self._reading)

    def _drop_used(self, reading: Reading, drawn: DrawnElement) -> Element | None:
        """Returns an element without the examples that are skipped; None if none is left."""
        skipped = reading.skipped
        examples = 0
        if self._count is not None:
            examples = self._count(drawn.element)
            reading.skipped = 0
            reading.add(UsedElement(self._examples - skipped, drawn.state, drawn.element))
            self._examples += examples - skipped
        if skipped == 0:
            return drawn.element
        if skipped >= examples:
            return None
        return tf.nest.map_structure(lambda array: _drop_rows(array, skipped), drawn.element)


def _drop_rows(array: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    """Returns an array without its first rows; a scalar belongs to all rows."""
    if array.ndim == 0:
        return array
    return array[rows:]


def _read_passes(
    readable: Readable, state: ReaderState | None = None
) -> Iterator[DrawnElement | None]:
    """Yields elements, each with the state before it, and None after each pass.

    Args:
        readable: the object that a hook returned; it, or its iterator, may have a state
        state: the state to begin with; None leaves the object's state as it is
    """
    passes = readable
    if isinstance(readable, keras.utils.PyDataset):
        passes = _PyDatasetPasses(readable)
    methods_of_passes = _find_state_methods(passes)
    if methods_of_passes is not None and state is not None:
        methods_of_passes.set_state(copy.deepcopy(state))
    while True:
        iterator = iter(passes)
        methods = methods_of_passes
        if methods is None:
            methods = _find_state_methods(iterator)
            if methods is not None and state is not None:
                methods.set_state(copy.deepcopy(state))
        state = None
        while True:
            state_before = None
            if methods is not None:
                state_before = copy.deepcopy(methods.get_state())
            element = next(iterator, _END)
            if element is _END:
                break
            yield DrawnElement(state_before, _make_arrays(element))
        yield None


def _find_state_methods(readable: Readable) -> StateMethods | None:
    """Returns the methods that get and set the state of an object; None if it has none."""
    for getter, setter in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        get_state = getattr(readable, getter, None)
        set_state = getattr(readable, setter, None)
        if callable(get_state) and callable(set_state):
            return StateMethods(get_state, set_state)
    return None


class _PyDatasetPasses:
    """Turns a ``PyDataset`` into an iterable with a state; its ``workers`` are threads.

    The state is the number of elements that were read. To restore it, ``on_epoch_begin`` and
    ``on_epoch_end`` are called for each pass before. A pass ends when the next one begins.
    """

    def __init__(self, dataset: keras.utils.PyDataset) -> None:
        self._dataset = dataset
        self._number = 0
        self._has_begun = False
        self._size: int = sys.maxsize
        if dataset.num_batches is not None:
            self._size = dataset.num_batches

    def get_state(self) -> int:
        """Returns the number of the next element, counted over all passes."""
        return self._number

    def set_state(self, number: int) -> None:
        """Continues from an element; must be called before anything is read."""
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
    """Returns an element as a structure of arrays; lists become tuples, as in Keras."""
    if isinstance(element, dict):
        return {key: _make_arrays(value) for key, value in element.items()}
    if isinstance(element, list | tuple) and not all(map(np.isscalar, element)):
        return tuple(map(_make_arrays, element))
    return np.asarray(element)


def _describe(array: np.ndarray[Any, Any] | tf.TensorSpec) -> tf.TensorSpec:
    """Returns the specification of an array, or of a specification, with any number of rows."""
    shape: list[int | None] = []
    if len(array.shape) > 0:
        shape = [None, *array.shape[1:]]
    return tf.TensorSpec(shape, tf.as_dtype(array.dtype))


def _compute_checksum(element: Element) -> int:
    return zlib.crc32(pickle.dumps(element))


# The only key of a dict that stands for an array.
_ARRAY = "__array__"


def encode(value: ReaderState) -> Literals:
    """Returns a state as Python literals.

    A checkpoint may come from anyone, so it must be readable without pickle. Arrays and tensors of
    PyTorch become dicts with their type.

    Raises:
        ValueError: the state has a value that is no number, text, bytes or array, nor a list, tuple
            or dict of such values.
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
    """Returns the state that ``encode`` was given."""
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
