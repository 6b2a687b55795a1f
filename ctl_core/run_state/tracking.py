"""What belongs to a run: every variable, layer and random generator that its objects reach.

Keras and TensorFlow each follow objects in their own way, and neither follows plain Python: a
``tf.train.Checkpoint`` does not see the layers that a Keras layer keeps in a list, and a
``tf.Module`` does not see the variables of Keras layers. Here all attributes are followed, of
whatever object, and the closures and globals that the functions of callbacks.py name. What of it
a checkpoint holds is checkpoint.py's part.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import dis
import functools
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.compat import flatten_layers, written_resources
from ctl_core.errors import SetupError
from ctl_core.numerics.precision import to_float32
from ctl_core.types import Model

# Of TensorFlow's and Keras' own classes, those that may hold what belongs to a run; the rest is
# bookkeeping: graphs, datasets, strategies, nodes of functional models.
_HOLDERS = (
    keras.Layer,
    keras.Metric,
    keras.Optimizer,
    keras.Loss,
    keras.random.SeedGenerator,
    keras.optimizers.schedules.LearningRateSchedule,
    tf.Module,
    tf.train.Checkpoint,
    tf.train.ExponentialMovingAverage,
    tf.compat.v1.train.Optimizer,
)
# What has values of its own that a checkpoint can hold as one.
_LEAVES = (
    tf.Variable,
    keras.Variable,
    tf.random.Generator,
    tf.lookup.experimental.MutableHashTable,
    tf.lookup.experimental.DenseHashTable,
)
ADAPTED = (
    keras.layers.StringLookup,  # within a TextVectorization, too
    keras.layers.IntegerLookup,
    keras.layers.Discretization,
    keras.layers.Normalization,
)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
_PLAIN_TYPES = frozenset(_PLAIN)
_CONTAINERS = (dict, list, tuple, set, np.ndarray, np.generic)
# A longer list or dict, of numbers, texts or records, is data.
_LONG = 1000
_LIBRARIES = {"builtins", "ctl_core", "keras", "numpy", "tensorflow"}
ENGINE = str(Path(__file__).parents[1])
_NOT_OURS = (
    ENGINE,
    sysconfig.get_paths()["stdlib"],
    "site-packages",
    "dist-packages",
    "__autograph_generated",
)


@dataclasses.dataclass(frozen=True)
class Found:
    """What the objects of a run reach.

    Attributes:
        variables: by the path of attributes that leads to each, the shortest one; also tables and
            tf.random.Generators, which have values of their own
        layers: Keras layers, as Keras lists those of a model, the others behind them
        generators: states of Keras' seed generators
        optimizers: Keras optimizers
        adapted: by path, the layers that ``adapt`` teaches something which is in no variable
        tables: lookup tables that are never written to, which a SavedModel holds
    """

    variables: dict[str, Any]
    layers: list[keras.Layer]
    generators: list[tf.Variable]
    optimizers: list[keras.Optimizer]
    adapted: dict[str, keras.Layer]
    tables: list[Any]

    def keras_variables(self) -> list[Any]:
        """The variables of the layers, each once; unlike tf.Variables they can be frozen."""
        found = {id(v): v for layer in self.layers for v in layer.variables}
        return list(found.values())


def find(roots: Mapping[str, Any]) -> Found:
    """Follows the attributes of the named objects, to any depth, each object once.

    Costs some microseconds an object; a model of a hundred layers takes about ten milliseconds.

    Raises:
        SetupError: a variable is in a set, where nothing tells it from the others.
    """
    variables: dict[str, Any] = {}
    known: set[int] = set()
    layers: dict[int, keras.Layer] = {}
    for root in roots.values():
        if isinstance(root, keras.Layer):
            layers |= {id(layer): layer for layer in flatten_layers(root)}
    generators: dict[int, tf.Variable] = {}
    optimizers: list[keras.Optimizer] = []
    adapted: dict[str, keras.Layer] = {}
    tables: list[Any] = []
    for path, item in _walk(roots):
        role = _role(item.__class__)
        if role is keras.Layer:
            layers.setdefault(id(item), item)
            if isinstance(item, ADAPTED):
                adapted[path] = item
        elif role is keras.random.SeedGenerator:
            state = plain_variable(item.state)
            generators.setdefault(id(state), state)
        elif role is keras.Optimizer:
            optimizers.append(item)
        elif role is tf.Variable and id(plain_variable(item)) not in known:
            known.add(id(plain_variable(item)))
            variables[path] = item
        elif role is tf.saved_model.experimental.TrackableResource:
            tables.append(item)
    states = list(generators.values())
    return Found(variables, list(layers.values()), states, optimizers, adapted, tables)


def plain_variable(variable: Any) -> Any:
    """Returns the tf.Variable of a Keras variable; anything else as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def tf_variable(item: Any) -> Any:
    """Returns the tf.Variable that a variable or a generator is made of; a table as it is."""
    return item.state if isinstance(item, tf.random.Generator) else plain_variable(item)


