"""What hooks may return wrongly, and how a message says what it was."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from ctl_core.compat import flatten_layers
from ctl_core.errors import SetupError
from ctl_core.hooks import Hook, describe
from ctl_core.model.variables import variable_name, walk


def kind_of(value: Any) -> str:
    """Says what a value is, for a message that expected something else."""
    if value is None:
        return "nothing"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'aeiou')} {name}"


def something(hook: Hook, value: Any, arguments: Mapping[str, Any]) -> Any:
    """Returns what a hook returned, unless that is nothing.

    Raises:
        SetupError: it is.
    """
    if value is not None:
        return value
    nobodys = "objective" in hook.arguments and arguments.get("objective") is None
    of_turns = "; in an evaluation it is nobody's turn, and objective is None" * nobodys
    raise hook.reject(f"returned nothing; is a return missing{of_turns}?")


def expect(values: Any, names: tuple[str, ...], where: str) -> tuple[Any, ...]:
    """Checks that a hook returned as many values as it should.

    Raises:
        SetupError: it did not.
    """
    if isinstance(values, tuple | list) and len(values) == len(names):
        return tuple(values)
    got = f"{len(values)} values" if isinstance(values, tuple | list) else kind_of(values)
    raise SetupError(f"{where}: returned {got}, expected {len(names)}: {', '.join(names)}.")


def check_update(update: Any, variables: list[Any], where: str) -> None:
    """Refuses update_gradients that do not fit the variables."""
    if not isinstance(update, list | tuple):
        raise SetupError(f"{where}: update_gradients must be a list, got {kind_of(update)}.")
    if len(update) != len(variables):
        raise SetupError(
            f"{where}: returned {len(update)} update_gradients for {len(variables)} gradients; "
            "return one for each, in the same order."
        )
    for gradient, variable in zip(update, variables, strict=True):
        shape = getattr(gradient, "shape", None)
        if shape is not None and not shape.is_compatible_with(tuple(variable.shape)):
            raise SetupError(
                f"{where}: the gradient of {variable_name(variable)} has shape {shape}, expected "
                f"that of the variable, {tuple(variable.shape)}."
            )
        if kind := without_gradient_kind(gradient):
            raise SetupError(
                f"{where}: the gradient of {variable_name(variable)} has type {kind}, expected "
                "floating-point numbers."
            )


def without_gradient_kind(value: Any) -> str | None:
    """Returns the type of a variable or a gradient if it is no floating-point one."""
    dtype = tf.as_dtype(getattr(value, "dtype", tf.float32))
    return dtype.name if dtype.is_integer or dtype.is_bool else None


def names_of(names: Any) -> str:
    return ", ".join(f"'{name}'" if name else "(a single one)" for name in names)


def checked_weight(hook: Hook, value: Any) -> tf.Tensor:
    """Returns what ``batch_weight`` returned as a floating-point scalar without a gradient.

    Raises:
        SetupError: it is something else than one number from 0 up.
    """
    try:
        weight = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        weight = None
    real = weight is not None and (weight.dtype.is_floating or weight.dtype.is_integer)
    scalar = real and weight.shape.rank in (0, None)
    fixed = tf.get_static_value(weight) if scalar else None
    if not scalar or (fixed is not None and not fixed >= 0):
        got = kind_of(value) if weight is None else describe(weight) if fixed is None else fixed
        raise hook.reject(
            f"returned {got}, expected how much the batch weighs, one number from 0 up, such as "
            "tf.reduce_sum(mask)."
        )
    weight = tf.stop_gradient(tf.ensure_shape(weight, []))
    return weight if weight.dtype in (tf.float32, tf.float64) else tf.cast(weight, tf.float32)


BAD_WEIGHT = "ctl_core: the weight of a batch"


def assert_weights(step: tf.Tensor, weights: tf.Tensor) -> tf.Operation:
    """Asserts, while a graph is running, that a step's batches weigh something.

    ``bad_weight`` reads the message.

    Args:
        step: the number of the step
        weights: what a replica's batch weighs, and the sum of what ``not_negative`` returns for
            each
    """
    return tf.debugging.Assert(weights[1] > 0, [BAD_WEIGHT, step, weights[0], weights[1]])


def not_negative(weight: tf.Tensor) -> tf.Tensor:
    """Returns a weight, NaN if it is negative, so that the sum over replicas tells."""
    # Without a NaN in the graph, at which ``detect_anomaly`` would end training.
    return weight * tf.sqrt(tf.sign(weight))


def bad_weight(text: str) -> str | None:
    """Says what was wrong with a weight, if the text of a failed op is about one."""
    found = re.search(rf"{BAD_WEIGHT}\W+(\d+)\W+?(-?[\w.]+)\]\W+?(-?[\w.]+)\]", text)
    if found is None:
        return None
    step, own, total = found[1], float(found[2]), float(found[3])
    what = f"is {own:g}" if not own >= 0 else f"of all replicas is {total:g}"
    return f"the weight of step {step} {what}; expected a number above 0"


def checked_loss(create_loss: Hook, loss: Any, examples: Any) -> tf.Tensor:
    """Returns a loss as a tensor: a scalar, or one number for each of so many examples.

    Raises:
        SetupError: it has another shape or type.
    """
    try:
        loss = tf.convert_to_tensor(loss)
    except (TypeError, ValueError):
        raise create_loss.reject(
            f"the loss is {kind_of(loss)}; expected one number per example, or their sum."
        ) from None
    rank = loss.shape.rank
    length = loss.shape[0] if rank == 1 else None
    wrong_length = isinstance(examples, int) and length is not None and length != examples
    if rank not in (0, 1, None) or wrong_length or not loss.dtype.is_floating:
        raise create_loss.reject(
            f"the loss has shape {loss.shape} and "
            f"type {loss.dtype.name}; expected floating-point numbers, one per example "
            f"(shape [{examples if isinstance(examples, int) else 'batch'}]) or their sum (shape "
            "[]); sum or average over the other dimensions in create_loss. What the sum is divided "
            "by, if not by the examples, is for the hook batch_weight to say."
        )
    return loss


def checked_extra(
    create_model: Hook, model: Any, extra_loss: Any, dtype: tf.DType, where: str
) -> tf.Tensor:
    """Returns an extra loss as a scalar of a type.

    Raises:
        SetupError: it has another shape; a layer is named that has added a loss of such a shape.
    """
    extra = tf.cast(tf.convert_to_tensor(extra_loss, dtype_hint=dtype), dtype)
    if extra.shape.rank in (0, None):
        return extra
    layers = [layer for item in walk(model) for layer in flatten_layers(item)]
    for layer in reversed(layers):  # the inner ones first
        for added in layer.losses:
            if tf.is_tensor(added) and added.shape.rank not in (0, None):
                raise create_model.reject(
                    f"the layer {layer.path} adds a loss of shape {added.shape} by add_loss; "
                    "expected one number, such as the mean over its batch: "
                    "self.add_loss(tf.reduce_mean(loss))."
                )
    raise SetupError(f"{where}: extra_loss must be a scalar, got shape {extra.shape}.")


def checked_objectives(
    grad_pre: Hook, result: Any, optimizers: dict[str, Any], objective: str | None = None
) -> Iterator[tuple[str, str, tuple[Any, Any, Any, dict[str, Any]]]]:
    """Goes over what ``grad_pre`` returned, one objective after the other.

    Args:
        grad_pre: the hook
        result: what it returned
        optimizers: by objective
        objective: whose turn it is; then it is the only one, and others are left out

    Yields:
        The objective's name, "" for a single one; what to call it in a message; and loss_per_batch,
        extra_loss, trainable_vars and the parts of the loss by name.

    Raises:
        SetupError: there is no such objective, something else than these three, or no variable.
    """
    named = result if isinstance(result, dict) else {objective or "": result}
    if objective is not None:
        if objective not in named:
            raise grad_pre.reject(
                f"returned the objectives {names_of(named)} in the turn of '{objective}'; return "
                f"those three for '{objective}'."
            )
        named = {objective: named[objective]}
    elif set(named) != set(optimizers):
        raise grad_pre.reject(
            f"returned the objectives {names_of(named)}, but create_opt the optimizers "
            f"{names_of(optimizers)}; the names must be the same."
        )
    some = False
    for name, values in named.items():
        where = f"{grad_pre}['{name}']" if name else str(grad_pre)
        names = ("loss_per_batch", "extra_loss", "trainable_vars")
        parts: Any = {}
        if isinstance(values, tuple | list) and len(values) == 4:
            *values, parts = values
        loss, extra, variables = expect(values, names, where)
        if not isinstance(parts, dict) or not all(isinstance(key, str) for key in parts):
            raise SetupError(
                f"{where}: the fourth value must be a dict of the loss's parts by name, got "
                f"{kind_of(parts)}."
            )
        if not isinstance(variables, list | tuple):
            raise SetupError(
                f"{where}: trainable_vars must be a list of variables, got {kind_of(variables)}."
            )
        for variable in variables:
            if kind := without_gradient_kind(variable):
                raise SetupError(
                    f"{where}: trainable_vars has {variable_name(variable)} of type {kind}, which "
                    "has no gradient; leave it out."
                )
        some = some or bool(variables)
        yield name, where, (loss, extra, variables, parts)
    if not some and objective is None:
        raise grad_pre.reject("returned no trainable_vars; there is nothing to train.")
