"""Defines the flags that a step reports to the outer loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class Report(NamedTuple):
    """Flags of a step, which are True if all is well.

    A flag of a step is True if it is True on all replicas and in all turns. In the results of a
    graph call, each report is a row of a bool matrix. To add a flag, add a field here.

    Attributes:
        loss_is_finite: whether every loss is finite, a bool scalar
        gradients_are_numbers: whether no gradient that was passed to ``update_pre`` contained NaN,
            a bool scalar
        are_equal: for each variable of ``leaves.list_compared``, whether all leaves have written
            the same value, a bool vector
    """

    # Each flag is a tensor in a graph, and an array in the result of a graph call.
    loss_is_finite: Any
    gradients_are_numbers: Any
    are_equal: Any

    @classmethod
    def combine(cls, reports: Sequence[Report]) -> Report:
        """Combines the reports of several replicas or turns."""
        if len(reports) == 1:
            return reports[0]
        combined = []
        for flags in zip(*reports, strict=True):
            combined.append(tf.reduce_all(tf.stack(flags), axis=0))
        return cls(*combined)

    def pack(self) -> tf.Tensor:
        """Returns the flags as a bool vector."""
        return tf.concat([tf.reshape(flags, [-1]) for flags in self], 0)

    @classmethod
    def unpack(cls, rows: np.ndarray) -> Report:
        """Returns the reports of the steps of a graph call; each flag gets a first axis for steps.

        Args:
            rows: the results of ``pack``, bool[steps, flags]
        """
        return cls(rows[:, 0], rows[:, 1], rows[:, 2:])


def stack_flags(flags: list[tf.Tensor]) -> tf.Tensor:
    """Returns a bool vector of flags, of which there may be none."""
    return tf.stack(flags) if flags else tf.zeros([0], tf.bool)
