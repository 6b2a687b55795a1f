"""Records every variable and Keras layer that the hooks of a run create.

A variable belongs to the run if it was created while one of the run's hooks was running. It may be
stored anywhere: in a list, a closure, a plain object, an optimizer, a metric or a random generator.
The recording keeps weak references, so objects that a hook has discarded disappear from it.
"""

import collections
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from ctl_core.compat import (
    FunctionGraph,
    find_written_resources,
    flatten_layers,
    hide_new_layers,
    is_keras_generator,
    is_tf_generator,
    leave_creator_scopes,
    watch_new_layers,
)
from ctl_core.numerics.variables import unwrap
from ctl_core.run.live_objects import list_objects
from ctl_core.types import Model, Trackable, Variable

# The layers that were created while callbacks.py was imported.
IMPORTED: list[weakref.ref[Any]] = []

# The hooks that return metrics.
_METRIC_HOOKS = ("create_train_metrics", "create_metrics")

# A layer or variable, both of which have an attribute ``trainable`` that can be set.
Freezable: TypeAlias = keras.Layer | Variable


@contextlib.contextmanager
def note_layers(layers: list[weakref.ref[Any]]) -> Iterator[None]:
    """Appends a weak reference to ``layers`` for each layer created inside the context."""
    with watch_new_layers(lambda layer: layers.append(weakref.ref(layer))):
        yield


@contextlib.contextmanager
def record_nothing() -> Iterator[None]:
    """Hides objects that are created inside the context from all recordings.

    This is necessary when a hook loads another run, because the objects of the loaded run do not
    belong to the hook's own run. ``IMPORTED`` is restored when the context ends.
    """
    imported = list(IMPORTED)
    try:
        with hide_new_layers(), leave_creator_scopes():
            yield
    finally:
        IMPORTED[:] = imported


class LateObject(NamedTuple):
    """A variable or layer that a host hook created during training.

    Attributes:
        hook: the name and line of the hook
        name: the kind and the name of the object, such as ``the layer dense_1``
        reference: refers to the object while it exists
    """

    hook: str
    name: str
    reference: weakref.ref[Any]

    @property
    def is_variable(self) -> bool:
        """True for a variable, False for a layer or for an object that no longer exists."""
        return isinstance(self.reference(), tf.Variable)


def drop_discarded(objects: list[LateObject]) -> list[LateObject]:
    """Returns the objects that still exist."""
    if any(late.reference() is not None for late in objects):
        gc.collect()
    return [late for late in objects if late.reference() is not None]


