"""The inner loop: graph functions that take steps, traced once for each state of frozen layers.

``train_steps`` takes many steps in one call; ``train_step`` takes one and returns the values that
due hooks name. What a step does is step.py's part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ctl_core.anomaly import numerics_checked
from ctl_core.compat import scratch_graph, with_called
from ctl_core.model.freezing import read_flags
from ctl_core.numerics.joining import all_for_host
from ctl_core.numerics.not_finite import Noted, Notes, of_step
from ctl_core.state import State
from ctl_core.step import train_step
from ctl_core.stretches import LOSS, count_stacked_steps, train_one, train_stretches


class StepFunctions:
    """The graph functions of the inner loop.

    Attributes:
        devices: this process's replica devices
        noted: which steps of the last calls had losses that are not finite; None: nobody looks
    """

    def __init__(self, state: State, summaries: tf.summary.SummaryWriter) -> None:
        """``summaries`` writes those of the hooks in the graph."""
        self.devices = tuple(state.strategy.extended.worker_devices)
        self.noted: Noted | None = None
        self._state = state
        self._summaries = summaries
        self._traced: list[Any] = []
        self._graphs: dict[tuple[tuple[bool, ...], frozenset[str] | None], Any] = {}
        self._frozen: tuple[bool, ...] = ()
        self._stacks = count_stacked_steps(state.parts, state.data) > 0
        self._loss_spec: Any = None
        self.refresh()

    def refresh(self) -> None:
        """Notices what hooks have frozen or unfrozen; the next step uses a graph of its own."""
        self._frozen = tuple(read_flags(self._state.recording))

    @property
    def frozen(self) -> int:
        """The state of frozen layers as a number."""
        return hash(self._frozen)

    def train_steps(self, steps: int) -> None:
        """Takes ``steps`` steps in one graph call."""
        self._note(self.trace(None)(tf.constant(steps, tf.int64)))

    def can_loop(self, fetches: frozenset[str]) -> bool:
        """Returns whether a step that returns these may be the last of a loop."""
        return fetches == LOSS and self._stacks

    def train_step(self, fetches: frozenset[str], steps: int = 1) -> dict[str, Any]:
        """Takes one step, or some if they can loop; returns the values of the last."""
        how_many = [tf.constant(steps, tf.int64)] if self.can_loop(fetches) else []
        pieces, found, _, noted = self.trace(fetches)(*how_many)
        self._note(noted)
        return {**found, **all_for_host(pieces)}

    def operations(self) -> Iterator[Any]:
        """Yields the ops of all that was traced, each before those of the functions it calls."""
        graphs = [function.graph for function in self._graphs.values()]
        return with_called(itertools.chain(*(graph.get_operations() for graph in graphs)))

    def trace_counts(self) -> list[int]:
        """Returns how often each graph function was traced."""
        return [function.experimental_get_tracing_count() for function in self._traced]

    def trace(self, fetches: frozenset[str] | None) -> Any:
        """Returns the concrete function for what is frozen now, traced if it is the first time.

        It spares each call the search for the right trace.

        Args:
            fetches: what a step returns; None for the function that takes many
        """
        key = (self._frozen, fetches)
        if key not in self._graphs:
            if fetches is None:
                function = self._define_train_steps()
            else:
                function = self._define_train_step(fetches)
            self._traced.append(function)
            with numerics_checked(self._state.config.detect_anomaly):
                self._graphs[key] = function.get_concrete_function()
        return self._graphs[key]

    def _define_train_steps(self) -> Any:
        state, parts = self._state, self._state.parts

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
        def train_steps(steps: tf.Tensor) -> tf.Tensor:
            before = parts.step_variable.read_value()
            if self._stacks:
                _, noted = train_stretches(parts, state.data, before, steps)
                with tf.control_dependencies([noted]):
                    parts.step_variable.assign_add(steps)
                return noted
            notes = Notes(steps)

            def take_one(done: tf.Tensor, arrays: Any) -> tuple[tf.Tensor, Any]:
                step = before + done + 1
                with self._summaries.as_default(step):
                    result = train_step(parts, state.data, frozenset(), step)
                if result.noted:
                    arrays = notes.write(arrays, done, self._by_replica(result.noted))
                return done + 1, arrays

            start = (tf.constant(0, tf.int64), notes.arrays)
            done, arrays = tf.while_loop(lambda done, _: done < steps, take_one, start)
            parts.step_variable.assign_add(done)  # not of steps that have failed
            return notes.summary(arrays, before)

        return train_steps

    def _define_train_step(self, fetches: frozenset[str]) -> Any:
        state, parts, loops = self._state, self._state.parts, self.can_loop(fetches)
        results = state.strategy.experimental_local_results

        # An argument that is not needed would take each call some ten microseconds.
        @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)] * loops)
        def take_one(steps: Any = 1) -> tuple[dict[str, Any], dict[str, Any], Any, tf.Tensor]:
            before = parts.step_variable.read_value()
            step = before + 1
            if loops:
                self._loss_spec = self._loss_spec or self._find_loss_spec()
                loss, noted = train_stretches(parts, state.data, before, steps, self._loss_spec)
                with tf.control_dependencies([noted]):
                    parts.step_variable.assign_add(steps)
                return {}, {"loss": loss.get("", loss)}, [], noted
            with self._summaries.as_default(step):
                take = train_one if self._stacks else train_step
                result = take(parts, state.data, fetches, step)
            noted = of_step(list(itertools.chain(*self._by_replica(result.noted))), step)
            values = result.fetch(fetches)
            taken = [noted, *tf.nest.flatten(values, expand_composites=True)]
            with tf.control_dependencies([part for one in taken for part in results(one)]):
                parts.step_variable.assign_add(1)
            whole: dict[str, Any] = {}
            for name in fetches & {
                "output",
                "batch",
            }:  # one replica's micro-batches after another's
                of_replicas = zip(*map(self._by_replica, values.pop(name)), strict=True)
                whole[name] = list(itertools.chain.from_iterable(of_replicas))
            reduced = tf.nest.map_structure(lambda v: results(v)[0], values)
            # What is the same on all replicas is returned of all, though one is used: TensorFlow
            # rewrites arithmetic whose result nobody asks for, which rounds differently, and then
            # the replicas' variables would no longer be equal.
            rest = [results(v)[1:] for v in tf.nest.flatten(values)]
            return whole, reduced, rest, noted

        return take_one

    def _find_loss_spec(self) -> Any:
        """Returns the loss that a step returns, by objective, of a step that nobody runs."""
        parts, data = self._state.parts, self._state.data
        with scratch_graph("loss").as_default():
            result = train_one(parts, data, LOSS, tf.constant(1, tf.int64))
            return tf.nest.map_structure(tf.type_spec_from_value, result.loss)

    def _note(self, summary: tf.Tensor) -> None:
        """Keeps what a graph call has noted."""
        if self._state.parts.notes_losses:
            self.noted = (self.noted or Noted()).then(Noted(*summary.numpy().tolist()))

    def _by_replica(self, values: Any) -> list[Any]:
        """Returns the structure that each of this process's replicas has."""
        results = self._state.strategy.experimental_local_results
        return [
            tf.nest.map_structure(lambda v, i=i: results(v)[i], values)
            for i in range(len(self.devices))
        ]
