"""Records every variable and Keras layer that the hooks of a run create.

A variable belongs to the run because it was created while one of its hooks ran, wherever it is
stored: in a list, a closure, a plain object, an optimizer, a metric or a random generator. The
references are weak, so that objects that a hook has discarded disappear from the recording.
"""

import collections
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from ctl_core.compat import (
    find_written_resources,
    flatten_layers,
    hide_new_layers,
    is_keras_generator,
    is_tf_generator,
    leave_creator_scopes,
    watch_new_layers,
)
from ctl_core.numerics.variables import unwrap
from ctl_core.types import Model, Trackable, Variable

# The layers that were created while callbacks.py was imported.
IMPORTED: list[weakref.ref[Any]] = []

# Anything whose ``trainable`` can be set.
Freezable: TypeAlias = keras.Layer | Variable


@contextlib.contextmanager
def note_layers(layers: list[weakref.ref[Any]]) -> Iterator[None]:
    """Adds the layers that are created within the context to a list."""
    with watch_new_layers(lambda layer: layers.append(weakref.ref(layer))):
        yield


@contextlib.contextmanager
def record_nothing() -> Iterator[None]:
    """Hides objects that are created within the context from all recordings; keeps ``IMPORTED``.

    A run that a hook loads is no part of the run that the hook belongs to.
    """
    imported = list(IMPORTED)
    try:
        with hide_new_layers(), leave_creator_scopes():
            yield
    finally:
        IMPORTED[:] = imported


class Recording:
    """The variables, layers and random generators that were created, in order of creation.

    Attributes:
        summed: the ids of the variables that were created to add up over replicas
    """

    def __init__(self, unifies: bool = False) -> None:
        """Prepares a recording.

        Args:
            unifies: whether every variable is created with one value for all replicas, even if it
                should add up over them, and is written without an exchange
        """
        self.summed: set[int] = set()
        self._unifies = unifies
        self._variables: list[tuple[str, weakref.ref[Any]]] = []
        self._layers: list[weakref.ref[Any]] = []
        self._known: set[int] = set()
        self._hook = ""
        self._open = False
        self._held: list[Any] = []
        self._late: list[tuple[str, weakref.ref[Any]]] = []

    @contextlib.contextmanager
    def record_as(self, hook: str) -> Iterator[None]:
        """Records objects that are created within the context as those of a hook."""
        before = self._hook
        self._hook = hook
        try:
            if self._open:
                yield
            else:
                with self._listen():
                    yield
        finally:
            self._hook = before

    def fix(self) -> None:
        """Forgets discarded objects after a run was built, and keeps the others alive."""
        gc.collect()
        references = [reference for _, reference in self._variables]
        self._held = [reference() for reference in (*references, *self._layers)]

    @contextlib.contextmanager
    def watch(self, hook: str) -> Iterator[None]:
        """Notes variables that a host hook creates in training, which no restore would know."""

        def create(make: Callable[..., tf.Variable], **values: Any) -> tf.Variable:
            variable = make(**values)
            name = variable.name.split(":")[0]
            self._late.append((f"{hook}: creates the variable {name}", weakref.ref(variable)))
            return variable

        with tf.variable_creator_scope(create):
            yield

    def find_late(self) -> str | None:
        """Describes the first living variable that a host hook created; None if there is none."""
        if any(reference() is not None for _, reference in self._late):
            gc.collect()
        self._late = [entry for entry in self._late if entry[1]() is not None]
        if not self._late:
            return None
        description, _ = self._late[0]
        return description

    @contextlib.contextmanager
    def _listen(self) -> Iterator[None]:
        def create(make: Callable[..., tf.Variable], **values: Any) -> tf.Variable:
            adds_up = values.get("aggregation") == tf.VariableAggregation.SUM
            if self._unifies:
                values["synchronization"] = tf.VariableSynchronization.AUTO
                values["aggregation"] = tf.VariableAggregation.NONE
            variable = make(**values)
            if adds_up:
                self.summed.add(id(variable))
            self.add(variable)
            return variable

        self._open = True
        try:
            with tf.variable_creator_scope(create), note_layers(self._layers):
                yield
        finally:
            self._open = False

    def add(self, variable: tf.Variable, name: str | None = None) -> None:
        """Records a tf.Variable, unless it is known, as a variable of the hook that runs.

        Args:
            variable: the variable
            name: replaces the variable's own name where that differs between processes
        """
        identity = id(variable)
        if identity in self._known:
            return
        name = name or f"{self._hook}/{variable.name.split(':')[0]}"
        self._known.add(identity)
        self._variables.append((name, weakref.ref(variable, lambda _: self._drop(identity))))

    def _drop(self, identity: int) -> None:
        # Another object may get the same id.
        self._known.discard(identity)
        self.summed.discard(identity)

    def add_model(self, hook: str, model: Model) -> None:
        """Records the layers and variables of a Keras model, wherever it was created."""
        known = {id(layer) for layer in self.layers}
        new = [layer for layer in flatten_layers(model) if id(layer) not in known]
        self._layers += map(weakref.ref, new)
        with self.record_as(hook):
            for layer in new:
                for variable in map(unwrap, layer.variables):
                    self.add(variable)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The living variables by name, in order of creation.

        A name consists of the hook's and the variable's, as in ``create_model/dense/kernel``. If
        names are equal, the later ones get a number, as in ``create_model/dense/kernel#2``.
        """
        variables: dict[str, tf.Variable] = {}
        numbers: collections.Counter[str] = collections.Counter()
        for name, reference in self._variables:
            variable = reference()
            if variable is None:
                continue
            numbers[name] += 1
            if numbers[name] > 1:
                name = f"{name}#{numbers[name]}"
            variables[name] = variable
        return variables

    def find_written(self, graph: tf.Graph, strategy: tf.distribute.Strategy) -> list[tf.Variable]:
        """Returns the variables that a graph writes on any replica."""
        written_handles = {id(handle) for handle in find_written_resources(graph)}

        def is_written(variable: tf.Variable) -> bool:
            components = strategy.experimental_local_results(variable)
            return any(id(component.handle) in written_handles for component in components)

        return [variable for variable in self.variables.values() if is_written(variable)]

    @property
    def layers(self) -> list[keras.Layer]:
        """The living Keras layers, each once, in order of creation.

        They include the model inside a ``keras.Sequential``.
        """
        layers = [reference() for reference in self._layers]
        return list({id(layer): layer for layer in layers if layer is not None}.values())

    @property
    def generators(self) -> list[tf.Variable]:
        """The states of Keras' seed generators, int64 vectors [seed, counter]."""
        return [
            variable for variable in self.variables.values() if is_keras_generator(variable.name)
        ]

    @property
    def tf_generators(self) -> list[tf.Variable]:
        """The states of ``tf.random.Generator`` objects."""
        return [variable for name, variable in self.variables.items() if is_tf_generator(name)]


