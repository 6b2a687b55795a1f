"""Losses that are NaN or infinite, and NaN gradients: noted in the graph, told outside of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

NEVER = 2**62


@dataclasses.dataclass(frozen=True)
class Noted:
    """What is known after a graph call.

    Attributes:
        first: the first step whose loss was not finite on some replica, or ``NEVER``
        latest: the last such step so far, or 0
        steps: how many such steps the worst replica has had
        zeroed: in how many steps ``nan_to_zero`` has found NaN in a gradient
    """

    first: int = NEVER
    latest: int = 0
    steps: int = 0
    zeroed: int = 0


class NotFinite:
    """Notes, on each replica, the steps whose loss is not finite; costs some scalar ops a step.

    Replicas are looked at together when the graph is left, and processes when they agree on what
    is next anyway: nothing is exchanged for it within a step.

    Attributes:
        variable: NEVER - first, latest, steps, zeroed of ``Noted``, so that the highest counts;
            an int64 vector of each replica's own
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._results = strategy.experimental_local_results
        self.variable = tf.Variable(
            tf.zeros([4], tf.int64),
            trainable=False,
            name="not_finite",
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def note(self, losses: Mapping[str, tf.Tensor], step: tf.Tensor, nans: list[tf.Tensor]) -> None:
        """Notes one step; runs in a replica context.

        Args:
            losses: this replica's, by objective
            step: the step's number, an int64 scalar
            nans: what ``found_nans`` has collected
        """
        finite = functools.reduce(tf.logical_and, map(tf.math.is_finite, losses.values()))
        before = self.variable.read_value()
        start = tf.constant([NEVER, 0, 0, 0], tf.int64) + step * tf.constant(
            [-1, 1, 0, 0], tf.int64
        )
        after = tf.maximum(before + tf.constant([0, 0, 1, 0], tf.int64), start)
        after = tf.where(finite, before, after)
        if nans:
            found = tf.cast(tf.reduce_any(nans), tf.int64)
            after += found * tf.constant([0, 0, 0, 1], tf.int64)
        self.variable.assign(after)

    def taken(self) -> tf.Tensor:
        """Returns the highest of the local replicas' numbers; runs in a cross-replica context."""
        return tf.reduce_max([part.read_value() for part in self._results(self.variable)], axis=0)

    def put_back(self, noted: Noted) -> None:
        """Goes on from what a checkpoint knows."""
        values = [NEVER - noted.first, noted.latest, noted.steps, noted.zeroed]
        for part in self._results(self.variable):
            part.assign(values)


def noted_in(taken: tf.Tensor) -> Noted:
    """Returns what ``NotFinite.taken`` says."""
    remaining, latest, steps, zeroed = taken.numpy().tolist()
    return Noted(NEVER - remaining, latest, steps, zeroed)


_tracing = threading.local()


@contextlib.contextmanager
def found_nans() -> Iterator[list[tf.Tensor]]:
    """Collects whether gradients that ``nan_to_zero`` is called with have NaN, bool scalars.

    Within, in this thread, a step is traced; what is called in another graph, such as a branch of
    a tf.cond, is left out.
    """
    found: list[tf.Tensor] = []
    _tracing.into = found, tf.compat.v1.get_default_graph()
    try:
        yield found
    finally:
        _tracing.into = None


@tf.autograph.experimental.do_not_convert
def note_nans(is_nan: Any) -> None:
    """Tells ``found_nans``, if a step is being traced, which entries of a gradient are NaN."""
    into = getattr(_tracing, "into", None)
    if into is not None and tf.compat.v1.get_default_graph() is into[1]:
        into[0].append(tf.reduce_any(is_nan))
