"""Finds the variables of models: of Keras layers, modules, functions and other objects.

Keras variables are float32 with every setting of ``precision``, unless a layer requests another
dtype. So are losses, gradients and updates.
"""

import collections
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.types import Structure, UserObject, Variable


def unwrap(variable: Any) -> Any:
    """Returns the tf.Variable of a Keras variable, and any other value unchanged."""
    if isinstance(variable, keras.Variable):
        return variable.value
    return variable


def name_variable(variable: Variable) -> str:
    """Returns the path of a Keras variable, ``dense/kernel``, or the name of a tf.Variable."""
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def count_elements(variable: Variable) -> int:
    """Returns the number of elements of a variable; at present, if its shape is not fixed."""
    size = variable.shape.num_elements()
    if size is None:
        return int(tf.size(variable))
    return size


def create_scalar(value: float, dtype: tf.DType, name: str) -> tf.Variable:
    """Creates a variable that is not trained and has the same value on all replicas."""
    return tf.Variable(
        value,
        dtype=dtype,
        trainable=False,
        name=name,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def is_summed(variable: Variable) -> bool:
    """Returns whether a variable has a separate value on each replica, as metric variables do."""
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ
    )


# AutoGraph would take a third of a second to convert this function.
@tf.autograph.experimental.do_not_convert
def trainable_variables(model: UserObject) -> list[Variable]:
    """Returns the trainable variables of a model, without those of frozen layers.

    If the model is an object or a function, the result includes the variables of all Keras layers
    that it refers to, and all tf.Variables that it refers to.
    """
    variables: dict[int, Variable] = {}
    for item in walk(model):
        if isinstance(item, keras.Layer):
            variables |= {id(unwrap(variable)): variable for variable in item.trainable_variables}
        elif item.trainable and (item.dtype.is_floating or item.dtype.is_complex):
            variables.setdefault(id(item), item)
    return list(variables.values())


def make_trackable(value: UserObject) -> UserObject:
    """Returns an object that a ``tf.train.Checkpoint`` can save.

    This is the value itself if possible. For a function or a plain object, it is a module that
    contains the layers and variables of the value.
    """
    try:
        tf.train.Checkpoint(value=value)
    except ValueError:
        holder: Any = tf.Module()
        holder.parts = list(walk(value))  # existing checkpoints use this name
        return holder
    return value


@tf.autograph.experimental.do_not_convert
def regularization(model: UserObject) -> tf.Tensor | int:
    """Returns the sum of a model's regularization and ``add_loss`` terms: a scalar, or 0."""
    layers = [item for item in walk(model) if isinstance(item, keras.Layer)]
    losses = [loss for layer in layers for loss in layer.losses]
    if not isinstance(model, keras.Layer):
        losses += getattr(model, "losses", [])
    total: tf.Tensor | int = sum(map(cast_to_float32, losses))
    return total


def cast_to_float32(structure: Structure) -> Structure:
    """Casts float16 and bfloat16 tensors of a structure, including ragged ones, to float32."""
    return tf.nest.map_structure(_cast_entry_to_float32, structure)


def _cast_entry_to_float32(entry: UserObject) -> UserObject:
    if tf.is_tensor(entry) and entry.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(entry, tf.float32)
    return entry


def walk(model: UserObject) -> Iterator[keras.Layer | tf.Variable]:
    """Yields the outermost Keras layers and the tf.Variables in a model.

    The search covers containers, the closures of functions, the objects of methods, and attributes.
    """
    seen: dict[int, UserObject] = {}  # keeps all objects alive, so that their ids stay unique
    waiting = collections.deque([model])
    while waiting:
        item = waiting.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, keras.Layer | tf.Variable):
            yield item
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        elif isinstance(item, types.FunctionType):
            waiting.extend(cell.cell_contents for cell in item.__closure__ or ())
        elif isinstance(item, types.MethodType):
            waiting.extend([item.__self__, item.__func__])
        elif isinstance(item, tf.Module) or not _is_of_library(item):
            waiting.extend(getattr(item, "__dict__", {}).values())


def _is_of_library(item: UserObject) -> bool:
    if isinstance(item, type | types.ModuleType):
        return True
    return type(item).__module__.split(".")[0] in {"builtins", "keras", "numpy", "tensorflow"}
