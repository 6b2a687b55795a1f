"""Finds the values that differ between one device and several, and describes their causes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ctl_core.commands.observation import (
    EVAL_LOSS,
    EXTRA_LOSS,
    GRADIENT,
    LOGGED,
    LOSS,
    ORDER,
    UPDATE,
    Array,
    Kind,
    Observations,
    ValueKey,
    Values,
)
from ctl_core.compat import FunctionGraph
from ctl_core.hooks.hooks import Hook
from ctl_core.model.state import State
from ctl_core.numerics.variables import unwrap

TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 3e-2
# The kinds of values that are proportional to the loss.
OF_LOSS = (EXTRA_LOSS, LOSS, LOGGED, EVAL_LOSS)
# The dtypes of weights and gradients whose rounding errors are larger than ``TOLERANCE``.
_LOW_PRECISION = (np.dtype(np.float16), np.dtype(tf.bfloat16.as_numpy_dtype))
# Rounding errors may be larger than those that were measured, by up to this factor.
_ROUNDING_FACTOR = 4


class Measurement(NamedTuple):
    """The state and the values of a run on a certain number of devices.

    Attributes:
        state: the state of the run
        graph: the graph of a training step, with noise if there is any
        observations: the observed values
        adding_layers: the layers that call ``add_loss``
    """

    state: State
    graph: FunctionGraph
    observations: Observations
    adding_layers: list[str]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that differs between one device and another measurement.

    Attributes:
        kind: the kind of the value
        name: the name of the value; empty if it is the only value of its kind
        on_one: the first number that differs, or the shape, on one device
        elsewhere: the same number, or the shape, in the other measurement
    """

    kind: Kind
    name: str
    on_one: str
    elsewhere: str


def find_differences(
    expected: Measurement, actual: Measurement, rounded: Measurement | None = None
) -> list[Difference]:
    """Returns the values that differ from those of one device, the most probable cause first.

    For each value, only the first step in which it differs is reported. If any value differs before
    the last step, the last step is ignored, because all values differ after a wrong update.

    Args:
        expected: the measurement on one device
        actual: the measurement to compare
        rounded: a measurement on one device that rounds coarsely. Differences that are not larger
            than those of this measurement may be rounding errors, and are left out.
    """
    tolerance = TOLERANCE
    if expected.state.computed_in:
        tolerance = LOW_PRECISION_TOLERANCE
    expected_steps, expected_evaluation = expected.observations
    actual_steps, actual_evaluation = actual.observations
    rounded_steps, rounded_evaluation = (rounded or expected).observations
    steps = list(zip(expected_steps, actual_steps, rounded_steps, strict=False))
    differences: dict[ValueKey, Difference] = {}
    for number, (expected_values, actual_values, rounded_values) in enumerate(steps):
        if differences and number == len(steps) - 1:
            break
        gradient_tolerance = tolerance
        if number > 0:
            # Only the first step has equal weights and no noise. In later steps, rounding may flip
            # the decision of a ReLU or a maximum, which changes gradients more than outputs.
            gradient_tolerance = 10 * tolerance
        for difference in compare_values(
            expected_values, actual_values, rounded_values, tolerance, gradient_tolerance
        ):
            differences.setdefault((difference.kind, difference.name), difference)
        if has_only_rounding(expected_values, rounded_values):
            break  # an optimizer such as Adam would amplify rounding errors to whole steps
    of_steps = sorted(differences.values(), key=lambda difference: ORDER.index(difference.kind))
    of_evaluation = compare_values(
        expected_evaluation, actual_evaluation, rounded_evaluation, tolerance, tolerance
    )
    return [*of_steps, *of_evaluation]


def compare_values(
    expected: Values, actual: Values, rounded: Values, tolerance: float, gradient_tolerance: float
) -> list[Difference]:
    """Returns the values that differ by more than rounding, see ``find_pair``."""
    least = {kind: find_largest_of_kind(expected, kind) for kind in (GRADIENT, UPDATE)}
    least |= dict.fromkeys(OF_LOSS, 0.0)  # the unit of a loss is arbitrary
    differences = []
    skips_updates = has_only_rounding(expected, rounded)
    for (kind, name), (expected_array, *_) in expected.items():
        if kind is UPDATE and skips_updates:
            continue
        relative = gradient_tolerance if kind in (GRADIENT, UPDATE) else tolerance
        if expected_array.dtype in _LOW_PRECISION:
            relative = max(relative, LOW_PRECISION_TOLERANCE)
        largest = max(find_largest(expected_array), least.get(kind, 1.0))
        rounding = find_rounding(expected_array, rounded.get((kind, name), []))
        for array in actual.get((kind, name), []):
            pair = find_pair(expected_array, array, max(relative * largest, rounding))
            if pair is not None:
                differences.append(Difference(kind, name, *pair))
                break
    return differences


def has_only_rounding(expected: Values, rounded: Values) -> bool:
    """Returns whether the gradients of a step consist of rounding errors."""
    errors = [
        find_rounding(array, rounded.get(key, []))
        for key, (array, *_) in expected.items()
        if key[0] is GRADIENT
    ]
    return max(errors, default=0.0) > find_largest_of_kind(expected, GRADIENT)


