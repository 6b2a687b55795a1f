"""What hooks return that would train another model than it seems: refused, in one line.

What is not even of the right kind is refused when a hook is called, see hooks/load.py.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from ctl_core.compat import max_to_keep
from ctl_core.hooks.hooks import Hook, Hooks, describe
from ctl_core.numerics.groups import OptimizerGroups
from ctl_core.numerics.variables import variable_name
from ctl_core.run.errors import SetupError, frames_of

# ---- Of the create hooks -------------------------------------------------------------------------


def check_loss(hook: Hook, loss: Any) -> None:
    """Refuses a Keras loss that averages, and what cannot be called with one argument."""
    if getattr(loss, "reduction", None) not in ("sum", "none", None):
        raise hook.reject(
            f"{type(loss).__name__} has the reduction '{loss.reduction}', an average over one "
            "replica's batch; the engine divides by the global batch size itself, so give it "
            'reduction="sum" or reduction="none".'
        )
    try:  # a decorated function is what the decorator has made of it
        signature = inspect.signature(loss, follow_wrapped=False)
    except ValueError:  # not written in Python
        return
    training = {"training": True} if "training" in signature.parameters else {}
    try:
        signature.bind(None, **training)
    except TypeError:
        raise hook.reject(
            f"returned a loss of {signature}, but train_loss is called with one argument, what "
            "loss_pre returns, by default the pair (output, target): return lambda pair: "
            "loss(pair[1], pair[0])."
        ) from None


def check_optimizers(
    hooks: Hooks, optimizers: Mapping[str, Any], objectives: Iterable[str], accumulate_steps: int
) -> None:
    """Refuses optimizers, by objective, that would be stepped wrongly, or by no objective."""
    for optimizer in optimizers.values():
        members = optimizer if isinstance(optimizer, OptimizerGroups) else [optimizer]
        if any(isinstance(one, keras.optimizers.LossScaleOptimizer) for one in members):
            raise hooks.create_opt.reject(
                "returned a LossScaleOptimizer, but nothing here scales the loss for it; return "
                "its inner_optimizer: precision: float16 does both."
            )
    if {*objectives} != {*optimizers}:
        raise hooks.create_opt.reject(
            f"returned the optimizers {list(optimizers)}, but {hooks.grad_pre} the objectives "
            f"{list(objectives)}{', in turns' * bool(hooks.turns)}; the names must be the same, "
            "or '' for a single one without."
        )
    if hooks.turns and accumulate_steps > 1:
        raise SetupError(
            f"accumulate_steps: {accumulate_steps} micro-batches cannot go with turns, in which "
            "several updates are made on one batch; leave one of the two out."
        )


def check_variables(hooks: Hooks, variables: Mapping[str, Mapping[int, Any]]) -> None:
    """Refuses objectives without variables, and variables whose updates get lost."""
    for name in variables:
        if not variables[name]:
            raise hooks.grad_pre.reject(
                f"returned no trainable_vars{f' of {name!r}' * bool(name)}: nothing to train."
            )
    for variable in itertools.chain(*(several.values() for several in variables.values())):
        what = ""
        if tf.as_dtype(variable.dtype) == tf.float16:
            what = "trained in float16, in which most updates are lost; use mixed_float16"
        if getattr(variable, "overwrite_with_gradient", False):  # by quantize("float8")
            what = "overwritten with its gradient, which replicas cannot sum"
        if what:
            raise hooks.create_model.reject(f"the variable {variable_name(variable)} is {what}.")


def check_manager(hook: Hook, manager: tf.train.CheckpointManager) -> None:
    """Refuses a manager that leaves no checkpoint if a process is killed while saving."""
    if max_to_keep(manager) == 1:
        raise hook.reject(
            "max_to_keep=1 deletes the only checkpoint before the next is whole; keep 2 or more."
        )


# ---- Of the hooks of a step ----------------------------------------------------------------------


def count_examples(hook: Hook, batch: Any) -> Any:
    """Returns how many examples a batch holds.

    Returns:
        A number where it is fixed, otherwise a scalar int64 tensor; None for a single example.
    """
    number = hook.in_graph(batch=batch)
    if number is None:
        return None
    static = tf.get_static_value(tf.convert_to_tensor(number))
    return tf.cast(number, tf.int64) if static is None else int(static)


def read_weight(value: Any) -> tf.Tensor:
    """Returns what ``batch_weight`` returned as a floating-point scalar without a gradient.

    A negative one would turn gradients round: it becomes NaN, which makes the loss NaN.
    """
    weight = tf.stop_gradient(tf.ensure_shape(tf.convert_to_tensor(value), []))
    if weight.dtype not in (tf.float32, tf.float64):
        weight = tf.cast(weight, tf.float32)
    return tf.where(weight < 0, tf.constant(math.nan, weight.dtype), weight)


def check_loss_value(create_loss: Hook, loss: Any, examples: Any) -> tf.Tensor:
    """Returns a loss as a tensor: a scalar, or one number for each of so many examples.

    Raises:
        SetupError: it has another shape or type.
    """
    loss = tf.convert_to_tensor(loss)
    shape = [examples if isinstance(examples, int) else None]
    fits = loss.shape.rank == 0 or loss.shape.is_compatible_with(shape)
    if not fits and (op := find_broadcast(loss)) is not None:
        shapes = " and ".join(str(value.shape.as_list()) for value in op.inputs)
        raise SetupError(
            f"{create_loss.locate(frames_of(op))}: {op.type} of the shapes {shapes} compares each "
            "example with every other; give both one shape, by tf.squeeze(output, -1), say."
        )
    if not fits or not loss.dtype.is_floating:
        raise create_loss.reject(
            f"the loss is {describe(loss)}; expected floating-point numbers, one per example "
            f"(shape [{shape[0] or 'batch'}]) or their sum (shape []); batch_weight says what it "
            "is divided by, if not by the number of examples."
        )
    return loss


def find_broadcast(loss: tf.Tensor) -> Any:
    """Returns the op, of those just before a loss, that has made [b, b] of [b, 1] and [b]."""
    waiting = [loss.op] if hasattr(loss, "graph") else []
    for _ in range(50):
        if not waiting:
            break
        op = waiting.pop(0)
        ranks = [value.shape.rank for value in op.inputs]
        if None not in ranks and sorted(ranks) == [1, 2]:
            row, column = sorted((value.shape for value in op.inputs), key=len)
            if column.as_list() == [*row.as_list(), 1]:
                return op
        waiting += [value.op for value in op.inputs]
    return None


def read_extra_loss(extra_loss: Any, dtype: tf.DType, hook: Hook) -> tf.Tensor:
    """Returns an extra loss as a scalar of a type.

    Raises:
        SetupError: it has another shape.
    """
    extra = tf.cast(tf.convert_to_tensor(extra_loss, dtype_hint=dtype), dtype)
    if extra.shape.rank not in (0, None):
        raise hook.reject(
            f"extra_loss must be a scalar, got shape {extra.shape}; so must what layers add by "
            "add_loss, such as the mean over a batch."
        )
    return extra


def split_objectives(
    grad_pre: Hook, returned: Any, objective: str | None
) -> dict[str, tuple[Any, Any, Any, dict[str, Any]]]:
    """Returns loss_per_batch, extra_loss, trainable_vars and parts of the loss by objective.

    Args:
        grad_pre: the hook
        returned: what it returned
        objective: whose turn it is; then it is the only one, and others are left out

    Raises:
        SetupError: that one is missing.
    """
    named = returned if isinstance(returned, dict) else {objective or "": returned}
    if objective is not None:
        if objective not in named:
            raise grad_pre.reject(f"returned {list(named)} in the turn of '{objective}'.")
        named = {objective: named[objective]}
    return {name: (*values, {})[:4] for name, values in named.items()}


def check_update(hook: Hook, update: Any, variables: list[Any]) -> None:
    """Refuses an update that is not one gradient for each variable, in its shape."""
    shapes = [getattr(gradient, "shape", None) for gradient in update]
    fitting = [
        shape is None or shape.is_compatible_with(tuple(variable.shape))
        for shape, variable in zip(shapes, variables, strict=False)
    ]
    if len(update) != len(variables) or not all(fitting):
        raise hook.reject(
            f"returned {len(update)} update_gradients of the shapes {shapes} for "
            f"{len(variables)} gradients; return one for each, of its shape, in the same order."
        )
