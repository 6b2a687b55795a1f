"""The learning rate: a variable that hooks assign, rates computed from it, and its schedule."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from ctl_core.compat import read_rate
from ctl_core.numerics.variables import create_scalar
from ctl_core.run.console import warn
from ctl_core.run.settings import Config
from ctl_core.types import Count, Optimizer

# A value that can be combined with a rate, or assigned to it.
Operand: TypeAlias = "Rate | tf.Tensor | float"
# Two curves are considered equal if they differ by at most this fraction of the full rate.
_ROUNDING = 1e-5


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    """A float32 scalar that works as a tensor and as a number, in arithmetic and in comparisons.

    A Keras optimizer does not accept a tf.Variable as its learning rate, but it accepts a schedule,
    so this class is a schedule. A rate that is computed from another rate and numbers, such as ``lr
    * 0.1``, changes with the other rate.
    """

    __array_priority__ = 100  # makes NumPy use the operators of this class
    dtype = tf.float32

    def __init__(self, compute: Callable[[], tf.Tensor]) -> None:
        """Creates a rate that calls ``compute`` whenever its value is needed."""
        self._compute = compute

    def __call__(self, step: Any = None) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        return tf.cast(self._compute(), tf.float32)

    def get_config(self) -> dict[str, float]:
        """Returns the current value, for a Keras config."""
        return {"value": float(self)}

    @property
    def value(self) -> Rate:
        """The rate itself, so that both ``lr.value`` and ``lr.value()`` work."""
        return self

    def numpy(self) -> np.float32:
        """Returns the value as a NumPy scalar."""
        value: np.float32 = self().numpy()
        return value

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self(), dtype=dtype, name=name)

    def __float__(self) -> float:
        return float(self.numpy())

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({float(self):g})"


def _define_operator(name: str, follows: bool) -> Callable[..., Rate | tf.Tensor]:
    """Returns an operator for rates that works like the operator of tensors with the same name.

    Args:
        name: the name of the method of tf.Tensor
        follows: whether the result is a rate if the other operand is a rate or a number; otherwise,
            the result is always a tensor
    """

    def operate(self: Rate, *operands: Operand) -> Rate | tf.Tensor:
        def compute() -> tf.Tensor:
            values = [operand() if isinstance(operand, Rate) else operand for operand in operands]
            result: tf.Tensor = getattr(tf.Tensor, name)(self(), *values)
            return result

        if follows and all(isinstance(operand, Rate | numbers.Real) for operand in operands):
            return Rate(compute)
        return compute()

    return operate


_ARITHMETIC = [
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
    "__rtruediv__", "__pow__", "__rpow__", "__neg__",
]  # fmt: skip
_COMPARISONS = ["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"]
for _name in _ARITHMETIC:
    setattr(Rate, _name, _define_operator(_name, follows=True))
for _name in _COMPARISONS:
    setattr(Rate, _name, _define_operator(_name, follows=False))


class LearningRate(Rate, tf.Module):
    """The rate that is passed to ``create_opt``; hooks may assign it, and checkpoints save it.

    Attributes:
        variable: the variable that contains the rate, a float32 scalar
        schedule: the schedule that assigns ``variable`` at each step, or None
        is_used: whether ``create_opt`` or a hook of the graph names the argument ``lr``
    """

    def __init__(self, value: float) -> None:
        tf.Module.__init__(self, name="lr")
        self.schedule: RateSchedule | None = None
        self.is_used = True
        self.variable = create_scalar(value, tf.float32, "lr")

    def __call__(self, step: Any = None) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        return tf.convert_to_tensor(self.variable)

    def assign(self, value: Operand) -> None:
        """Sets the value, which the next step uses, and ends the schedule, if there is one."""
        if self.schedule is not None:
            warn("a hook assigned lr, so lr_schedule and warmup no longer apply.")
            self.schedule.active.assign(False)
        self.variable.assign(value)


def make_rate_for_hooks(lr: LearningRate, optimizers: Mapping[str, Optimizer]) -> Rate:
    """Returns the ``lr`` that is passed to hooks: the rate of the first optimizer's next update.

    This is the argument ``lr``, unless no optimizer uses it and the first optimizer has its own
    schedule.
    """
    rates = [read_rate(optimizer) for optimizer in optimizers.values()]
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if any(isinstance(rate, Rate) for rate in rates) or not isinstance(rates[0], schedule):
        return lr
    first: Any = next(iter(optimizers.values()))  # a Keras optimizer, because it has a schedule
    return Rate(lambda: first.learning_rate)


class RateSchedule:
    """The schedule of the settings ``lr_schedule`` and ``warmup``: a warm-up, then a curve.

    Attributes:
        active: a bool variable, which becomes False when a hook assigns ``lr``
        last: the last step, at which the curve ends; it has to be set before steps are traced
    """

    def __init__(self, config: Config, lr: LearningRate) -> None:
        self._config = config
        self._lr = lr
        self.last = 1
        self.active = create_scalar(True, tf.bool, "lr_schedule")
        lr.schedule = self

    def apply(self, step: tf.Tensor) -> None:
        """Assigns ``lr`` for a step. Runs in a graph, in a cross-replica context.

        Args:
            step: the number of the step, an int64 scalar; the first step has the number 1
        """
        rate = self._config.learning_rate * self._compute_fraction(step)
        self._lr.variable.assign(tf.where(self.active, rate, self._lr.variable))

    def describe_jump(self, step: int, learning_rate: float) -> str | None:
        """Describes the jump of the learning rate in a resumed run whose curve has changed.

        The whole curve depends on the last step, so it changes if a run is extended beyond its
        original last step.

        Args:
            step: the last step that was taken; ``lr`` still has the rate of this step
            learning_rate: the setting ``learning_rate`` with which this step was taken

        Returns:
            A line for the user; None if the rate of ``step`` is the same on the new curve.
        """
        config = self._config
        rate = float(self._lr)
        expected = learning_rate * float(self._compute_fraction(step))
        is_same_curve = abs(rate - expected) <= _ROUNDING * learning_rate
        if is_same_curve or config.lr_schedule == "constant" or not bool(self.active):
            return None
        next_rate = config.learning_rate * float(self._compute_fraction(step + 1))
        return (
            f"lr jumps from {rate:.3g} to {next_rate:.3g}: lr_schedule {config.lr_schedule} is "
            f"computed again, for {self.last} steps. For a curve without a jump, start a run "
            "with the final number of steps; to continue at a constant rate, use "
            "--lr-schedule constant and --learning-rate."
        )

    def _compute_fraction(self, step: Count) -> tf.Tensor:
        """Returns the rate of a step as a fraction of the full rate, a float32 scalar."""
        config = self._config
        warmup = config.warmup
        taken = tf.cast(step, tf.float32) - 1.0
        progress = tf.clip_by_value((taken - warmup) / max(self.last - warmup, 1), 0.0, 1.0)
        factor = _compute_factor(config.lr_schedule, progress)
        if warmup:
            factor = tf.where(taken < warmup, (taken + 1.0) / warmup, factor)
        return factor


def _compute_factor(schedule: str, progress: tf.Tensor) -> tf.Tensor:
    """Returns the fraction of the full rate, given the progress of the schedule from 0 to 1."""
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + tf.cos(math.pi * progress))
    if schedule == "exponential":
        return tf.pow(0.01, progress)
    if schedule == "step":
        return tf.where(progress < 0.5, 1.0, tf.where(progress < 0.75, 0.1, 0.01))
    assert schedule == "constant", schedule
    return tf.ones([])
