"""What the hooks of a run create: every variable and Keras layer, as it is made.

A variable belongs to the run because it was created while one of its hooks ran, wherever it hides:
in a list, a closure, a plain object, an optimizer, a metric or a random generator. References are
weak, so that what a hook has thrown away is not there any more.
"""

import collections
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core import compat
from ctl_core.compat import find_written_resources, flatten_layers
from ctl_core.numerics.variables import unwrap

IMPORTED: list[weakref.ref[Any]] = []  # the layers that the import of callbacks.py has made
_NEW = vars(keras.Layer)["__new__"]  # of Keras


@contextlib.contextmanager
def note_layers(layers: list[weakref.ref[Any]]) -> Iterator[None]:
    """Adds to a list the layers that are made within, by ``__new__``, which all have."""
    original = vars(keras.Layer)["__new__"]

    def make(kind: Any, *args: Any, **options: Any) -> Any:
        layer = original(kind, *args, **options)
        layers.append(weakref.ref(layer))
        return layer

    setattr(keras.Layer, "__new__", make)  # noqa: B010
    try:
        yield
    finally:
        setattr(keras.Layer, "__new__", original)  # noqa: B010


@contextlib.contextmanager
def record_nothing() -> Iterator[None]:
    """Hides what is created within from every recording that listens, and keeps ``IMPORTED``.

    A run that a hook loads is no part of the run that the hook belongs to.
    """
    noting, imported = vars(keras.Layer)["__new__"], list(IMPORTED)
    setattr(keras.Layer, "__new__", _NEW)  # noqa: B010
    try:
        with compat.leave_creator_scopes():
            yield
    finally:
        setattr(keras.Layer, "__new__", noting)  # noqa: B010
        IMPORTED[:] = imported


