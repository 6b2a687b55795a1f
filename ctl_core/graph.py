"""The inner loop: graph functions that take steps, traced once for each state of frozen layers.

One takes many steps in a call; others take one and return the values that due hooks name. What a
step does is step.py's part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ctl_core.compat import with_called
from ctl_core.hooks.recording import read_flags
from ctl_core.model.failures import numerics_checked
from ctl_core.model.state import State
from ctl_core.numerics.not_finite import (
    Note,
    Noted,
    create_arrays,
    of_step,
    summarize,
    unite_notes,
    write_note,
)
from ctl_core.numerics.reduction import PIECES, join_for_host
from ctl_core.step import StepResult, train_step
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
        self._graphs: dict[tuple[tuple[bool, ...], frozenset[str]], Any] = {}
        self._frozen: tuple[bool, ...] = ()
        self._stacks = count_stacked_steps(state.parts, state.data) > 0
        self.refresh()

    def refresh(self) -> None:
        """Notices what hooks have frozen or unfrozen; the next step uses a graph of its own."""
        self._frozen = tuple(read_flags(self._state.recording))

    @property
    def frozen(self) -> int:
        """The state of frozen layers as a number."""
        return hash(self._frozen)

    def operations(self) -> Iterator[Any]:
        """Yields the ops of all that was traced, each before those of the functions it calls."""
        graphs = [function.graph for function in self._graphs.values()]
        return with_called(itertools.chain(*(graph.get_operations() for graph in graphs)))

    def take_steps(self, steps: int, fetches: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Takes so many steps; returns the values of the last one that are asked for.

        All are in one graph call, but for a last one whose values do not come out of a loop.
        """
        if self._can_loop(fetches):
            pieces, values, _, noted = self.trace(fetches)(tf.constant(steps, tf.int64))
        else:
            if steps > 1:
                self.take_steps(steps - 1)
            pieces, values, _, noted = self.trace(fetches)()
        if self._state.parts.notes_losses:
            self.noted = (self.noted or Noted()).then(Noted(*noted.numpy().tolist()))
        return {**values, **{name: _join_pieces(several) for name, several in pieces.items()}}

    def _can_loop(self, fetches: frozenset[str]) -> bool:
        """Returns whether a step that returns these may be the last of a loop."""
        return not fetches or (fetches == LOSS and self._stacks)

    def trace(self, fetches: frozenset[str] = frozenset()) -> Any:
        """Returns the concrete function for what is frozen now, traced if it is the first time.

        It spares each call the search for the right trace. A loop takes the number of steps. Each
        returns pieces of output and batch by name, other values by name, what nobody uses, and the
        numbers of ``Noted``.
        """
        key = (self._frozen, fetches)
        if key not in self._graphs:
            define = self._define_loop if self._can_loop(fetches) else self._define_step
            with numerics_checked(self._state.config.detect_anomaly):
                self._graphs[key] = define(fetches).get_concrete_function()
        return self._graphs[key]

    def _define_loop(self, fetches: frozenset[str]) -> Any:
        state, parts = self._state, self._state.parts

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
        def take_many(steps: tf.Tensor) -> tuple[Any, dict[str, Any], Any, tf.Tensor]:
            before = parts.step_variable.read_value()
            if self._stacks:
                loss, noted = train_stretches(parts, state.data, before, steps, fetches)
                with tf.control_dependencies([noted]):
                    parts.step_variable.assign_add(steps)
                return {}, {"loss": loss.get("", loss)} if fetches else {}, [], noted

            def take_one(done: tf.Tensor, arrays: Any) -> tuple[tf.Tensor, Any]:
                step = before + done + 1
                with self._summaries.as_default(step):
                    result = train_step(parts, state.data, fetches, step)
                if result.notes:
                    note = unite_notes(self._local_notes(result))
                    arrays = write_note(arrays, done, note)
                return done + 1, arrays

            start = (tf.constant(0, tf.int64), create_arrays(steps))
            done, arrays = tf.while_loop(lambda done, _: done < steps, take_one, start)
            parts.step_variable.assign_add(done)  # not of steps that have failed
            losses, nans = (array.stack() for array in arrays)
            return {}, {}, [], summarize(losses, nans, before)

        return take_many

    def _define_step(self, fetches: frozenset[str]) -> Any:
        state, parts = self._state, self._state.parts
        local = state.strategy.experimental_local_results

        # An argument that is not needed would take each call some ten microseconds.
        @tf.function(autograph=False, input_signature=[])
        def take_one() -> tuple[dict[str, Any], dict[str, Any], Any, tf.Tensor]:
            step = parts.step_variable.read_value() + 1
            with self._summaries.as_default(step):
                take = train_one if self._stacks else train_step
                result = take(parts, state.data, fetches, step)
            noted = of_step(self._local_notes(result), step)
            values = result.fetch(fetches)
            taken = [noted, *tf.nest.flatten(values, expand_composites=True)]
            with tf.control_dependencies([part for one in taken for part in local(one)]):
                parts.step_variable.assign_add(1)
            pieces: dict[str, Any] = {}
            for name in fetches & {*PIECES}:  # one replica's micro-batches after another's
                of_replicas = zip(*map(self._by_replica, values.pop(name)), strict=True)
                pieces[name] = list(itertools.chain.from_iterable(of_replicas))
            firsts = tf.nest.map_structure(lambda value: local(value)[0], values)
            # What is the same on all replicas is returned of all, though one is used: TensorFlow
            # rewrites arithmetic whose result nobody asks for, which rounds differently, and then
            # the replicas' variables would no longer be equal.
            rest = [local(value)[1:] for value in tf.nest.flatten(values)]
            return pieces, firsts, rest, noted

        return take_one

    def _local_notes(self, result: StepResult) -> list[Note]:
        return list(itertools.chain(*self._by_replica(result.notes)))

    def _by_replica(self, values: Any) -> list[Any]:
        """Returns the structure that each of this process's replicas has."""
        local = self._state.strategy.experimental_local_results
        return [
            tf.nest.map_structure(lambda value, i=i: local(value)[i], values)
            for i in range(len(self.devices))
        ]


def _join_pieces(pieces: list[Any]) -> Any:
    """Returns the whole output or batch, of that of each replica and micro-batch."""
    return tf.nest.map_structure(lambda *parts: join_for_host(parts), *pieces)
