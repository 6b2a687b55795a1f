"""The learning rate: a variable that hooks assign to, what is made of it, its schedule.

``create_opt`` is given a ``LearningRate``. Arithmetic with it there goes on following it; anywhere
else, it gives a value. Where an optimizer has a schedule of its own, the other hooks are given the
rate that it uses.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.compat import rate_of
from ctl_core.run.console import Console
from ctl_core.run.settings import Config


def _define_operators(function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Returns the methods of a rate for ``rate + other`` and ``other + rate``, say."""

    def from_left(self: Rate, other: Any) -> Any:
        return self.combine(function, self, other)

    def from_right(self: Rate, other: Any) -> Any:
        return self.combine(function, other, self)

    return from_left, from_right


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    """A float32 scalar that works as a tensor, in arithmetic and comparisons, and as a number.

    A Keras optimizer takes no tf.Variable as its learning rate but does take a schedule, which this
    is.
    """

    __array_priority__ = 100  # numpy's numbers leave arithmetic to it
    follows = True  # whether arithmetic gives what goes on following it
    dtype = tf.float32
    shape = tf.TensorShape([])

    def get_config(self) -> dict[str, float]:
        """Returns the current value, for a Keras config."""
        return {"value": float(self)}

    @property
    def value(self) -> Any:
        """The rate itself: both ``lr.value`` and ``lr.value()`` do."""
        return self

    def numpy(self) -> Any:
        """Returns the value as a NumPy scalar."""
        return self().numpy()

    def combine(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Returns a rate that follows its operands, where that is asked for, otherwise a value."""

        def compute(step: Any = None) -> Any:
            return function(*(one(step) if isinstance(one, Rate) else one for one in operands))

        follows = self.follows and all(isinstance(one, Rate | numbers.Real) for one in operands)
        return DerivedRate(compute) if follows else compute()

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.convert_to_tensor(self(), dtype=dtype, name=name)

    def __float__(self) -> float:
        return float(self.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.numpy(), dtype=dtype)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({float(self):g})"

    __add__, __radd__ = _define_operators(operator.add)
    __sub__, __rsub__ = _define_operators(operator.sub)
    __mul__, __rmul__ = _define_operators(operator.mul)
    __truediv__, __rtruediv__ = _define_operators(operator.truediv)
    __pow__, __rpow__ = _define_operators(operator.pow)

    def __neg__(self) -> Any:
        return self * -1.0

    def __lt__(self, other: Any) -> Any:
        return self() < other

    def __le__(self, other: Any) -> Any:
        return self() <= other

    def __gt__(self, other: Any) -> Any:
        return self() > other

    def __ge__(self, other: Any) -> Any:
        return self() >= other

    def __eq__(self, other: Any) -> Any:
        return self() == other

    def __ne__(self, other: Any) -> Any:
        return self() != other

    __hash__ = object.__hash__


class LearningRate(Rate, tf.Module):
    """The learning rate as an object that hooks can assign to and checkpoints hold.

    Attributes:
        variable: holds it, a float32 scalar
        assigned: whether a hook has assigned to it
        follows: whether arithmetic gives what goes on following it; while ``create_opt`` runs
    """

    def __init__(self, value: float) -> None:
        tf.Module.__init__(self, name="lr")
        self.assigned = False
        self.variable = tf.Variable(
            value,
            dtype=tf.float32,
            trainable=False,
            name="lr",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    def __call__(self, step: Any = None) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        return tf.convert_to_tensor(self.variable)

    def assign(self, value: Any) -> None:
        """Sets the value; the next step uses it."""
        self.assigned = True
        self.variable.assign(value)

    def assign_add(self, delta: Any) -> None:
        """Adds to the value."""
        self.assign(self() + delta)

    def assign_sub(self, delta: Any) -> None:
        """Subtracts from the value."""
        self.assign(self() - delta)


class DerivedRate(Rate):
    """A rate that is worked out whenever it is asked for, and so cannot be assigned.

    It is what arithmetic makes of a learning rate and numbers, or what a schedule gives.
    """

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        """``compute`` is given the step that Keras asks for, or None."""
        self._compute = compute

    def __call__(self, step: Any = None) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        return tf.cast(self._compute(step), tf.float32)


def rate_for_hooks(lr: LearningRate, optimizers: Mapping[str, Any]) -> Rate:
    """Returns what hooks are given as ``lr``: what the optimizers use.

    That is ``lr`` itself, if one of them takes it or a product of it, or none is Keras'; otherwise
    the rate of the first optimizer, if that has a schedule, for its next update.
    """
    rates = [rate_of(optimizer) for optimizer in optimizers.values()]
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if any(isinstance(rate, Rate) for rate in rates) or not isinstance(rates[0], schedule):
        return lr
    first = next(iter(optimizers.values()))
    return DerivedRate(lambda _: first.learning_rate)


def rates_used(lr: Rate, optimizers: Mapping[str, Any]) -> dict[str, float]:
    """Returns the rates that the optimizers use now, by objective; of a single one, under "".

    Args:
        lr: what hooks are given, which stands for optimizers that are not Keras'
        optimizers: by objective
    """
    rates = {
        name: lr if rate_of(optimizer) is None else optimizer.learning_rate
        for name, optimizer in optimizers.items()
    }
    return {name: float(tf.cast(rate, tf.float32)) for name, rate in rates.items()}


class RateSchedule:
    """What ``lr_schedule`` and ``warmup`` make of ``learning_rate``: warm-up, then a curve.

    It is assigned to ``lr`` at the beginning of each step, in the graph, so that hooks and
    optimizers see it there. A hook that assigns ``lr`` by itself ends it.
    """

    def __init__(self, config: Config, lr: LearningRate) -> None:
        self._config = config
        self._lr = lr
        with tf.device("CPU:0"):
            self._active = tf.Variable(True, trainable=False, name="lr_schedule")
            self._last = tf.Variable(1, dtype=tf.int64, trainable=False, name="last_step")

    def end_at(self, last: int) -> None:
        """Says how many steps there are, which the curve is spread over."""
        self._last.assign(last)

    def ended(self, active: bool) -> bool:
        """Notices that a hook has assigned ``lr``; returns whether the schedule has ended by that.

        Args:
            active: whether it held until now
        """
        now = active and not self._lr.assigned
        self._active.assign(now)
        return active and not now

    def apply(self, step: tf.Tensor) -> None:
        """Assigns ``lr`` for a step, an int64 scalar from 1 up; in a graph, over all replicas."""
        value = tf.where(self._active, self._compute(step), self._lr.variable)
        self._lr.variable.assign(value)

    def _compute(self, step: Any) -> tf.Tensor:
        """Returns the rate of a step, a float32 scalar."""
        config, warmup = self._config, self._config.warmup
        before = tf.cast(step, tf.float32) - 1.0  # how many steps were taken
        after = tf.maximum(tf.cast(self._last, tf.float32) - warmup, 1.0)
        share = tf.clip_by_value((before - warmup) / after, 0.0, 1.0)
        curve = {
            "constant": lambda: tf.ones([]),
            "linear": lambda: 1.0 - share,
            "cosine": lambda: 0.5 * (1.0 + tf.cos(math.pi * share)),
            "exponential": lambda: tf.pow(0.01, share),
            "step": lambda: tf.where(share < 0.5, 1.0, tf.where(share < 0.75, 0.1, 0.01)),
        }[config.lr_schedule]()
        if warmup:
            curve = tf.where(before < warmup, (before + 1.0) / warmup, curve)
        return config.learning_rate * curve


def create_schedule(
    config: Config, lr: LearningRate, used: Rate, console: Console
) -> RateSchedule | None:
    """Makes the schedule, if one is asked for; one that the optimizer has of its own goes before.

    Args:
        config: the settings
        lr: what ``create_opt`` was given
        used: the rate that the optimizer uses
        console: for a warning
    """
    if config.lr_schedule == "constant" and not config.warmup:
        return None
    if used is not lr:
        console.warn(
            "lr_schedule and warmup change nothing: create_opt gives the optimizer a schedule of "
            "its own, which goes before."
        )
        return None
    return RateSchedule(config, lr)
