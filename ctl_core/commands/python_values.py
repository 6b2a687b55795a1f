"""Finds Python values that a host hook changes, and graphs that still use the old values.

A Python number that a graph hook reads becomes a constant when the graph is traced. If a host hook
changes the number later, the graph does not notice.

The search covers global variables, closure cells, default arguments and attributes of functions,
attributes of the model and its layers, and ``hparams``. It also covers the contents of dicts, lists
and plain objects in these places, but not objects inside these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ctl_core.commands.compare_graphs import find_difference
from ctl_core.compat import add_called_ops
from ctl_core.evaluation.step import define_run_steps
from ctl_core.graph import StepFunctions
from ctl_core.hooks.hooks import Hook
from ctl_core.model.state import State
from ctl_core.run.errors import NOT_THE_USERS, quote, read_frames

_SIMPLE = (bool, int, float, complex, str, bytes, np.generic, np.ndarray, type(None))
# The maximum size of an array, a list or a dict that is searched. Larger ones are treated as data.
_MOST_ELEMENTS = 10_000

Values: TypeAlias = dict[tuple[int, Any], Any]


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in Python that contains a simple value, such as a global variable.

    Attributes:
        name: the name of the place in messages, such as ``SETTINGS['beta']``
        owner: the closure cell, the dict, the list, or the object with attributes
        key: the key of the dict, the index of the list, or the name of the attribute
    """

    name: str
    owner: Any
    key: Any = None

    @property
    def identity(self) -> tuple[int, Any]:
        """A key that is unique among all places."""
        return id(self.owner), self.key

    def read(self) -> Any:
        """Returns the value in this place."""
        if isinstance(self.owner, types.CellType):
            return self.owner.cell_contents
        if isinstance(self.owner, dict | list):
            return self.owner[self.key]
        return getattr(self.owner, self.key)

    def write(self, value: Any) -> None:
        """Assigns a value to this place.

        If the shape and the dtype agree, an array is changed in place, because other code may refer
        to the same array.
        """
        present = self.read()
        are_arrays = isinstance(present, np.ndarray) and isinstance(value, np.ndarray)
        if are_arrays and present.shape == value.shape and present.dtype == value.dtype:
            present[...] = value
        else:
            self._assign(value)

    def _assign(self, value: Any) -> None:
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict | list):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


@dataclasses.dataclass(frozen=True)
class DefaultArgument(Place):
    """The default of a function's argument.

    ``owner`` is the function, and ``key`` is the name of the argument.
    """

    @property
    def identity(self) -> tuple[int, Any]:
        """A key that is unique among all places."""
        return id(self.owner), ("default", self.key)

    def read(self) -> Any:
        """Returns the default of the argument."""
        return inspect.signature(self.owner, follow_wrapped=False).parameters[self.key].default

    def _assign(self, value: Any) -> None:
        if self.key in (self.owner.__kwdefaults__ or {}):
            self.owner.__kwdefaults__[self.key] = value
            return
        parameters = inspect.signature(self.owner, follow_wrapped=False).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.owner.__defaults__ = tuple(
            value if parameter.name == self.key else parameter.default
            for parameter in parameters
            if parameter.kind in positional and parameter.default is not parameter.empty
        )


@dataclasses.dataclass(frozen=True)
class Change:
    """A value that a host hook has changed.

    Attributes:
        hook: the host hook
        place: the place of the value
        is_new: whether the place contained no simple value before
        old: the value before the hook ran
        new: the value after the hook ran
    """

    hook: Hook
    place: Place
    is_new: bool
    old: Any
    new: Any


class ValueWatch:
    """Notices the Python values that a hook changes.

    Attributes:
        hook: the host hook
    """

    def __init__(self, hook: Hook, shared_places: Callable[[], Iterable[Place]]) -> None:
        """Reads the current values in all places.

        Args:
            hook: the host hook
            shared_places: returns the places outside of the hook, such as those of the model
        """
        self.hook = hook
        self._shared_places = shared_places
        self._before = {place.identity: copy_value(place.read()) for place in self._list_places()}

    def list_changes(self) -> list[Change]:
        """Returns the values that were changed since the watch began."""
        changes = []
        for place in self._list_places():
            new = place.read()
            is_new = place.identity not in self._before
            if is_new and isinstance(place.owner, list):  # hooks may append results to a list
                continue
            old = self._before.get(place.identity)
            if is_new or not are_equal(old, new):
                changes.append(Change(self.hook, place, is_new, old, copy_value(new)))
        return changes

    def _list_places(self) -> Iterator[Place]:
        yield from list_function_places(self.hook.function)
        yield from self._shared_places()