def written_variables(
    strategy: tf.distribute.Strategy, variables: Iterable[Any], *graphs: Any
) -> tuple[list[Any], bool]:
    """Returns those of the variables that graphs write to: to any replica's part of them.

    Args:
        strategy: whose replicas have the parts
        variables: any values of ``Found.variables``
        graphs: of functions that were traced

    Returns:
        The tf.Variables, and whether something else is written to, too.
    """
    others = {id(handle) for graph in graphs for handle in written_resources(graph)}
    written = []
    for variable in map(tf_variable, variables):
        parts = strategy.experimental_local_results(variable)
        handles = {id(part.handle) for part in parts if isinstance(part, tf.Variable)} & others
        if handles:
            others -= handles
            written.append(variable)
    return written, bool(others)


@tf.autograph.experimental.do_not_convert  # which would take a third of a second
def trainable_variables(model: Model) -> list[Any]:
    """Returns what of a model is trainable and not frozen, whatever it is made of.

    Of a Keras model that is its ``trainable_variables``. Of a ``tf.Module`` or any other object,
    those of the Keras layers that it reaches and its own trainable tf.Variables.
    """
    if isinstance(model, keras.Layer):
        return list(model.trainable_variables)
    found = find({"": model})
    free = {id(v) for layer in found.layers for v in layer.trainable_variables}
    return [
        variable
        for variable in found.variables.values()
        if id(variable) in free
        or (isinstance(variable, tf.Variable) and variable.trainable and variable.dtype.is_floating)
    ]


