"""What a run has that ``create_ckpt`` leaves out: kept in the engine's part of a checkpoint.

run_state/tracking.py finds everything that belongs to a run; a ``tf.train.Checkpoint`` holds what
TensorFlow's own tracking follows from the objects that it was given. The rest is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ctl_core.errors import RunError, SetupError
from ctl_core.hooks import Hook
from ctl_core.numerics.randomness import generator_states
from ctl_core.run_state.tracking import (
    find,
    plain_variable,
    tf_variable,
    variable_name,
    written_variables,
)
from ctl_core.state import State
from ctl_core.units import Units

# What a resumed run cannot do without; the rest is of hooks, which may change between two starts.
_NEEDED = ("train_model", "train_loss", "optimizer")


class Remainder:
    """The variables that the engine saves because the user's part does not hold them.

    Attributes:
        names: the paths of attributes that lead to them, in the order of ``saved``
    """

    def __init__(self, state: State) -> None:
        self._state = state
        held = {id(plain_variable(v)) for v in tf.train.TrackableView(state.ckpt).descendants()}
        held |= set(map(id, own_variables(state)))
        self._variables = {
            path: variable
            for path, variable in state.found.variables.items()
            if id(plain_variable(variable)) not in held
        }
        self.names = list(self._variables)
        # What is summed up when read, by all processes at once, is written as that sum.
        self._sums = {
            path: tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
            for path, variable in self._variables.items()
            if is_summed(v := plain_variable(variable))
        }
        self._take: Any = None
        known = (*map(plain_variable, state.found.variables.values()), *own_variables(state))
        self._known = set(map(id, known))
        self._ran: set[int] = set()
        self._looked: int | None = None  # at so many traces; None: hooks have run since
        every = state.hooks.every_steps.values()
        self._deferred = any(hook.deferred for hooks in every for hook in hooks)  # run at any time

    def saved(self, names: list[str]) -> dict[str, Any]:
        """Returns what is written, or read, for the paths in ``names``, by their position."""
        return {
            str(position): self._sums.get(path, self._variables[path])
            for position, path in enumerate(names)
            if path in self._variables
        }

    def take(self) -> None:
        """Sums up what each replica keeps for itself; every process of a cluster must call it."""
        if not self._sums:
            return
        if self._take is None:

            @tf.function(autograph=False)
            def take() -> None:
                for path, total in self._sums.items():
                    total.assign(plain_variable(self._variables[path]).read_value())

            self._take = take
        self._take()

    def put_back(self, names: list[str]) -> None:
        """Gives the first of all replicas the sums that were read, and the others zero."""
        for path in names:
            if (total := self._sums.get(path)) is None:
                continue
            variable = plain_variable(self._variables[path])
            of_sum = variable.aggregation == tf.VariableAggregation.SUM
            parts = self._state.strategy.experimental_local_results(variable)
            for index, part in enumerate(parts):
                first = index == 0 and self._state.cluster.task.chief
                part.assign(total if first or not of_sum else tf.zeros_like(total))

    def compare(self, names: list[str], shapes: list[list[int] | None]) -> tuple[list[str], str]:
        """Compares with what a checkpoint has.

        Args:
            names: the paths in the checkpoint
            shapes: of each; None for what is no variable

        Returns:
            What does not fit the model, the loss or the optimizer; and a warning about variables
            of hooks that came or went, or an empty text.
        """
        differences: list[str] = []
        changes: list[str] = []
        for path in sorted({*names, *self.names}):
            needed = path.split("/")[0] in _NEEDED
            if path not in self._variables:
                (differences if needed else changes).append(f"{path} is gone")
            elif path not in names:  # an average cannot begin in the middle of a run
                of_average = path.startswith("eval_model/")
                (differences if needed or of_average else changes).append(f"{path} is new")
            else:
                shape = getattr(self._variables[path], "shape", None)
                there = shapes[names.index(path)]
                if shape is not None and there is not None and list(shape) != there:
                    differences.append(f"{path} has shape {list(shape)}, in the checkpoint {there}")
        return differences, "; ".join(changes[:5])

    def after_hooks(self, hooks: Sequence[Hook], step: int) -> None:
        """Looks after the first run of each hook whether it has made variables.

        Raises:
            RunError: it has.
        """
        if hooks:
            self._looked = None
        if not self._ran.issuperset(map(id, hooks)):
            self._ran |= set(map(id, hooks))
            self._look(step)

    def check_nothing_new(self, step: int) -> bool:
        """Looks whether hooks have made variables since training began.

        Costs some microseconds for each object that the run is made of; nothing where no hook
        has run or was traced since the last time.

        Returns:
            Whether one has, so that it had to look.

        Raises:
            RunError: they have.
        """
        if self._looked == self._state.clock.traced:
            return False
        self._look(step)
        if not self._deferred:
            self._looked = self._state.clock.traced
        return True

    def _look(self, step: int) -> None:
        others = ("metrics", "ckpt")  # made anew at each start, and saved whatever it holds
        roots = {name: root for name, root in self._state.roots.items() if name not in others}
        new = [
            path
            for path, variable in find(roots).variables.items()
            if id(plain_variable(variable)) not in self._known
        ]
        if new:
            raise RunError(
                f"after step {step}, {new[0]}{f' (and {len(new) - 1} more)' * (len(new) > 1)} is "
                "new: a hook made it while training, and a resumed run would not have it; make it "
                "in create_model, as an attribute of train_model, or where callbacks.py begins, "
                "and build it there."
            )


def check_variables_of_step(state: State, graph: Any) -> None:
    """Looks at the variables that a step uses.

    Args:
        state: of the run
        graph: that of a traced step

    Raises:
        SetupError: nothing leads to one of them, so that no checkpoint would hold it; or
            several replicas would write to one that they share.
    """
    results = state.strategy.experimental_local_results
    own = {id(part) for v in own_variables(state) for part in (v, *results(v))}
    known = set(own)
    for variable in map(tf_variable, state.found.variables.values()):
        known |= {id(variable), *map(id, results(variable))}
    for variable in graph.variables:
        if id(variable) not in known:
            raise SetupError(
                f"the step uses the variable {_described(variable)}, but nothing leads to it "
                "from what create_model, create_loss and create_opt returned or from a global "
                "of callbacks.py, so that no checkpoint would hold it: keep it, or the object "
                "that has it, in an attribute of train_model."
            )
    written, _ = written_variables(state.strategy, _shared(state), graph)
    for variable in written:
        if id(variable) not in own:
            raise SetupError(
                f"the step writes to the variable {_described(variable)}, which was made "
                f"outside of the hooks that create something, so that "
                f"{state.context.replicas} replicas share it and each would write to it: "
                "make it in create_model."
            )


def _shared(state: State) -> list[Any]:
    """Returns the variables that have no part of their own for each replica."""
    if state.context.replicas == 1:
        return []
    plain = map(tf_variable, state.found.variables.values())
    return [v for v in plain if not isinstance(v, tf.distribute.DistributedValues)]


def own_variables(state: State) -> list[Any]:
    """The engine's own variables, which it saves by itself or need not save."""
    data = state.data
    own = [state.step_variable, state.lr.variable, data.waited, data.counted, data.tally.variable]
    if isinstance(data.iterator, Units):
        own += data.iterator.variables
    if state.context.rate_schedule is not None:
        own += state.context.rate_schedule.variables
    if state.context.loss_scale is not None:
        own += state.context.loss_scale.variables
    return [v for v in (*own, *generator_states(state.train_model)) if v is not None]


def _described(variable: Any) -> str:
    return f"{variable_name(variable).split('/replica_')[0]} {list(variable.shape)}"


def is_summed(variable: Any) -> bool:
    """Whether each replica keeps a value of its own, and reading adds them up."""
    synchronization = getattr(variable, "synchronization", None)
    return synchronization in (tf.VariableSynchronization.ON_READ, "on_read")