def copy_value(value: Any) -> Any:
    """Copies a simple value, so that in-place changes of the original do not affect the copy."""
    return value.copy() if isinstance(value, np.ndarray) else value


def are_equal(old: Any, new: Any) -> bool:
    """Returns whether two simple values are the same; NaN is the same as NaN."""
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return old.dtype == new.dtype and old.tobytes() == new.tobytes()
    return type(old) is type(new) and repr(old) == repr(new)


def is_simple(value: Any) -> bool:
    """Returns whether a value is a number, a string, a small array, None, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_simple, value))
    if isinstance(value, np.ndarray):
        return value.size <= _MOST_ELEMENTS and value.dtype != object
    return isinstance(value, _SIMPLE)


def list_function_places(function: Any) -> Iterator[Place]:
    """Yields the places that a function, or a function that it calls, may read or write."""
    seen: dict[int, Any] = {}
    waiting = [function]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen[id(function)] = function
        if isinstance(function, functools.partial):
            waiting.append(function.func)
            yield from list_held("", function.keywords)
        elif isinstance(function, types.MethodType):
            waiting.append(function.__func__)
            yield from list_attributes("", function.__self__)
        elif isinstance(function, types.FunctionType):
            if not is_of_library(function.__code__.co_filename):
                waiting += list_callees(function)
                yield from list_places_of(function)
        elif callable(function) and not isinstance(function, type):
            waiting.append(type(function).__call__)
            yield from list_attributes("", function)


def list_places_of(function: types.FunctionType) -> Iterator[Place]:
    """Yields the places of one function, without those of functions that it calls."""
    for name in list_names(function.__code__):
        if name in function.__globals__:
            yield from list_place(name, function.__globals__, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            yield from list_place(name, cell, None)
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    for parameter in parameters:
        if is_simple(parameter.default):
            yield DefaultArgument(parameter.name, function, parameter.name)
        elif parameter.default is not parameter.empty:
            yield from list_held(parameter.name, parameter.default)
    for name in vars(function):
        yield from list_place(f"{function.__name__}.{name}", function, name)


def list_callees(function: types.FunctionType) -> list[Any]:
    """Returns the functions that a function can call by a global name or from its closure."""
    names = list_names(function.__code__)
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            values.append(cell.cell_contents)
    callees = [getattr(function, "__wrapped__", None), *values]
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return [callee for callee in callees if isinstance(callee, kinds)]


def list_names(code: types.CodeType) -> list[str]:
    """Returns the global names in the code of a function and of the functions inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    names = [*code.co_names, *itertools.chain.from_iterable(map(list_names, inner))]
    return list(dict.fromkeys(names))


def is_of_library(file_name: str) -> bool:
    """Returns whether a source file belongs to Python or a library, rather than to the user."""
    return any(folder in file_name for folder in NOT_THE_USERS)


def list_place(name: str, owner: Any, key: Any) -> Iterator[Place]:
    """Yields a place if its value is simple; otherwise, the places inside its value."""
    place = Place(name, owner, key)
    value = place.read()
    if is_simple(value):
        yield place
    else:
        yield from list_held(name, value)


def list_held(name: str, value: Any) -> Iterator[Place]:
    """Yields the places of simple values in a dict, a list or a plain object."""
    if isinstance(value, dict | list):
        if len(value) > _MOST_ELEMENTS:
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, element in list(items):
            if is_simple(element):
                yield Place(f"{name}[{key!r}]" if name else str(key), value, key)
    elif is_plain_object(value):
        yield from list_attributes(name, value)


def is_plain_object(value: Any) -> bool:
    """Returns whether a value is a class of the user, or an object of such a class.

    Layers, modules and functions are excluded. A ``SimpleNamespace`` is included.
    """
    if isinstance(value, keras.Layer | tf.Module | types.ModuleType | types.FunctionType):
        return False
    kind = value if isinstance(value, type) else type(value)
    if kind is types.SimpleNamespace:
        return True
    if kind.__module__ == "builtins":
        return False
    file_name = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file_name is None or not is_of_library(file_name)