def adapter_of(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the two matrices that ``enable_lora`` has added to a layer, if it has."""
    if not getattr(layer, "lora_enabled", False):
        return []
    return [variable for variable in layer.weights if variable.name.startswith("lora_")]


@tf.autograph.experimental.do_not_convert
def regularization(model: Model) -> Any:
    """Returns the sum of a model's regularisation and ``add_loss`` terms, a scalar.

    Of a Keras model that is the sum of its ``losses``; of a ``tf.Module`` or any other object, of
    those of the Keras layers that it reaches.
    """
    if isinstance(model, keras.Layer):
        return sum(map(to_float32, model.losses))
    layers = find({"": model}).layers
    inner = {id(part) for layer in layers for part in flatten_layers(layer)[1:]}
    losses = [loss for layer in layers if id(layer) not in inner for loss in layer.losses]
    return sum(map(to_float32, [*losses, *getattr(model, "losses", [])]))


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields path and object: one root after the other, of each the nearest first."""
    # Objects are kept, or the id of one that is made on the way could be that of another.
    seen: dict[int, Any] = {}
    sets: list[tuple[str, Any]] = []
    for root in roots.items():
        queue = collections.deque([("", *root)])
        while queue:
            holder, name, item = queue.popleft()
            if id(item) in seen or (children := _reader(item.__class__)) is None:
                continue
            seen[id(item)] = item
            path = _path(holder, name) if holder else name
            if children is _of_set:
                sets.append((path, item))
                continue
            yield path, item
            for name, child in children(item):
                if type(child) not in _PLAIN_TYPES:  # as most are
                    queue.append((path, name, child))
    for path, several in sets:  # last: what is found elsewhere, too, has a name
        for _, item in _of_set(several):
            if id(item) in seen or _reader(item.__class__) is None:
                continue
            if any(isinstance(part, _LEAVES) for _, part in _walk({path: item})):
                raise SetupError(
                    f"{path} is a set with variables in it, of which a checkpoint cannot tell one "
                    "from the other; use a list or a dict."
                )


def _path(path: str, name: str) -> str:
    return name[1:] if name.startswith("/") else f"{path}/{name}"


# What an object is, is asked of its class, once: a run is walked through at many checkpoints.
@functools.lru_cache(maxsize=4096)
def _role(kind: type) -> type | None:
    """Returns what objects of a class are to a run: one of the classes here, or nothing."""
    if issubclass(kind, _LEAVES):
        return tf.Variable
    roles = (
        keras.Layer,
        keras.random.SeedGenerator,
        keras.Optimizer,
        tf.saved_model.experimental.TrackableResource,
    )
    return next((role for role in roles if issubclass(kind, role)), None)


@functools.lru_cache(maxsize=4096)
def _reader(kind: type) -> Callable[[Any], Iterable[tuple[str, Any]]] | None:
    """Returns what gives name and object of all that objects of a class hold.

    None where the objects themselves do not matter.
    """
    if issubclass(kind, _PLAIN):
        return None
    readers: tuple[tuple[Any, Callable[[Any], Iterable[tuple[str, Any]]]], ...] = (
        ((set, frozenset), _of_set),
        (_LEAVES, _of_nothing),
        (Mapping, _of_mapping),
        ((list, tuple, collections.deque), _of_sequence),
        (functools.partial, lambda it: [(n, getattr(it, n)) for n in ("func", "args", "keywords")]),
        (types.MethodType, lambda it: [("self", it.__self__), ("func", it.__func__)]),
        ((staticmethod, classmethod), lambda it: [("func", it.__func__)]),
        (property, lambda it: [("get", it.fget)]),
        (types.FunctionType, named_by),
        (
            tf.types.experimental.PolymorphicFunction,
            lambda it: [("python_function", it.python_function)],
        ),
    )
    for kinds, reader in readers:
        if issubclass(kind, kinds):
            return reader
    return _of_nothing if _is_library(kind) and not issubclass(kind, _HOLDERS) else _of_object


def _of_nothing(_: Any) -> Iterable[tuple[str, Any]]:
    return ()


def _of_set(several: Any) -> Iterable[tuple[str, Any]]:
    """A set: its parts have no names, so they are looked at last."""
    return [("", item) for item in several]


def _of_mapping(item: Any) -> Iterable[tuple[str, Any]]:
    if len(item) > _LONG and isinstance(next(iter(item.values())), (*_PLAIN, *_CONTAINERS)):
        return ()
    return [
        (str(key) if isinstance(key, str | int) else str(index), value)
        for index, (key, value) in enumerate(item.items())
    ]


def _of_sequence(item: Any) -> Iterable[tuple[str, Any]]:
    if len(item) > _LONG and isinstance(item[0], (*_PLAIN, *_CONTAINERS)):
        return ()
    return [(str(index), part) for index, part in enumerate(item)]


def _of_object(item: Any) -> Iterable[tuple[str, Any]]:
    own = {**_of_classes(item), **getattr(item, "__dict__", {})}
    if isinstance(item, keras.Sequential):
        # ``_functional`` is a model of the same layers that nobody sees, tracked under that name.
        own = {name: value for name, value in own.items() if not name.startswith(("_f", "_self_"))}
    return sorted(own.items(), key=lambda pair: pair[0].startswith("_"))  # public names first


def _is_library(kind: type) -> bool:
    return kind.__module__.split(".")[0] in _LIBRARIES


def _of_classes(item: Any) -> dict[str, Any]:
    """What an object has from the user's classes: functions, shared variables, slots."""
    found: dict[str, Any] = {}
    kind: Any = type(item)
    for base in _own_classes(kind):
        found |= {n: v for n, v in vars(base).items() if not isinstance(v, _PLAIN)}
    slots = [name for name, v in found.items() if isinstance(v, types.MemberDescriptorType)]
    return found | {name: getattr(item, name, None) for name in slots}


@functools.lru_cache(maxsize=4096)
def _own_classes(kind: type) -> tuple[type, ...]:
    """The user's classes that a class is made of, the first one last."""
    return tuple(base for base in reversed(kind.__mro__) if not _is_library(base))


def named_by(function: types.FunctionType) -> list[tuple[str, Any]]:
    """What a function of the user's own holds: closure, defaults, attributes, named globals.

    Modules of the user's are looked into: what of them is named anywhere, and then one too many may
    be followed. The path of a global, with a slash in front, does not depend on the function.
    """
    code = function.__code__
    if not is_own_file(code.co_filename):
        return []
    found = dict(vars(function))
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    names = tuple(names_in(code))
    for name in _globals_in(code):
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and _is_own(value):
            within = vars(value)
            found |= {f"/{value.__name__}/{n}": within[n] for n in names if n in within}
        elif value is not None:
            found[f"/{function.__module__}/{name}"] = value
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*found.items(), *((f"default_{i}", value) for i, value in enumerate(defaults))]


@functools.lru_cache(maxsize=4096)
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Names the globals that code reads or writes: no attributes, which may be called the same."""
    found = {
        instruction.argval: None
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_globals_in(constant))
    return tuple(found)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yields the names that a function and those that are defined in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _is_own(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and is_own_file(str(file))


@functools.lru_cache(maxsize=4096)
def is_own_file(name: str) -> bool:
    """Whether a source file is the user's own: of no library, and not made by AutoGraph."""
    return not any(part in name for part in _NOT_OURS)


def variable_name(variable: Any) -> str:
    """Returns ``dense/kernel`` for a Keras variable, the plain name for a tf.Variable."""
    return getattr(variable, "path", None) or variable.name.split(":")[0]