def find_rounding(expected: Array, rounded: list[Array]) -> float:
    """Returns the largest difference that rounding can make; 0 if it was not measured."""
    if isinstance(expected, tf.RaggedTensor):
        return 0.0
    changes = [
        find_largest(cast_up(array) - cast_up(expected))
        for array in rounded
        if isinstance(array, np.ndarray)
        and array.shape == expected.shape
        and expected.dtype != bool
    ]
    return _ROUNDING_FACTOR * max(changes, default=0.0)


def cast_up(array: np.ndarray) -> np.ndarray:
    """Returns an array of numbers in float64 or complex128."""
    return array.astype(np.result_type(array.dtype, np.float64))


def find_pair(expected: Array, actual: Array, rounding: float) -> tuple[str, str] | None:
    """Returns the first two numbers that differ, or the two shapes; None if the arrays agree.

    Integers have to be equal. The difference of other numbers may be at most ``rounding``. For
    ragged tensors, only the shapes are compared.
    """
    if tuple(expected.shape) != tuple(actual.shape):
        return f"shape {tuple(expected.shape)}", f"shape {tuple(actual.shape)}"
    if isinstance(expected, tf.RaggedTensor) or isinstance(actual, tf.RaggedTensor):
        return None
    if np.issubdtype(expected.dtype, np.integer) or expected.dtype == bool:
        rounding = 0.0
    else:
        expected = cast_up(expected)
        actual = cast_up(actual)
    equal = np.isclose(expected, actual, rtol=0, atol=rounding, equal_nan=True)
    if equal.all():
        return None
    first = tuple(np.argwhere(~equal)[0])
    return f"{expected[first]:.6g}", f"{actual[first]:.6g}"


def find_largest_of_kind(values: Values, kind: Kind) -> float:
    """Returns the largest absolute value in the arrays of a kind; 0 if there are none."""
    arrays = (components[0] for key, components in values.items() if key[0] is kind)
    return max(
        (find_largest(array) for array in arrays if isinstance(array, np.ndarray)), default=0.0
    )


def find_largest(array: Array) -> float:
    """Returns the largest absolute value of an array; NaN counts as 0."""
    if isinstance(array, tf.RaggedTensor):
        return find_largest(array.flat_values.numpy())
    return float(np.nan_to_num(np.abs(array)).max(initial=0))


def describe_differences(
    measurement: Measurement, differences: Iterable[Difference], where: str
) -> list[str]:
    """Returns a line for each kind of difference, with the hook, the values, and how to fix it.

    If a kind of value is computed from another kind that differs, too, its line names no hook.

    Args:
        measurement: the measurement on one device
        differences: the differences
        where: describes the other measurement, for the lines
    """
    by_kind: dict[Kind, list[Difference]] = {}
    for difference in differences:
        by_kind.setdefault(difference.kind, []).append(difference)
    lines = []
    earlier: set[str] = set()
    if GRADIENT in by_kind:  # updates differ because gradients do
        by_kind.pop(UPDATE, None)
    for kind, group in by_kind.items():
        hook = find_blamed(measurement, kind)
        names = describe_names(measurement, kind, group)
        verb = "differs" if len(group) == 1 else "differ"
        pair = f"[one device {group[0].on_one}, {where} {group[0].elsewhere}]"
        if not earlier.isdisjoint(kind.follows):
            lines.append(f"{names} {verb}, too, which may follow from the above {pair}")
        else:
            lines.append(f"{hook}: {names} {verb}: {kind.cure} {pair}")
        earlier.add(kind.noun)
    return lines


def find_blamed(measurement: Measurement, kind: Kind) -> Hook:
    """Returns the hook that is the most probable cause of a kind of difference."""
    hooks = measurement.state.hooks
    if kind is EXTRA_LOSS and measurement.adding_layers:
        return hooks.create_model
    components = measurement.state.components
    leaves_loss = components.optimizers.keys() == components.unchanged_losses
    for name in kind.hooks[:-1]:
        hook: Hook = getattr(hooks, name)
        # A grad_pre that returns the loss unchanged cannot be the cause.
        is_innocent = name == "grad_pre" and kind is not EXTRA_LOSS and leaves_loss
        if not hook.is_default and not is_innocent:
            return hook
    last: Hook = getattr(hooks, kind.hooks[-1])
    return last


def describe_names(measurement: Measurement, kind: Kind, group: list[Difference]) -> str:
    """Returns the noun of a kind, with the names of the first three values that differ."""
    state = measurement.state
    names = [
        f"{difference.name}{describe_layer(state, difference.name)}" for difference in group[:3]
    ]
    noun = kind.noun
    if len(group) > 1:
        noun += "s"
    described = f"the {noun} {', '.join(names)}".rstrip(" ,")
    if len(group) > len(names):
        described += f" and {len(group) - len(names)} more"
    if kind is EXTRA_LOSS and measurement.adding_layers:
        described += f" (add_loss of the layer {', '.join(measurement.adding_layers)})"
    return described


def describe_layer(state: State, name: str) -> str:
    """Describes the innermost layer that a variable belongs to; returns "" if there is none.

    Args:
        state: the state of the run
        name: the name of the variable
    """
    variable = state.recording.variables.get(name)
    if variable is None:
        return ""
    holders = [
        layer
        for layer in state.recording.layers
        if any(unwrap(held) is variable for held in layer.variables)
    ]
    if not holders:
        return ""
    layer = min(holders, key=lambda layer: len(layer.variables))
    return f" of the layer '{layer.name}' ({type(layer).__name__})"
