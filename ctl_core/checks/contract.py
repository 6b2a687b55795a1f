"""What each hook has to return, looked at whenever one is called; a refusal has the table's words.

Mistakes that TensorFlow, Keras or Python refuse by themselves are left to them.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.numerics.groups import is_pairs


def kind_of(value: Any) -> str:
    """Says what a value is, for a message that expected something else."""
    if value is None:
        return "nothing"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} value{'s' * (len(value) != 1)}"
    if tf.is_tensor(value) and not isinstance(value, tf.Variable):
        return describe(value)
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'aeiou')} {name}"


def describe(element: Any) -> str:
    """Writes down the structure of a batch: ``(float32[32, 8, 8], int64[32])``."""
    if isinstance(element, dict):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in element.items()) + "}"
    if isinstance(element, tuple | list):
        return "(" + ", ".join(describe(part) for part in element) + ")"
    if hasattr(element, "dtype") and hasattr(element, "shape"):
        shape = "" if element.shape.rank is None else element.shape.as_list()
        return f"{tf.as_dtype(element.dtype).name}{shape}"
    return type(element).__name__


def is_given(value: Any) -> bool:
    """Whether a hook has returned anything."""
    return value is not None


def is_function(value: Any) -> bool:
    """Whether a value can be called, and is not still to be made of a class."""
    return callable(value) and not isinstance(value, type)


def is_optimizer(value: Any) -> bool:
    """Whether a value applies gradients."""
    return hasattr(value, "apply_gradients") and not isinstance(value, type)


def are_optimizers(value: Any) -> bool:
    """Whether a value is an optimizer, pairs with variables, or a dict of optimizers."""
    several = isinstance(value, dict) and value and all(map(is_optimizer, value.values()))
    return bool(several) or is_pairs(value) or is_optimizer(value)


def are_metrics(value: Any) -> bool:
    """Whether a value is a dict of Keras metrics; ``loss`` is the engine's own."""
    return (
        isinstance(value, dict)
        and all(isinstance(name, str) and name != "loss" for name in value)
        and all(isinstance(metric, keras.Metric) for metric in value.values())
    )


def is_number(value: Any) -> bool:
    """Whether a value is one number, of Python, NumPy or TensorFlow."""
    if tf.is_tensor(value):
        return value.shape.rank in (0, None) and (value.dtype.is_floating or value.dtype.is_integer)
    return isinstance(value, numbers.Real)


def is_count(value: Any) -> bool:
    """Whether a value is a whole number, or None, which stands for a single example."""
    whole = value.dtype.is_integer if tf.is_tensor(value) else isinstance(value, numbers.Integral)
    return value is None or (is_number(value) and whole)


def is_pair(value: Any) -> bool:
    """Whether a value is two."""
    return isinstance(value, tuple | list) and len(value) == 2


def is_update(value: Any) -> bool:
    """Whether a value is a list of gradients, and what is displayed."""
    return is_pair(value) and isinstance(value[0], tuple | list)


def is_saved(value: Any) -> bool:
    """Whether a value is a checkpoint and its manager."""
    kinds = (tf.train.Checkpoint, tf.train.CheckpointManager)
    return is_pair(value) and all(map(isinstance, value, kinds))


def is_objective(value: Any) -> bool:
    """Whether a value is a loss, an extra loss and variables, perhaps with the loss's parts."""
    if not isinstance(value, tuple | list) or len(value) not in (3, 4):
        return False
    parts = value[3] if len(value) == 4 else {}
    return isinstance(value[2], tuple | list) and isinstance(parts, dict)


def are_objectives(value: Any) -> bool:
    """Whether a value is an objective, or a dict of such."""
    return all(map(is_objective, value.values() if isinstance(value, dict) else [value]))


CONTRACT: dict[str, Callable[[Any], bool]] = {
    "count_examples": is_count,
    "create_model": is_function,
    "create_eval_model": is_function,
    "create_inference_model": is_function,
    "serve": is_given,
    "create_loss": is_function,
    "create_opt": are_optimizers,
    "create_ckpt": is_saved,
    "input_pre": is_given,
    "loss_pre": is_given,
    "batch_weight": is_number,
    "grad_pre": are_objectives,
    "update_pre": is_update,
    "create_train_metrics": are_metrics,
    "train_metric_pre": is_given,
    "create_metrics": are_metrics,
    "metric_pre": is_given,
    "eval_pre": is_pair,
}
