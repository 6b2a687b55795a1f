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
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.hooks.hooks import Hook, describe, name_kind
from ctl_core.run.errors import format_error

_END = object()
_NO_READERS = (str, bytes, list, tuple, dict, set, np.ndarray, tf.Tensor, type)


def open_reader(
    hook: Hook, made: Any, remake: Callable[[], Any], before: Reader | None = None
) -> Reader | None:
    """Returns the reader of the object that a hook returned; None for a tf.data.Dataset.

    Args:
        hook: the hook that returned the object
        made: the object
        remake: calls the hook again
        before: the reader of an earlier call, which is returned if it reads the same object

    Raises:
        SetupError: the object cannot be read.
    """
    if isinstance(made, tf.data.Dataset):
        return None
    readable = isinstance(made, Iterable | keras.utils.PyDataset)
    if not readable or isinstance(made, _NO_READERS):  # arrays are no batches of theirs
        raise hook.reject(f"returned {name_kind(made)}, expected a tf.data.Dataset, or a reader.")
    if before is not None and before.made is made:
        return before
    try:
        return Reader(made, remake)
    except Exception as error:
        raise hook.reject(f"reading the data: {format_error(error)}") from error


class Reader:
    """Reads the object that a hook returned, from its start or from the position of ``go_to``.

    Attributes:
        made: the object that the hook returned
        first_element: the first element, a structure of arrays
        spec: the specification of elements, with any number of rows
        why_not: the reason why its position cannot be saved, or None
    """

    def __init__(self, made: Any, remake: Callable[[], Any]) -> None:
        """Reads the first element; ``remake`` calls the hook again.

        Raises:
            ValueError: there is no element. Errors of the object itself are raised unchanged.
        """
        self.made = made
        self._remake = remake
        self._goes_on = False  # whether passes were read one after the other
        source = _read_passes(made)
        first = next(source)
        if first is None:
            raise ValueError("the reader has no element")
        self._start, element = first
        self.first_element = element
        self._begin(itertools.chain([first], source))
        spec = getattr(made, "element_spec", None)
        self.spec = tf.nest.map_structure(_describe, element if spec is None else spec)
        why_not = f"a {type(made).__name__} has no get_state and set_state"
        self.why_not = why_not if self._start is None else None

    def _open(self, state: Any) -> Iterator[Any]:
        """Reads from a state; calls the hook again for objects without one or that have changed."""
        if self._start is not None and not self._can_have_changed():
            return _read_passes(self.made, state)
        made = self._remake()
        is_used_up = self.why_not is not None and hasattr(made, "__next__")
        if made is self.made and (is_used_up or isinstance(made, keras.utils.PyDataset)):
            raise ValueError(
                f"the {type(made).__name__} is made outside of the hook, and cannot be read again; "
                "make it inside"
            )
        self.made = made
        return _read_passes(made, state)

    def _can_have_changed(self) -> bool:
        """Returns whether reading may have changed the object, so that it cannot start again."""
        kind = type(self.made)
        if hasattr(kind, "__next__"):
            return True
        if not issubclass(kind, keras.utils.PyDataset):
            return False
        methods = ["on_epoch_begin"]
        if self._goes_on:
            methods.append("on_epoch_end")
        base = keras.utils.PyDataset
        return any(getattr(kind, method) is not getattr(base, method) for method in methods)

    def _begin(self, source: Iterator[Any], position: Any = None, skip: int = 0) -> None:
        """Sets what the next dataset reads; ``skip`` examples of its first element are used."""
        self._source = source
        self._position = position
        self._skip = skip
        self._is_taken = False
        self._used = 0
        # For each element the index of its first example, the state before it, and the element.
        self._elements: collections.deque[tuple[int, Any, Any]] = collections.deque()

    def read(
        self, goes_on: bool, count: Callable[[Any], int] | None = None, multiple: int = 1
    ) -> tf.data.Dataset:
        """Returns a dataset of the elements of a pass, which ends when another begins to be read.

        Args:
            goes_on: whether each iteration reads the next pass, or the first pass again
            count: returns how many examples of an element steps use; only for the dataset whose
                position is saved
            multiple: the number of examples of a pass that steps use is a multiple of this
        """
        source: Any = None
        number = 0

        def read_pass() -> Iterator[Any]:
            nonlocal source, number
            self._goes_on |= goes_on
            if source is None or not goes_on:
                if self._is_taken:
                    self._begin(self._open(self._start))
                source = self._source
                self._is_taken = True
            number -= number % multiple
            drawn = next(source)
            if drawn is None and hasattr(self.made, "__next__"):  # an iterator that is used up
                source = self._source = self._open(self._start)
                drawn = next(source)
            while drawn is not None:
                state, element = drawn
                self._check(element)
                examples = 0
                used = self._skip
                if count is not None:
                    examples = count(element)
                    self._skip = 0
                    self._elements.append((number - used, state, element))
                    number += examples - used
                if not used:
                    yield element
                elif used < examples:
                    yield tf.nest.map_structure(lambda a, n=used: a[n:] if a.ndim else a, element)
                drawn = next(source) if source is self._source else None

        dataset = tf.data.Dataset.from_generator(read_pass, output_signature=self.spec)
        if getattr(self.made, "num_batches", 0) is None:  # a PyDataset without an end
            endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            dataset = dataset.apply(endless)
        return dataset

    def _check(self, element: Any) -> None:
        spec = tf.nest.map_structure(_describe, element)
        fits = tf.nest.map_structure(lambda a, b: a.is_compatible_with(b), self.spec, spec)
        if not all(tf.nest.flatten(fits)):
            raise ValueError(
                f"an element is {describe(spec)}, expected {describe(self.spec)}; sizes that vary "
                "need an element_spec with None"
            )

    def note_used(self, examples: int) -> None:
        """Notes that training used more examples, and drops elements before the last of them."""
        self._used += examples
        while len(self._elements) > 1 and self._elements[1][0] < self._used:
            self._elements.popleft()

    def write_position(self) -> str:
        """Returns the position after the last example used, as text.

        Raises:
            ValueError: the state has a value that cannot be written as text.
        """
        if self._used:
            first, state, element = self._elements[0]
            self._position = state, self._used - first, _compute_checksum(element)
        return repr(encode(self._position))

    def go_to(self, text: str) -> str | None:
        """Restores a saved position before anything is read; returns the reason if it cannot."""
        try:
            if (position := decode(ast.literal_eval(text))) is None:  # nothing had been used
                return None
            state, skip, checksum = position
            self._is_taken = True  # if it fails, the next dataset begins at the start
            source = self._open(state)
            drawn = next(source)
            if drawn is None or _compute_checksum(drawn[1]) != checksum:
                raise ValueError("by it, it gives other elements than it did")
        except Exception as error:
            return f"the reader does not take its state back: {format_error(error)}"
        self._begin(itertools.chain([drawn], source), position, skip)
        return None


