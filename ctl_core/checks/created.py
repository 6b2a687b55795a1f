"""What the create hooks return: refused here where it cannot train, before anything is trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checks.returned import kind_of
from ctl_core.compat import max_to_keep
from ctl_core.errors import SetupError
from ctl_core.helpers import sample_weight
from ctl_core.hooks import Hook, Hooks
from ctl_core.model.variables import variable_name
from ctl_core.numerics.groups import OptimizerGroups
from ctl_core.settings import nearest
from ctl_core.types import Loss


def create_callable(hook: Hook, what: str, **values: Any) -> Any:
    made = hook(**values)
    if not callable(made) or isinstance(made, type):
        raise hook.reject(f"returned {kind_of(made)}, expected {what}, a callable.")
    return made


def check_loss(hook: Hook, loss: Loss) -> None:
    """Refuses a loss that is to be called with two arguments, or a Keras loss that averages."""
    if not isinstance(loss, keras.losses.Loss):
        needed = needed_arguments(loss)
        if len(needed) > 1:
            raise hook.reject(
                f"returned a function of {' and '.join(needed)}, but train_loss is called with one "
                "argument, what loss_pre returns, by default the pair (output, target): let it "
                "take one, and begin with output, target = pair."
            )
        return
    said = f"{hook}: {type(loss).__name__}"
    if loss.reduction not in ("sum", "none", None):  # over a replica's batch it cannot be right
        raise SetupError(
            f"{said} has the reduction '{loss.reduction}', an average over one replica's batch; "
            'the engine divides by the global batch size itself, so give it reduction="sum" or '
            'reduction="none".'
        )
    if type(loss).__call__ is keras.losses.Loss.__call__:
        raise SetupError(
            f"{said} takes y_true and y_pred, but train_loss is called with one argument, what "
            "loss_pre returns: return lambda pair: loss(pair[1], pair[0])."
        )


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Returns the arguments that a function has to be called with; ``training`` is given by name.

    Of what is not written in Python, none.
    """
    function = getattr(function, "python_function", function)  # of a tf.function
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = getattr(function, "__call__")  # noqa: B004, B009
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        return []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        one.name
        for one in inspect.signature(function, follow_wrapped=False).parameters.values()
        if one.kind in by_position and one.default is one.empty and one.name != "training"
    ]


def check_optimizers(hook: Hook, optimizers: dict[str, Any]) -> None:
    for name, optimizer in optimizers.items():
        if not hasattr(optimizer, "apply_gradients") or isinstance(optimizer, type):
            raise hook.reject(
                f"returned {kind_of(optimizer)}"
                + (f" as '{name}'" if name else "")
                + ", expected an optimizer, a list of pairs (optimizer, variables), or a dict of "
                "optimizers by objective."
            )
        members = optimizer if isinstance(optimizer, OptimizerGroups) else [optimizer]
        if any(isinstance(one, keras.optimizers.LossScaleOptimizer) for one in members):
            raise hook.reject(
                "returned a LossScaleOptimizer, but nothing here "
                "scales the loss for it; return its inner_optimizer: where layers compute in "
                "float16, as by a policy or precision: float16, the engine does both."
            )
    if not optimizers:
        raise hook.reject("returned an empty dict of optimizers.")


def check_turns(hooks: Hooks, optimizers: dict[str, Any], accumulate_steps: int) -> None:
    """Refuses turns that are not those of the objectives, and micro-batches with them.

    Raises:
        SetupError: they are.
    """
    if not hooks.turns:
        return
    there = ", ".join(optimizers)
    if "" in optimizers:
        raise hooks.create_opt.reject(
            "returned one optimizer, but there are turns; return a dict of optimizers by objective."
        )
    for name in hooks.turns:
        if name not in optimizers:
            raise hooks.create_opt.reject(
                f"turns has '{name}', which is no objective{nearest(name, optimizers)} (there: "
                f"{there})."
            )
    for name in optimizers:
        if name not in hooks.turns:
            raise hooks.create_opt.reject(
                f"the objective '{name}' has no turn, so that nothing would train it; add it to "
                "turns."
            )
    if accumulate_steps > 1:
        raise SetupError(
            f"accumulate_steps: {accumulate_steps} micro-batches cannot go with turns, in which "
            "several updates are made on one batch; leave one of the two out."
        )


def check_groups(hook: Hook, optimizers: dict[str, Any], variables: dict[str, list[Any]]) -> None:
    """Refuses parameter groups that lack a variable which is trained, or have it twice."""
    for name, optimizer in optimizers.items():
        if isinstance(optimizer, OptimizerGroups) and (why := optimizer.complaint(variables[name])):
            raise hook.reject(f"{why}; return each variable with one optimizer.")


def check_variables(hook: Hook, variables: dict[str, list[Any]]) -> None:
    """Refuses variables that would not be trained as they should be.

    Of float16, most updates are too small to change them; and those that Keras' optimizers
    overwrite with what it calls their gradient.
    """
    for variable in (variable for several in variables.values() for variable in several):
        if tf.as_dtype(variable.dtype) == tf.float16:
            raise hook.reject(
                f"the variable {variable_name(variable)} is trained in "
                "float16, in which most updates are lost; use the policy mixed_float16, or "
                "precision: float16, which keep variables in float32."
            )
        if getattr(variable, "overwrite_with_gradient", False):
            raise hook.reject(
                f"the variable {variable_name(variable)} is overwritten with its gradient, as by "
                'quantize("float8"), which sums and clips of gradients would change; leave it '
                "out: precision: bfloat16 computes in less, too."
            )


def check_manager(hook: Hook, ckpt: Any, manager: Any) -> None:
    if not isinstance(ckpt, tf.train.Checkpoint) or not isinstance(
        manager, tf.train.CheckpointManager
    ):
        raise hook.reject(
            f"returned a {type(ckpt).__name__} and a "
            f"{type(manager).__name__}, expected a tf.train.Checkpoint and a "
            "tf.train.CheckpointManager."
        )
    if max_to_keep(manager) == 1:
        raise hook.reject(
            "max_to_keep=1 deletes the only checkpoint before the "
            "next is whole, so that a process killed while saving leaves none; keep 2 or more."
        )


def of_sample_weights(hooks: Hooks, element_spec: Any) -> str | None:
    """Says what the default ``grad_pre`` does where a ``loss_pre`` may have read the weights."""
    own_loss_pre = not hooks.loss_pre.is_default
    if not (hooks.grad_pre.is_default and own_loss_pre):
        return None
    if sample_weight(element_spec) is None:
        return None
    return (
        f"{hooks.grad_pre}: multiplies the loss by the third element of the "
        "batch, as sample weights; if they are in the loss already, or it is something else, write "
        "grad_pre: return loss, regularization(train_model), trainable_variables(train_model)."
    )
