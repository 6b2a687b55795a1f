"""Variables of models, whatever a model is made of: Keras layers, modules, functions.

They are float32 in every precision, as are losses, gradients and updates.
"""

import collections
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


def unwrap(variable: Any) -> Any:
    """Returns the tf.Variable of a Keras variable; anything else as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def name_variable(variable: Any) -> str:
    """Returns ``dense/kernel`` for a Keras variable, the plain name for a tf.Variable."""
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def create_scalar(value: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """Creates a variable that is not trained, and is the same on all replicas."""
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(value, dtype=dtype, trainable=False, name=name, aggregation=first)


def is_summed(variable: Any) -> bool:
    """Returns whether each replica keeps a variable for itself, as metrics do."""
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ
    )


@tf.autograph.experimental.do_not_convert  # which would take a third of a second
def trainable_variables(model: Any) -> list[Any]:
    """Returns the variables of a model that are trained: those of frozen layers are left out.

    Of an object or a function, these are those of the Keras layers that it holds, and tf.Variables.
    """
    found: dict[int, Any] = {}
    for item in walk(model):
        if isinstance(item, keras.Layer):
            found |= {id(unwrap(v)): v for v in item.trainable_variables}
        elif item.trainable and item.dtype.is_floating:
            found.setdefault(id(item), item)
    return list(found.values())


def make_trackable(value: Any) -> Any:
    """Returns a value that a ``tf.train.Checkpoint`` can hold.

    That is the value itself if possible. In place of a function or a plain object, it is a module
    with the layers and variables in it.
    """
    try:
        tf.train.Checkpoint(value=value)
    except ValueError:
        holder = tf.Module()
        holder.parts = list(walk(value))
        return holder
    return value


@tf.autograph.experimental.do_not_convert
def regularization(model: Any) -> Any:
    """Returns the sum of a model's regularisation and ``add_loss`` terms, a scalar."""
    layers = [item for item in walk(model) if isinstance(item, keras.Layer)]
    losses = [loss for layer in layers for loss in layer.losses]
    if not isinstance(model, keras.Layer):
        losses += getattr(model, "losses", [])
    return sum(map(cast_to_float32, losses))


def cast_to_float32(structure: Any) -> Any:
    """Casts the float16 and bfloat16 tensors of a structure, ragged ones too, to float32."""

    def cast(part: Any) -> Any:
        is_lower = tf.is_tensor(part) and part.dtype in (tf.float16, tf.bfloat16)
        return tf.cast(part, tf.float32) if is_lower else part

    return tf.nest.map_structure(cast, structure)


def walk(model: Any) -> Iterator[Any]:
    """Yields the outermost Keras layers and the tf.Variables in a model, or what it encloses."""
    seen: dict[int, Any] = {}
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
            waiting.extend(vars(item).values() if hasattr(item, "__dict__") else ())


def _is_of_library(item: Any) -> bool:
    if isinstance(item, type | types.ModuleType):
        return True
    return type(item).__module__.split(".")[0] in {"builtins", "keras", "numpy", "tensorflow"}
