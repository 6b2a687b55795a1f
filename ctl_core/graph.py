"""The inner loop: graph functions that take steps, traced once for each state of frozen layers.

One takes many steps in a call; others take one and return the values that due hooks name.

With ``jit_compile``, and one replica, a step is one XLA executable, and so are many whose batches
were read at once (prefetch.py): the sum over several replicas would have to leave it.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.compat import GraphWriter, add_called_ops
from ctl_core.hooks.recording import read_flags
from ctl_core.input.stream import Input
from ctl_core.model.failures import check_numerics
from ctl_core.model.parts import Parts
from ctl_core.model.state import State
from ctl_core.numerics.reduction import PIECES, join_for_host
from ctl_core.step import refuse_to_compile, train_step

_LOSS = frozenset({"loss"})


def is_executable(parts: Parts, data: Input) -> bool:
    """Returns whether XLA compiles the step as a whole: on one replica, of batches of one shape."""
    shape = parts.shape
    return (
        parts.jit_compile
        and shape.replicas == 1
        and shape.batch % shape.accumulate_steps == 0
        and shape.by_rows
        and all(
            isinstance(spec, tf.TensorSpec)
            and spec.dtype != tf.string
            and spec.shape.is_fully_defined()
            and spec.shape.rank > 0
            for spec in tf.nest.flatten(data.dataset.element_spec)
        )
    )


class StepFunctions:
    """The graph functions of the inner loop.

    Attributes:
        devices: this process's replica devices
        notes: what was noted of the steps of each call, a float32 vector, see ``note_update``
    """

    def __init__(self, state: State, summaries: tf.summary.SummaryWriter) -> None:
        """``summaries`` writes those of the hooks in the graph."""
        self.devices = tuple(state.strategy.extended.worker_devices)
        self.notes: list[np.ndarray] = []
        self._state = state
        self._graphs: dict[tuple[tuple[bool, ...], frozenset[str]], Any] = {}
        self._variables: dict[tuple[bool, ...], Any] = {}  # that are trained, if a hook asks
        self._frozen: tuple[bool, ...] = ()
        self._is_executable = is_executable(state.parts, state.data)
        self._summaries = GraphWriter(refuse_to_compile) if self._is_executable else summaries
        self._parts = state.parts
        if self._is_executable:
            self._parts = dataclasses.replace(state.parts, jit_compile=False, in_executable=True)
        # What a loop returns of its last step; for all else, the last step is a call of its own.
        self._of_loop = _LOSS if state.data.unit else frozenset()
        self.refresh()

    def refresh(self) -> None:
        """Notices what hooks have frozen or unfrozen; the next step uses a graph of its own."""
        self._frozen = tuple(read_flags(self._state.recording))

    @property
    def frozen(self) -> int:
        """The state of frozen layers as a number."""
        return hash(self._frozen)

    def list_operations(self) -> Iterator[Any]:
        """Yields the ops of all that was traced, each before those of the functions it calls."""
        graphs = [function.graph for function in self._graphs.values()]
        return add_called_ops(itertools.chain(*(graph.get_operations() for graph in graphs)))

    def take_steps(self, steps: int, fetches: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Takes so many steps; returns the values of the last one that are asked for.

        All are in one graph call, but for a last one whose values do not come out of a loop.
        """
        take = self.trace(fetches)
        if fetches <= self._of_loop:
            pieces, values, _, notes = take(tf.constant(steps))
        else:
            if steps > 1:
                self.take_steps(steps - 1)
            pieces, values, _, notes = take()
        self.notes.append(notes.numpy())
        for name, several in pieces.items():  # of each replica and micro-batch
            values[name] = tf.nest.map_structure(join_for_host, *several)
        if "variables" in fetches:
            values["variables"] = self._variables[self._frozen]
        return values  # type: ignore[no-any-return]

    def trace(self, fetches: frozenset[str] = frozenset()) -> Any:
        """Returns the concrete function for what is frozen now, traced if it is the first time.

        A loop takes the number of steps. Each returns pieces of output and batch by name, other
        values by name, what nobody uses, and the notes.
        """
        is_loop = fetches <= self._of_loop
        key = (self._frozen, self._of_loop if is_loop else fetches)
        if key not in self._graphs:
            with check_numerics(self._state.config.detect_anomaly):
                function = self._define_loop() if is_loop else self._define_step(fetches)
                self._graphs[key] = function.get_concrete_function()
        return self._graphs[key]

    def _define_loop(self) -> Any:
        parts, data = self._parts, self._state.data
        zeros = {name: tf.zeros([]) for name in parts.optimizers}
        no_values = {name: zeros.get("", zeros) for name in self._of_loop}

        @tf.function(jit_compile=True, autograph=False)
        def compiled_loop(
            stacked: Any, first: tf.Tensor, before: tf.Tensor, steps: tf.Tensor
        ) -> Any:
            def body(done: tf.Tensor, notes: Any, _: Any) -> tuple[tf.Tensor, Any, Any]:
                # By gather: the index of a slice would be a constant of the executable.
                batch = tf.nest.map_structure(lambda part: tf.gather(part, first + done), stacked)
                step = before + tf.cast(done, tf.int64) + 1
                note, values = self._train_on_batch(data.deal_out(batch), self._of_loop, step)
                values = tf.nest.map_structure(lambda value: tf.cast(value, tf.float32), values)
                return done + 1, notes.write(done, note), values

            start = (tf.constant(0), _create_notes(data.unit), no_values)
            _, notes, values = tf.while_loop(lambda done, *_: done < steps, body, start)
            return notes.stack(), values

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int32)])
        def run_loop(steps: tf.Tensor) -> tuple[Any, dict[str, Any], Any, tf.Tensor]:
            before = parts.step_variable.read_value()

            def body(done: tf.Tensor, notes: Any, _: Any) -> tuple[tf.Tensor, Any, Any]:
                taken = before + tf.cast(done, tf.int64)
                if not data.unit:
                    note, values = self._train_on_next_batch(self._of_loop, taken + 1)
                    return done + 1, notes.write(done, note), values
                stacked, first, number = data.iterator.take(steps - done)
                found, values = compiled_loop(stacked, first, taken, number)
                notes = notes.scatter(done + tf.range(number), found[:number])
                return done + number, notes, values

            start = (tf.constant(0), _create_notes(steps), no_values)
            done, notes, values = tf.while_loop(lambda done, *_: done < steps, body, start)
            parts.step_variable.assign_add(tf.cast(done, tf.int64))  # not of steps that have failed
            return {}, values, [], notes.stack()

        return run_loop

    def _define_step(self, fetches: frozenset[str]) -> Any:
        parts, local = self._parts, self._parts.strategy.experimental_local_results

        # An argument that is not needed would take each call some ten microseconds.
        @tf.function(autograph=False, input_signature=[])
        def run_step() -> tuple[dict[str, Any], dict[str, Any], Any, tf.Tensor]:
            note, values = self._train_on_next_batch(fetches, parts.step_variable.read_value() + 1)
            taken = [note, *tf.nest.flatten(values, expand_composites=True)]
            with tf.control_dependencies([part for one in taken for part in local(one)]):
                parts.step_variable.assign_add(1)
            pieces = {
                name: [
                    tf.nest.map_structure(lambda value, i=i: local(value)[i], piece)
                    for i in range(len(self.devices))  # one replica's after another's
                    for piece in values[name]
                ]
                for name in fetches & {*PIECES}
            }
            values = {name: value for name, value in values.items() if name not in pieces}
            firsts = tf.nest.map_structure(lambda value: local(value)[0], values)
            # What is the same on all replicas is returned of all, though one is used: TensorFlow
            # rewrites arithmetic whose result nobody asks for, which rounds differently, and then
            # the replicas' variables would no longer be equal.
            rest = [local(value)[1:] for value in tf.nest.flatten(values)]
            return pieces, firsts, rest, note[None]

        return run_step

    def _train_on_next_batch(
        self, fetches: frozenset[str], step: tf.Tensor
    ) -> tuple[tf.Tensor, Any]:
        """Takes a step on a batch of its own, as ``_train_on_batch`` does."""
        data = self._state.data
        if not self._is_executable:
            return self._train_on_batch(data.draw(), fetches, step)

        @tf.function(jit_compile=True, autograph=False)
        def compiled_step(batch: Any, step: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return self._train_on_batch(data.deal_out(batch), fetches, step)

        return compiled_step(next(data.iterator), step)  # type: ignore[no-any-return]

    def _train_on_batch(
        self, dealt: tuple[Any, Any], fetches: frozenset[str], step: tf.Tensor
    ) -> tuple[tf.Tensor, Any]:
        """Takes a step on what ``Input.deal_out`` returns.

        Returns:
            What all local replicas have noted, in all turns, in one number; and values by name.
        """
        with self._summaries.as_default(step):
            result = train_step(self._parts, *dealt, fetches, step)
        local = self._parts.strategy.experimental_local_results
        note = tf.add_n([part for one in result.notes for part in local(one)])
        values = result.fetch(fetches)
        if "variables" in values:
            self._variables[self._frozen] = values.pop("variables")
        return note, values


def _create_notes(steps: Any) -> tf.TensorArray:
    return tf.TensorArray(tf.float32, steps, element_shape=[])