def list_attributes(name: str, owner: Any) -> Iterator[Place]:
    """Yields the attributes of an object, or of a class, that have simple values."""
    prefix = f"{name}." if name else ""
    for attribute, value in list(getattr(owner, "__dict__", {}).items()):
        if is_simple(value) and not attribute.startswith("__"):
            yield Place(prefix + attribute, owner, attribute)


def list_graph_places(state: State) -> list[Place]:
    """Returns the places in graph hooks, the model, its layers, the loss and ``hparams``."""
    places = list(list_held("hparams", state.hooks.create_model.common["hparams"]))
    for function in (state.train_loss, *(hook.function for hook in state.hooks.list_graph_hooks())):
        places += list_function_places(function)
    owners = {"train_model": state.train_model}
    owners |= {f"the layer {layer.name!r}": layer for layer in state.recording.layers}
    for name, owner in owners.items():
        places += list_object_places(name, owner)
    return list({place.identity: place for place in reversed(places)}.values())


def list_object_places(name: str, owner: Any) -> Iterator[Place]:
    """Yields the places in the attributes of a model or a layer, except attributes of Keras."""
    for attribute, value in list(getattr(owner, "__dict__", {}).items()):
        if attribute in _list_keras_attributes():
            continue
        if is_simple(value):
            yield Place(f"{name}.{attribute}", owner, attribute)
        elif isinstance(value, dict | list) and not attribute.startswith("_"):
            yield from list_held(f"{name}.{attribute}", value)


@functools.cache
def _list_keras_attributes() -> frozenset[str]:
    """Returns the attributes that every Keras layer or model has."""
    return frozenset({*vars(keras.Layer()), *vars(keras.Model())})


@dataclasses.dataclass(frozen=True)
class FrozenValue:
    """A value that was changed although a graph still uses the old value.

    Attributes:
        change: the change
        reader: the graph hook that reads the value, with its line; None if no hook reads it
    """

    change: Change
    reader: str | None

    def __str__(self) -> str:
        change = self.change
        reader = self.reader or "the model"
        return (
            f"{change.hook}: changes {change.place.name} from {quote(change.old, 40)} to "
            f"{quote(change.new, 40)}, but {reader} read it when the graph was traced, so "
            f"every step uses {quote(change.old, 40)}; make it a tf.Variable in create_model, "
            "and assign to that."
        )


def find_frozen_values(state: State, changes: Iterable[Change]) -> list[FrozenValue]:
    """Returns the changed values on which the graphs of the run depend.

    For each value, the graphs are traced with the old and with the new value, and compared. Nothing
    is traced if nothing has changed.
    """
    by_place: dict[tuple[int, Any], Change] = {}
    for change in changes:
        if change.is_new:
            continue
        first = by_place.get(change.place.identity, change)
        by_place[change.place.identity] = dataclasses.replace(change, old=first.old)
    changed = [each for each in by_place.values() if not are_equal(each.old, each.new)]
    if not changed:
        return []
    with_new = trace_all(state)
    if _compare_with_old(state, changed, with_new) is None:
        return []
    frozen = []
    for change in changed:
        difference = _compare_with_old(state, [change], with_new)
        if difference is not None:
            reader = state.hooks.find_owner(read_frames(difference))
            frozen.append(FrozenValue(change, reader))
    return frozen


def _compare_with_old(
    state: State, changes: list[Change], with_new: list[tf.Operation]
) -> tf.Operation | None:
    """Traces all graphs with the old values, and returns the first op that differs.

    Args:
        state: the state of the run
        changes: the changes to undo while the graphs are traced
        with_new: the ops of the graphs that were traced with the new values
    """
    try:
        for change in changes:
            change.place.write(copy_value(change.old))
        return find_difference(trace_all(state), with_new)
    finally:
        for change in changes:
            change.place.write(copy_value(change.new))


def trace_all(state: State) -> list[tf.Operation]:
    """Traces a step and the evaluation again, and returns their ops."""
    writer = tf.summary.create_noop_writer()
    functions = StepFunctions(state, writer, state.compilation.parts)
    functions.trace()
    operations = list(functions.list_operations())
    if state.evaluation is not None:
        for evaluation_set in state.evaluation.sets.values():
            run_steps = define_run_steps(state.components, evaluation_set)
            graph = run_steps.get_concrete_function().graph
            operations += add_called_ops(graph.get_operations())
    return operations
