"""The learning rate: a variable that hooks assign to, what is made of it, and what is used.

``create_opt`` is given a ``LearningRate``. Arithmetic with it there gives a ``Product``, which goes
on following it; anywhere else, a value. Where an optimizer has a schedule, the other hooks are
given ``Scheduled``, the rate that it uses.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.compat import rate_of


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
    follows = True

    def __call__(self, step: Any = None) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        raise NotImplementedError

    def get_config(self) -> dict[str, float]:
        """Returns the current value, for a Keras config."""
        return {"value": float(self)}

    @property
    def value(self) -> Any:
        """The rate itself: both ``lr.value`` and ``lr.value()`` do."""
        return self

    def read_value(self) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        return self()

    def numpy(self) -> Any:
        """Returns the value as a NumPy scalar."""
        return self().numpy()

    dtype = tf.float32
    shape = tf.TensorShape([])

    def combine(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Returns a rate that follows its operands, where that is asked for, otherwise a value."""
        if self.follows and all(isinstance(one, Rate | numbers.Real) for one in operands):
            return Product(function, operands)
        return function(*(one() if isinstance(one, Rate) else one for one in operands))

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
        number = isinstance(other, Rate | numbers.Real | np.ndarray) or tf.is_tensor(other)
        return self() == tf.convert_to_tensor(other, tf.float32) if number else other is self

    def __ne__(self, other: Any) -> Any:
        equal = self == other
        return tf.logical_not(equal) if tf.is_tensor(equal) else not equal

    __hash__ = object.__hash__


class LearningRate(Rate, tf.Module):
    """The learning rate as an object that hooks can assign to and checkpoints hold.

    Attributes:
        variable: holds it, a float32 scalar
        assigned: whether anyone has assigned to it, a hook or a callback
        follows: whether arithmetic gives what goes on following it; while ``create_opt`` runs
    """

    def __init__(self, value: float) -> None:
        tf.Module.__init__(self, name="lr")
        self.assigned = False
        self.value = tf.Variable(
            value,
            dtype=tf.float32,
            trainable=False,
            name="lr",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @property
    def value(self) -> LearningRate:
        """The rate itself, which is as good as its variable."""
        return self

    @value.setter
    def value(self, variable: tf.Variable) -> None:  # "value" is its name in checkpoints
        self.__dict__["value"] = variable

    @property
    def variable(self) -> tf.Variable:
        """Holds the value."""
        return self.__dict__["value"]

    def __call__(self, step: Any = None) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        return tf.convert_to_tensor(self.variable)

    def assign(self, value: Any) -> None:
        """Sets the value; the next step uses it."""
        self.assigned = True
        self.variable.assign(value)

    def assign_add(self, delta: Any) -> None:
        """Adds to the value."""
        self.assigned = True
        self.variable.assign_add(delta)

    def assign_sub(self, delta: Any) -> None:
        """Subtracts from the value."""
        self.assigned = True
        self.variable.assign_sub(delta)


class Product(Rate):
    """What arithmetic makes of a learning rate and numbers; changes when the learning rate does."""

    def __init__(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> None:
        self._function, self._operands = function, operands

    def __call__(self, step: Any = None) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        values = (one(step) if isinstance(one, Rate) else one for one in self._operands)
        return self._function(*values)


class Scheduled(Rate):
    """The rate that an optimizer takes from a schedule: for its next update, as Keras has it."""

    follows = False

    def __init__(self, optimizer: keras.Optimizer, create_opt: str) -> None:
        self._optimizer, self._create_opt = optimizer, create_opt

    def __call__(self, step: Any = None) -> tf.Tensor:
        """Returns the current value, a float32 scalar."""
        return tf.cast(self._optimizer.learning_rate, tf.float32)

    def assign(self, _: Any) -> None:
        """Refuses.

        Raises:
            ValueError: always; the next step's value would be the schedule's again.
        """
        raise ValueError(
            f"lr comes from the {type(rate_of(self._optimizer)).__name__} that {self._create_opt} "
            "gives the optimizer, so that it cannot be assigned; change the schedule, or give the "
            "optimizer lr itself"
        )

    assign_add = assign_sub = assign


def rate_for_hooks(lr: LearningRate, optimizers: Mapping[str, Any], create_opt: str) -> Rate:
    """Returns what hooks are given as ``lr``: what the optimizers use.

    That is ``lr`` itself, if one of them takes it or a product of it, or none is Keras'; otherwise
    the rate of the first optimizer, if that has a schedule.
    """
    rates = [rate_of(optimizer) for optimizer in optimizers.values()]
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if any(isinstance(rate, Rate) for rate in rates) or not isinstance(rates[0], schedule):
        return lr
    return Scheduled(next(iter(optimizers.values())), create_opt)


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
