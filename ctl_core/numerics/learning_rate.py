"""The learning rate: a variable that hooks assign to, what is made of it, its schedule."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.compat import read_rate
from ctl_core.numerics.variables import create_scalar
from ctl_core.run.console import warn
from ctl_core.run.settings import Config


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    """A float32 scalar that works as a tensor, in comparisons and arithmetic, and as a number.

    A Keras optimizer takes no tf.Variable as its learning rate, but a schedule, as this is. What is
    made of it and numbers goes on following it: ``lr * 0.1``.
    """

    __array_priority__ = 100  # numpy's numbers leave arithmetic to it
    dtype = tf.float32

    def __init__(self, compute: Callable[[], Any]) -> None:
        """``compute`` gives the value whenever it is asked for."""
        self._compute = compute

    def __call__(self, step: Any = None) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        return tf.cast(self._compute(), tf.float32)

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


def _define_operator(name: str, follows: bool) -> Callable[..., Any]:
    """Returns a tensor's operator for rates, which gives a rate if it follows, of numbers too."""

    def operate(self: Rate, *others: Any) -> Any:
        def compute() -> Any:
            values = [one() if isinstance(one, Rate) else one for one in others]
            return getattr(tf.Tensor, name)(self(), *values)

        is_rate = follows and all(isinstance(one, Rate | numbers.Real) for one in others)
        return Rate(compute) if is_rate else compute()

    return operate


_ARITHMETIC = "add radd sub rsub mul rmul truediv rtruediv pow rpow neg"
_COMPARISONS = "lt le gt ge eq ne"
for _word in f"{_ARITHMETIC} {_COMPARISONS}".split():
    _name, _follows = f"__{_word}__", _word in _ARITHMETIC.split()
    setattr(Rate, _name, _define_operator(_name, _follows))


class LearningRate(Rate, tf.Module):
    """What ``create_opt`` is given: hooks assign to it, checkpoints hold it.

    Attributes:
        variable: holds the rate, a float32 scalar
        schedule: what assigns ``variable`` at each step, or None
    """

    def __init__(self, value: float) -> None:
        tf.Module.__init__(self, name="lr")
        self.schedule: RateSchedule | None = None
        self.variable = create_scalar(value, tf.float32, "lr")

    def __call__(self, step: Any = None) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        return tf.convert_to_tensor(self.variable)

    def assign(self, value: Any) -> None:
        """Sets the value, for good; the next step uses it."""
        if self.schedule is not None:
            warn("a hook assigns lr, which ends lr_schedule and warmup.")
            self.schedule.active.assign(False)
        self.variable.assign(value)


def make_rate_for_hooks(lr: LearningRate, optimizers: Mapping[str, Any]) -> Rate:
    """Returns what hooks are given as ``lr``: the rate of the first optimizer's next update.

    That is ``lr`` itself, unless no optimizer takes it and the first has a schedule of its own.
    """
    rates = [read_rate(optimizer) for optimizer in optimizers.values()]
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if any(isinstance(rate, Rate) for rate in rates) or not isinstance(rates[0], schedule):
        return lr
    first = next(iter(optimizers.values()))
    return Rate(lambda: first.learning_rate)


class RateSchedule:
    """What ``lr_schedule`` and ``warmup`` make of ``learning_rate``: warm-up, then a curve.

    Attributes:
        active: whether it holds: until a hook assigns ``lr``
        last: the last step, for which the curve is made; to be known before steps are traced
    """

    def __init__(self, config: Config, lr: LearningRate) -> None:
        self._config = config
        self._lr = lr
        self.last = 1
        self.active = create_scalar(True, tf.bool, "lr_schedule")
        lr.schedule = self

    def apply(self, step: tf.Tensor) -> None:
        """Assigns ``lr`` for a step, an int64 scalar from 1 up; in a graph, over all replicas."""
        value = tf.where(self.active, self._compute(step), self._lr.variable)
        self._lr.variable.assign(value)

    def _compute(self, step: Any) -> tf.Tensor:
        """Returns the rate of a step, a float32 scalar."""
        config, warmup = self._config, self._config.warmup
        before = tf.cast(step, tf.float32) - 1.0  # how many steps were taken
        share = tf.clip_by_value((before - warmup) / max(self.last - warmup, 1), 0.0, 1.0)
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
