"""The inner loop: graph functions that take steps, traced once for each state of frozen layers.

``run`` takes many steps in one call; ``observe`` takes one and returns the values that due hooks
name. What an update is made of is accumulate.py's and step.py's part.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ctl_core.accumulate import take_update
from ctl_core.build import State
from ctl_core.checks.writes import check_writes
from ctl_core.console import Console
from ctl_core.errors import HookFailed, SetupError
from ctl_core.evaluate import trace_evaluation
from ctl_core.hooks import Hook
from ctl_core.numerics.joining import for_host, unlike
from ctl_core.numerics.not_finite import Noted, Notes
from ctl_core.numerics.randomness import random_ops
from ctl_core.run_state.tracking import plain_variable, variable_name, written_variables


class StepFunctions:
    """The graph functions of the inner loop, traced once for each state of frozen layers.

    Attributes:
        devices: this process's replica devices
        noted: which steps of the last call had losses that are not finite; None: nobody looks
    """

    def __init__(self, state: State, console: Console, summaries: tf.summary.SummaryWriter) -> None:
        """``summaries`` writes those of the hooks in the graph."""
        self._summaries = summaries
        self.devices = tuple(state.strategy.extended.worker_devices)
        self.noted: Noted | None = None
        self._state = state
        self._console = console
        self._told: set[str] = set()
        self._traced: list[Any] = []
        self._run: dict[tuple[bool, ...], Any] = {}
        self._observe: dict[tuple[tuple[bool, ...], frozenset[str]], Any] = {}
        self._frozen = tuple(state.freezing.flags())

    def refresh(self) -> None:
        """Notices what hooks have frozen or unfrozen; the next step uses a graph of its own."""
        self._frozen = tuple(self._state.freezing.flags())

    @property
    def frozen(self) -> int:
        """The state of frozen layers as a number."""
        return hash(self._frozen)

    def run(self, steps: int) -> None:
        """Takes ``steps`` steps in one graph call."""
        if self._frozen not in self._run:
            self._run[self._frozen] = self._concrete(self._trace_run())
        self._note(self._run[self._frozen](tf.constant(steps, tf.int64)))

    def observe(self, wanted: frozenset[str], due: Sequence[Hook] = ()) -> dict[str, Any]:
        """Takes one step and returns the wanted values of it, eager, for the hooks that are due."""
        key = (self._frozen, wanted)
        if key not in self._observe:
            self._observe[key] = self._concrete(self._trace_observe(wanted))
        self._state.data.watched += 1
        pieces, found, _, noted = self._observe[key]()
        self._note(noted)
        for name, several in pieces.items():
            found[name] = tf.nest.map_structure(lambda *parts: for_host(parts), *several)
            if name not in self._told and (shapes := unlike(several)):
                self._told.add(name)
                hooks = [f"{hook.name} ({hook.where})" for hook in due if name in hook.arguments]
                self._console.say(
                    f"{', '.join(hooks)}: {name} has shapes {shapes} on the replicas or "
                    "micro-batches of this step, so that it is a tf.RaggedTensor (a list where "
                    "even the rank differs); where all fit, it is a tensor."
                )
        return found  # type: ignore[no-any-return]

    def trace_counts(self) -> list[int]:
        """Returns how often each graph function was traced."""
        return [function.experimental_get_tracing_count() for function in self._traced]

    def _concrete(self, function: Any) -> Any:
        """Traces; the concrete function spares each call the search for the right trace."""
        self._traced.append(function)
        return function.get_concrete_function()

    def check(self) -> Any:
        """Traces a step and the evaluation before training starts, and warns of what shows.

        Returns:
            The graph of a step.

        Raises:
            SetupError: a hook raised, or returned something else than it should.
        """
        state = self._state
        for warning in check_writes(state.writes, state.parts, state.found, state.strategy):
            self._console.warn(warning)
        try:
            function = self._run[self._frozen] = self._concrete(self._trace_run())
            graph = function.graph
            if self._state.evaluation is not None:
                trace_evaluation(
                    self._state.evaluation,
                    self._state.strategy,
                    list(self._state.found.variables.values()),
                )
        except HookFailed as error:
            raise SetupError(str(error)) from error.__cause__
        except Exception as error:
            if made := re.search(r"Unable to lift tensor <tf.Tensor '([^']*)/Init", str(error)):
                raise SetupError(
                    f"a hook makes the variable {_base_name(made.group(1))} inside the step; make "
                    "it in create_model. keras.random functions take one of the model's as seed."
                ) from error
            raise
        if names := self._state.parts.without_gradient:
            self._console.warn(
                f"the loss does not depend on {', '.join(names[:5])}"
                f"{' and others' if len(names) > 5 else ''}: not updated."
            )
        for warning in _unused(self._state, graph):
            self._console.warn(warning)
        if found := random_ops(graph):
            self._console.warn(
                f"a hook or the model draws random numbers with {', '.join(found)}, whose state no "
                "checkpoint can hold: a resumed run will draw others. Use a "
                "keras.random.SeedGenerator of the model, or tf.random.stateless_*."
            )
        return graph

    def _trace_run(self) -> Any:
        @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
        def run(steps: tf.Tensor) -> tf.Tensor:
            before = self._state.step_variable.read_value()
            notes = Notes(steps)

            def body(done: tf.Tensor, arrays: Any) -> tuple[tf.Tensor, Any]:
                step = before + done + 1
                with self._summaries.as_default(step):
                    found = take_update(self._state.parts, self._state.data, frozenset(), step=step)
                if "noted" in found:
                    arrays = notes.write(arrays, done, self._of_replicas(found["noted"]))
                return done + 1, arrays

            start = (tf.constant(0, tf.int64), notes.arrays)
            _, arrays = tf.while_loop(lambda done, _: done < steps, body, start)
            self._state.step_variable.assign_add(steps)
            return notes.summary(arrays, before)

        return run

    def _note(self, summary: tf.Tensor) -> None:
        """Keeps what a graph call has noted."""
        if self._state.parts.notes_losses:
            self.noted = Noted(*summary.numpy().tolist())

    def _of_replicas(self, values: Any) -> list[Any]:
        """Returns the structure that each of this process's replicas has."""
        results = self._state.strategy.experimental_local_results
        return [
            tf.nest.map_structure(lambda v, i=i: results(v)[i], values)
            for i in range(len(self.devices))
        ]

    def _trace_observe(self, wanted: frozenset[str]) -> Any:
        results = self._state.strategy.experimental_local_results

        @tf.function(autograph=False)
        def observe() -> tuple[dict[str, Any], dict[str, Any], Any, tf.Tensor]:
            before = self._state.step_variable.read_value()
            notes = Notes(1)
            with self._summaries.as_default(before + 1):
                values = take_update(self._state.parts, self._state.data, wanted, True, before + 1)
            self._state.step_variable.assign(before + 1)
            arrays = notes.arrays
            if "noted" in values:
                arrays = notes.write(arrays, 0, self._of_replicas(values.pop("noted")))
            whole: dict[str, Any] = {}
            for name in ("output", "batch"):  # one replica's micro-batches after the other's
                if name in values:
                    parts = zip(*map(self._of_replicas, values.pop(name)), strict=True)
                    whole[name] = list(itertools.chain.from_iterable(parts))
            reduced = tf.nest.map_structure(lambda v: results(v)[0], values)
            # What is the same on all replicas is returned of all, though one is used: TensorFlow
            # rewrites arithmetic whose result nobody asks for, which rounds differently, and then
            # the replicas' variables would no longer be equal.
            rest = [results(v)[1:] for v in tf.nest.flatten(values)]
            return whole, reduced, rest, notes.summary(arrays, before)

        return observe