class Recording:
    """The variables, layers and random generators that were created, in their order."""

    def __init__(self) -> None:
        self._variables: list[tuple[str, weakref.ref[Any]]] = []
        self._layers: list[weakref.ref[Any]] = []
        self._known: set[int] = set()
        self._hook = ""
        self._open = False
        self._held: list[Any] = []
        self._late: list[tuple[str, weakref.ref[Any]]] = []

    @contextlib.contextmanager
    def record_as(self, hook: str) -> Iterator[None]:
        """Records what is created within as that of a hook."""
        before, self._hook = self._hook, hook
        try:
            if self._open:
                yield
            else:
                with self._listen():
                    yield
        finally:
            self._hook = before

    def fix(self) -> None:
        """Drops what is dead, once a run is built, and holds the rest from here on."""
        gc.collect()
        references = [reference for _, reference in self._variables]
        self._held = [one() for one in (*references, *self._layers)]

    @contextlib.contextmanager
    def watch(self, hook: str) -> Iterator[None]:
        """Notes what a host hook creates within, while training: no restore would know it."""

        def create(make: Callable[..., Any], **values: Any) -> Any:
            variable = make(**values)
            name = variable.name.split(":")[0]
            self._late.append((f"{hook}: makes the variable {name}", weakref.ref(variable)))
            return variable

        with tf.variable_creator_scope(create):
            yield

    def find_late(self) -> str | None:
        """Returns which hook has made which variable that is still there; None: there is none."""
        if any(reference() is not None for _, reference in self._late):
            gc.collect()
        self._late = [entry for entry in self._late if entry[1]() is not None]
        return self._late[0][0] if self._late else None

    @contextlib.contextmanager
    def _listen(self) -> Iterator[None]:
        def create(make: Callable[..., Any], **values: Any) -> Any:
            variable = make(**values)
            self.add(variable)
            return variable

        self._open = True
        try:
            with tf.variable_creator_scope(create), note_layers(self._layers):
                yield
        finally:
            self._open = False

    def add(self, variable: Any, name: str | None = None) -> None:
        """Records a tf.Variable, if it is not known, as that of the hook that runs.

        ``name`` is given where its own says nothing that another process would say, too.
        """
        if (identity := id(variable)) in self._known:
            return
        name = name or f"{self._hook}/{variable.name.split(':')[0]}"
        self._known.add(identity)
        self._variables.append((name, weakref.ref(variable, lambda _: self._drop(identity))))

    def _drop(self, identity: int) -> None:
        self._known.discard(identity)  # another object may get the same number

    def add_model(self, hook: str, model: Any) -> None:
        """Records the layers and variables of a Keras model, wherever it was made."""
        known = {id(layer) for layer in self.layers}
        new = [layer for layer in flatten_layers(model) if id(layer) not in known]
        self._layers += map(weakref.ref, new)
        with self.record_as(hook):
            for layer in new:
                for variable in map(unwrap, layer.variables):
                    self.add(variable)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The variables that are still there, in their order.

        Each has the name of its hook and its own, as in ``create_model/dense/kernel``; of several
        of one name the later ones have a number, as in ``create_model/dense/kernel#2``.
        """
        found: dict[str, tf.Variable] = {}
        numbers: collections.Counter[str] = collections.Counter()
        for name, reference in self._variables:
            if (variable := reference()) is not None:
                numbers[name] += 1
                found[name if numbers[name] == 1 else f"{name}#{numbers[name]}"] = variable
        return found

    def find_written(self, graph: Any, strategy: tf.distribute.Strategy) -> list[tf.Variable]:
        """Returns the variables that a graph writes, on whichever replica."""
        handles = {id(handle) for handle in find_written_resources(graph)}
        local = strategy.experimental_local_results
        return [v for v in self.variables.values() if handles & {id(p.handle) for p in local(v)}]

    @property
    def layers(self) -> list[keras.Layer]:
        """The Keras layers that are still there, each once, in the order in which they were made.

        Also the model that ``keras.Sequential`` keeps inside.
        """
        found = {id(layer): layer for one in self._layers if (layer := one()) is not None}
        return list(found.values())

    @property
    def generators(self) -> list[tf.Variable]:
        """The states of Keras' seed generators, int64 vectors [seed, counter]."""
        of_keras = "seed_generator_state"  # so Keras names them, whoever makes the generator
        return [v for v in self.variables.values() if v.name.split(":")[0].endswith(of_keras)]


def find_tables(graph: Any) -> list[Any]:
    """Returns the tables that a graph captures, wherever hooks, or their file, have made them."""
    captured = {id(outer) for outer, _ in graph.captures}
    kind = tf.saved_model.experimental.TrackableResource
    tables = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    return [one for one in tables if id(one.resource_handle) in captured]


def list_freezable(recording: Recording) -> list[Any]:
    """Returns the layers, then their variables, each once: what can be frozen."""
    variables = {id(v): v for layer in recording.layers for v in layer.variables}
    return [*recording.layers, *variables.values()]


def read_flags(recording: Recording) -> list[bool]:
    """Returns what is trainable: a flag for each layer, then one for each variable."""
    return [bool(part.trainable) for part in list_freezable(recording)]


def set_flags(parts: list[Any], flags: list[bool]) -> bool:
    """Sets the flags; returns False, and changes nothing, if they are those of other layers."""
    if len(flags) != len(parts):
        return False
    pairs = list(zip(parts, flags, strict=True))
    # Setting a layer's flag sets those within it, so that more than one round may be needed.
    while changed := [pair for pair in pairs if bool(pair[0].trainable) != pair[1]]:
        for part, flag in changed:
            part.trainable = flag
    return True


@contextlib.contextmanager
def unfreeze(recording: Recording) -> Iterator[None]:
    """Within, no layer is frozen; afterwards all that were there are as they were."""
    parts, flags = list_freezable(recording), read_flags(recording)
    # Layer by layer, and off before on: Keras passes on only a value that changes.
    for value in (False, True):
        for layer in recording.layers:
            layer.trainable = value
    try:
        yield
    finally:
        set_flags(parts, flags)