def find_tables(graph: tf.Graph) -> list[Trackable]:
    """Returns the lookup tables that a graph captures, wherever they were created."""
    captured = {id(outer) for outer, _ in graph.captures}
    kind = tf.saved_model.experimental.TrackableResource
    # isinstance would ask lazy objects for their __class__, and so load them.
    resources = [value for value in gc.get_objects() if issubclass(type(value), kind)]
    return [resource for resource in resources if id(resource.resource_handle) in captured]


def list_freezable(recording: Recording) -> list[Freezable]:
    """Returns everything that can be frozen: the layers, then their variables, each once."""
    variables = {
        id(variable): variable for layer in recording.layers for variable in layer.variables
    }
    return [*recording.layers, *variables.values()]


def read_flags(recording: Recording) -> list[bool]:
    """Returns whether each layer, and then each variable, is trainable."""
    return [bool(freezable.trainable) for freezable in list_freezable(recording)]


def set_flags(freezables: list[Freezable], flags: list[bool]) -> bool:
    """Sets whether layers and variables are trainable.

    Args:
        freezables: the layers and variables
        flags: whether each of them is trainable

    Returns:
        False, and nothing is changed, if the numbers of both differ.
    """
    if len(flags) != len(freezables):
        return False
    pairs = list(zip(freezables, flags, strict=True))
    # Setting the flag of a layer sets those of its members, so that several rounds may be needed.
    while True:
        changed = [pair for pair in pairs if bool(pair[0].trainable) != pair[1]]
        if not changed:
            return True
        for freezable, flag in changed:
            freezable.trainable = flag


@contextlib.contextmanager
def unfreeze(recording: Recording) -> Iterator[None]:
    """Temporarily unfreezes every layer."""
    freezables = list_freezable(recording)
    flags = read_flags(recording)
    # Layer by layer, and off before on: Keras passes a value on to members only if it changes.
    for value in (False, True):
        for layer in recording.layers:
            layer.trainable = value
    try:
        yield
    finally:
        set_flags(freezables, flags)
