"""What hooks may return wrongly, and how a message says what it was."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ctl_core.errors import SetupError
from ctl_core.run_state.tracking import variable_name


def kind_of(value: Any) -> str:
    """Says what a value is, for a message that expected something else."""
    if value is None:
        return "nothing"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'aeiou')} {name}"


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
