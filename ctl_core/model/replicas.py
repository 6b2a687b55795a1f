"""Runs functions on each replica while a step is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl_core import compat
from ctl_core.model.components import StepContext
from ctl_core.types import PerReplica, Structure


class Replicas:
    """Runs functions on each replica of this process while a step is traced."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._strategy = context.components.strategy
        # Replicas are traced in separate threads, which do not have the main thread's generator.
        self._seed_generator = compat.get_seed_generator()

    def run(self, function: Callable[..., Any], *values: PerReplica) -> PerReplica:
        """Calls a function on each replica, with that replica's component of the values."""

        step = self._context.step
        assert isinstance(step, tf.Tensor)

        def run_on_replica(*values: Structure) -> Structure:
            with (
                compat.run_replica(self._seed_generator),
                compat.mute_other_summaries(step),
            ):
                return function(*values)

        # Names of summaries begin with the name scope, so they would contain the name scope of a
        # loop.
        with tf.name_scope(""):
            return self._strategy.run(run_on_replica, values)

    def get_local_results(self, value: PerReplica) -> tuple[tf.Tensor, ...]:
        """Returns the components of a value, one for each replica of this process."""
        return self._strategy.experimental_local_results(value)