class Recording:
    """Records the variables, layers and random generators that are created, in order of creation.

    A variable is created with one value for all replicas, and each replica writes it without
    communication, whatever its aggregation: the engine itself combines the values that replicas
    write.

    Attributes:
        aggregations: the aggregations with which variables were to be created, by id
    """

    def __init__(self, divides_metrics: bool = True) -> None:
        """Prepares a recording.

        Args:
            divides_metrics: whether the metrics that hooks return keep the aggregation SUM, so that
                each replica has its own part of their sums
        """
        self.aggregations: dict[int, tf.VariableAggregation] = {}
        self._divides_metrics = divides_metrics
        self._variables: list[tuple[str, weakref.ref[Any]]] = []
        self._layers: list[weakref.ref[Any]] = []
        self._known: set[int] = set()
        self._hook = ""
        self._open = False
        self._held: list[Any] = []
        self._late: list[LateObject] = []
        self._layers_of_host_hook: list[weakref.ref[Any]] | None = None

    @contextlib.contextmanager
    def record_as(self, hook: str) -> Iterator[None]:
        """Records objects that are created inside the context as objects of a hook."""
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
        """Ends the recording of a run that has been built.

        Forgets objects that have been discarded, and keeps all other objects alive.
        """
        gc.collect()
        references = [reference for _, reference in self._variables]
        self._held = [reference() for reference in (*references, *self._layers)]

    @contextlib.contextmanager
    def watch_layers(self) -> Iterator[None]:
        """Makes ``watch`` note layers, too, within the context.

        All host hooks of a training share one such context, because it changes ``keras.Layer``. It
        would take longer to enter than a short hook runs.
        """

        def note(layer: keras.Layer) -> None:
            if self._layers_of_host_hook is not None:
                self._layers_of_host_hook.append(weakref.ref(layer))

        with watch_new_layers(note):
            yield

    @contextlib.contextmanager
    def watch(self, hook: str) -> Iterator[list[LateObject]]:
        """Notes the variables and layers that a host hook creates inside the context.

        No checkpoint could restore the variables, because they do not exist when a run is built.
        Layers are noted within ``watch_layers`` only.

        Args:
            hook: the name and line of the hook

        Yields:
            A list, to which the objects are appended.
        """
        created: list[LateObject] = []
        layers: list[weakref.ref[Any]] = []

        def create(make: Callable[..., tf.Variable], **values: Any) -> tf.Variable:
            variable = make(**values)
            name = variable.name.split(":")[0]
            created.append(LateObject(hook, f"the variable {name}", weakref.ref(variable)))
            return variable

        self._layers_of_host_hook = layers
        try:
            with tf.variable_creator_scope(create):
                yield created
        finally:
            self._layers_of_host_hook = None
            self._late += created
        for reference in layers:
            layer = reference()
            if layer is not None:
                created.append(LateObject(hook, f"the layer {layer.name}", reference))

    def find_late(self) -> str | None:
        """Describes the first variable that a host hook created and that still exists.

        Returns None if there is no such variable.
        """
        self._late = drop_discarded(self._late)
        if not self._late:
            return None
        return f"{self._late[0].hook}: creates {self._late[0].name}"

    @contextlib.contextmanager
    def _listen(self) -> Iterator[None]:
        def create(make: Callable[..., tf.Variable], **values: Any) -> tf.Variable:
            aggregation = values.get("aggregation") or tf.VariableAggregation.NONE
            is_divided = self._divides_metrics and self._hook in _METRIC_HOOKS
            if not is_divided:
                is_on_read = values.get("synchronization") == tf.VariableSynchronization.ON_READ
                if is_on_read and values.get("trainable") is None:
                    values["trainable"] = False  # as TensorFlow chooses for ON_READ
                values["synchronization"] = tf.VariableSynchronization.AUTO
                values["aggregation"] = tf.VariableAggregation.NONE
            variable = make(**values)
            self.aggregations[id(variable)] = aggregation
            self.add(variable)
            return variable

        self._open = True
        try:
            with tf.variable_creator_scope(create), note_layers(self._layers):
                yield
        finally:
            self._open = False

    def add(self, variable: tf.Variable, name: str | None = None) -> None:
        """Records a tf.Variable as a variable of the current hook, unless it is already recorded.

        Args:
            variable: the variable
            name: the name to record. It replaces the variable's own name, which may differ between
                processes.
        """
        identity = id(variable)
        if identity in self._known:
            return
        name = name or f"{self._hook}/{variable.name.split(':')[0]}"
        self._known.add(identity)
        self._variables.append((name, weakref.ref(variable, lambda _: self._drop(identity))))

    def _drop(self, identity: int) -> None:
        # Forget the id, because another object may get the same id.
        self._known.discard(identity)
        self.aggregations.pop(identity, None)

    def add_model(self, hook: str, model: Model) -> None:
        """Records the layers and variables of a Keras model.

        The model may have been created anywhere, for example before the run.
        """
        known = {id(layer) for layer in self.layers}
        new = [layer for layer in flatten_layers(model) if id(layer) not in known]
        self._layers += map(weakref.ref, new)
        with self.record_as(hook):
            for layer in new:
                for variable in map(unwrap, layer.variables):
                    self.add(variable)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The variables that still exist, by name, in order of creation.

        A name consists of the name of the hook and the name of the variable:
        ``create_model/dense/kernel``. If several variables have the same name, all but the first
        one get a number: ``create_model/dense/kernel#2``.
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

    def find_written(
        self, graph: FunctionGraph, strategy: tf.distribute.Strategy
    ) -> list[tf.Variable]:
        """Returns the variables that a graph writes on any replica."""
        written_handles = {id(handle) for handle in find_written_resources(graph)}

        def is_written(variable: tf.Variable) -> bool:
            components = strategy.experimental_local_results(variable)
            return any(id(component.handle) in written_handles for component in components)

        return [variable for variable in self.variables.values() if is_written(variable)]

    @property
    def layers(self) -> list[keras.Layer]:
        """The Keras layers that still exist, each once, in order of creation.

        They include the functional model that a ``keras.Sequential`` creates inside itself.
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


def find_tables(graph: FunctionGraph) -> list[Trackable]:
    """Returns the lookup tables that a graph captures, regardless of where they were created."""
    captured = {id(outer) for outer, _ in graph.captures}
    kind = tf.saved_model.experimental.TrackableResource
    resources = list_objects(kind)
    return [resource for resource in resources if id(resource.resource_handle) in captured]


def list_freezable(recording: Recording) -> list[Freezable]:
    """Returns all layers, and then all of their variables, each once."""
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
        True if the flags were set; False, without any change, if the arguments differ in length.
    """
    if len(flags) != len(freezables):
        return False
    pairs = list(zip(freezables, flags, strict=True))
    # Setting the flag of a layer also sets the flags of its sublayers and variables, so several
    # rounds may be needed.
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
    # Set all flags to False before setting them to True, because Keras passes the flag of a layer
    # on to its sublayers and variables only if the flag changes.
    for value in (False, True):
        for layer in recording.layers:
            layer.trainable = value
    try:
        yield
    finally:
        set_flags(freezables, flags)