def _unused(state: State, graph: Any) -> list[str]:
    """Warns of a rate that reaches nobody, and of variables that nobody trains."""
    results = state.strategy.experimental_local_results
    used = set(map(id, graph.variables))
    written, _ = written_variables(state.strategy, state.found.variables.values(), graph)
    changed = set(map(id, written))
    trained = {id(plain_variable(v)) for several in state.parts.trained.values() for v in several}
    of_layers = set(map(id, state.found.keras_variables()))
    free = {id(v) for layer in state.found.layers for v in layer.trainable_variables}
    idle = []
    for path, variable in state.found.variables.items():
        plain = plain_variable(variable)
        trainable = id(variable) in free or id(variable) not in of_layers
        if (
            trainable
            and getattr(variable, "trainable", False)
            and plain.dtype.is_floating
            and id(plain) not in trained
            and variable_name(variable) not in state.parts.without_gradient
            and any(id(part) in used for part in results(plain))
            and id(plain) not in changed
        ):
            idle.append(path)
    warnings = []
    if idle:
        more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
        warnings.append(
            f"the step uses {', '.join(idle[:3])}{more}, trainable but trained by no objective; "
            "return them with the trainable_vars of grad_pre, or make them with trainable=False."
        )
    if not any(id(part) in used for part in results(state.lr.variable)):
        hook = state.hooks.create_opt
        warnings.append(
            f"{hook.name} ({hook.where}): makes no use of lr, so that learning_rate and lr.assign "
            "change nothing; pass lr to the optimizer if they should."
        )
    return warnings


def _base_name(name: str) -> str:
    """Leaves out which replica's copy of a variable the name means."""
    return name.split(":")[0].split("/replica_")[0]
