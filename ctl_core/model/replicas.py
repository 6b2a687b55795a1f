"""Runs functions on each replica while a step is traced."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf

from ctl_core import compat
from ctl_core.model.components import Compilation, StepContext
from ctl_core.model.shared_functions import Check, Shareable, SharedFunction
from ctl_core.types import PerReplica, Structure


class Replicas:
    """Runs functions on each replica of this process while a step is traced."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._strategy = context.components.strategy
        # Replicas are traced in separate threads, which do not have the main thread's generator.
        self._seed_generator = compat.get_seed_generator()

    @property
    def step(self) -> tf.Tensor:
        """The number of the step that is being traced."""
        assert isinstance(self._context.step, tf.Tensor)
        return self._context.step

    def run(self, function: Callable[..., Any], *values: PerReplica) -> PerReplica:
        """Calls a function on each replica, with that replica's component of the values."""

        def run_on_replica(*values: Structure) -> Structure:
            with (
                compat.run_replica(self._seed_generator),
                compat.mute_other_summaries(self.step),
            ):
                return function(*values)

        # Names of summaries begin with the name scope, so they would contain the name scope of a
        # loop.
        with tf.name_scope(""):
            return self._strategy.run(run_on_replica, values)

    def share(
        self,
        key: Hashable,
        function: Shareable,
        compiled: bool = False,
        check: Check | None = None,
        inlined: bool = True,
        waits: bool = False,
    ) -> SharedFunction:
        """Returns a function that is traced once for all devices and graphs, if that is possible.

        Args:
            key: identifies the function among all functions of the run with the same frozen layers
            function: the function, without tensors in its closure; if a function with this key was
                shared before, that function is returned
            compiled: see ``SharedFunction``
            check: see ``SharedFunction``
            inlined: see ``SharedFunction``
            waits: see ``SharedFunction``
        """
        functions = self._context.functions
        if key not in functions:
            shared = SharedFunction(function, self._strategy, compiled, check, inlined, waits)
            if self._context.compilation is Compilation.STEP:
                shared.obstacle = "XLA compiles the step as a whole"
            if not self._context.shares:
                shared.obstacle = "a hook uses a tensor of an earlier hook"
            functions[key] = shared
        found: SharedFunction = functions[key]
        return found

    def call(self, function: SharedFunction, *values: PerReplica) -> tuple[PerReplica, Any]:
        """Calls a shared function on each replica; see ``run_again_if_not_shareable``.

        Args:
            function: the function
            values: its arguments after the number of the step, which may differ between replicas

        Returns:
            The results of the replicas, and the object that the function returned besides tensors.
        """
        facts: list[Any] = []

        def call_on_replica(*values: Structure) -> Structure:
            result, returned = function(self.step, *values)
            facts.append(returned)
            return result

        return self.run(call_on_replica, *values), facts[-1]

    def get_local_results(self, value: PerReplica) -> tuple[tf.Tensor, ...]:
        """Returns the components of a value, one for each replica of this process."""
        return self._strategy.experimental_local_results(value)
