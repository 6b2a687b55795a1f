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


def _is_given(value: Any) -> bool:
    return value is not None


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "apply_gradients") and not isinstance(value, type)


def _are_optimizers(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(map(_is_optimizer, value.values()))
    return is_pairs(value) or _is_optimizer(value)


def _are_metrics(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(name, str) and name != "loss" for name in value)
        and all(isinstance(metric, keras.Metric) for metric in value.values())
    )


def _is_number(value: Any) -> bool:
    if tf.is_tensor(value):
        return value.shape.rank in (0, None) and (value.dtype.is_floating or value.dtype.is_integer)
    return isinstance(value, numbers.Real)


def _is_count(value: Any) -> bool:
    """Whether a value is a whole number, or None, which stands for a single example."""
    whole = value.dtype.is_integer if tf.is_tensor(value) else isinstance(value, numbers.Integral)
    return value is None or (_is_number(value) and whole)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _is_update(value: Any) -> bool:
    return _is_pair(value) and isinstance(value[0], tuple | list)


def _is_saved(value: Any) -> bool:
    kinds = (tf.train.Checkpoint, tf.train.CheckpointManager)
    return _is_pair(value) and all(map(isinstance, value, kinds))


def _is_objective(value: Any) -> bool:
    """Whether a value is a loss, an extra loss and variables, perhaps with the loss's parts."""
    if not isinstance(value, tuple | list) or len(value) not in (3, 4):
        return False
    return isinstance(value[2], tuple | list) and (len(value) == 3 or isinstance(value[3], dict))


def _are_objectives(value: Any) -> bool:
    return all(map(_is_objective, value.values() if isinstance(value, dict) else [value]))


CONTRACT: dict[str, Callable[[Any], bool]] = {
    "count_examples": _is_count,
    "create_model": _is_function,
    "create_eval_model": _is_function,
    "create_inference_model": _is_function,
    "serve": _is_given,
    "create_loss": _is_function,
    "create_opt": _are_optimizers,
    "create_ckpt": _is_saved,
    "input_pre": _is_given,
    "loss_pre": _is_given,
    "batch_weight": _is_number,
    "grad_pre": _are_objectives,
    "update_pre": _is_update,
    "create_train_metrics": _are_metrics,
    "train_metric_pre": _is_given,
    "create_metrics": _are_metrics,
    "metric_pre": _is_given,
    "eval_pre": _is_pair,
}