def _read_passes(made: Any, state: Any = None) -> Iterator[tuple[Any, Any] | None]:
    """Yields pairs of the state before an element and the element, and None after each pass.

    Args:
        made: the object that a hook returned; it, or its iterator, may have a state
        state: the state to begin with; None leaves the object's state as it is
    """
    passes = _Passes(made) if isinstance(made, keras.utils.PyDataset) else made
    of_passes = _find_methods(passes)
    if of_passes and state is not None:
        of_passes[1](copy.deepcopy(state))
    while True:
        iterator = iter(passes)
        methods = of_passes or _find_methods(iterator)
        if methods and not of_passes and state is not None:
            methods[1](copy.deepcopy(state))
        state = None
        while True:
            before = copy.deepcopy(methods[0]()) if methods else None
            element = next(iterator, _END)
            if element is _END:
                break
            yield before, _make_arrays(element)
        yield None


def _find_methods(owner: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns the methods that get and set the state of an object; None if it has none."""
    for names in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        get_state, set_state = (getattr(owner, name, None) for name in names)
        if callable(get_state) and callable(set_state):
            return get_state, set_state
    return None


class _Passes:
    """Turns a ``PyDataset`` into an iterable with a state; its ``workers`` are threads.

    The state is the number of elements that were read. To restore it, ``on_epoch_begin`` and
    ``on_epoch_end`` are called for each pass before. A pass ends when the next one begins.
    """

    def __init__(self, made: keras.utils.PyDataset) -> None:
        self._made = made
        self._number = 0
        self._has_begun = False
        self._size = sys.maxsize if made.num_batches is None else made.num_batches

    def get_state(self) -> int:
        """Returns the number of the next element, counted over all passes."""
        return self._number

    def set_state(self, number: int) -> None:
        """Continues from an element; must be called before anything is read."""
        for _ in range(number // self._size):
            self._made.on_epoch_begin()
            self._made.on_epoch_end()
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            self._made.on_epoch_end()
        self._has_begun = True
        self._made.on_epoch_begin()
        threads = max(self._made.workers, 1)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for first in range(self._number % self._size, self._size, threads):
                indices = range(first, min(first + threads, self._size))
                for element in pool.map(self._made.__getitem__, indices):
                    self._number += 1
                    yield element


def _make_arrays(element: Any) -> Any:
    """Returns an element as a structure of arrays; lists become tuples, as in Keras."""
    if isinstance(element, dict):
        return {key: _make_arrays(value) for key, value in element.items()}
    if isinstance(element, list | tuple) and not all(map(np.isscalar, element)):
        return tuple(map(_make_arrays, element))
    return np.asarray(element)


def _describe(array: Any) -> tf.TensorSpec:
    """Returns the specification of an array, or of a specification, with any number of rows."""
    shape = [None, *array.shape[1:]] if len(array.shape) else []
    return tf.TensorSpec(shape, tf.as_dtype(array.dtype))


def _compute_checksum(element: Any) -> int:
    return zlib.crc32(pickle.dumps(element))


_ARRAY = "__array__"


def encode(value: Any) -> Any:
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
        return {encode(key): encode(part) for key, part in value.items()}
    of_torch = kind.__module__ == "torch" and kind.__name__ == "Tensor"
    if of_torch or isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return {_ARRAY: (array.dtype.str, array.shape, array.tobytes(), kind.__name__)}
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    raise ValueError(f"the reader's state holds a {kind.__name__}: {value!r:.50}")


def decode(value: Any) -> Any:
    """Returns the state that ``encode`` was given."""
    if isinstance(value, list | tuple):
        return type(value)(map(decode, value))
    if not isinstance(value, dict):
        return value
    if set(value) != {_ARRAY}:
        return {decode(key): decode(part) for key, part in value.items()}
    dtype, shape, content, kind = value[_ARRAY]
    array = np.frombuffer(content, dtype).reshape(shape).copy()
    if kind == "Tensor":
        return sys.modules["torch"].from_numpy(array)
    return array if kind == "ndarray" else array[()]
