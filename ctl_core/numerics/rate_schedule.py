"""The learning rate as settings say: warm-up, then a curve down to the last step.

It is assigned to ``lr`` at the beginning of each step, in the graph, so that hooks and optimizers
see it there. A hook that assigns ``lr`` by itself ends it.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from ctl_core.console import Console
from ctl_core.numerics.learning_rate import LearningRate, Rate
from ctl_core.settings import Config


class RateSchedule:
    """What ``lr_schedule`` and ``warmup`` make of ``learning_rate``.

    Attributes:
        active: whether it holds, a variable; not any more once a hook has assigned ``lr``
    """

    def __init__(self, config: Config, lr: LearningRate) -> None:
        self._config = config
        self._lr = lr
        with tf.device("CPU:0"):
            self.active = tf.Variable(True, trainable=False, name="lr_schedule")
            self._last = tf.Variable(1, dtype=tf.int64, trainable=False, name="last_step")

    @property
    def variables(self) -> list[tf.Variable]:
        """The engine's own, which the record of a checkpoint stands for."""
        return [self.active, self._last]

    def end_at(self, last: int) -> None:
        """Says how many steps there are, which the curve is spread over."""
        self._last.assign(last)

    def ended(self, active: bool) -> bool:
        """Notices that a hook has assigned ``lr``; returns whether the schedule has ended by that.

        Args:
            active: whether it held until now
        """
        now = active and not self._lr.assigned
        self.active.assign(now)
        return active and not now

    def apply(self, step: tf.Tensor) -> None:
        """Assigns ``lr`` for a step, an int64 scalar from 1 up; in a graph, over all replicas."""
        value = tf.where(self.active, self.rate(step), self._lr.variable)
        self._lr.variable.assign(value)

    def rate(self, step: Any) -> tf.Tensor:
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


def schedule_of(
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
