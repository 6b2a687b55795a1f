"""Sets the states of the random generators for each leaf of a step.

With a single leaf, generators draw in sequence. With several, the states with which a leaf begins
depend only on the initial states of the run, on the step and on the index of the leaf. N devices
with A micro-batches each therefore draw the same numbers as N x A devices.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import tensorflow as tf

from ctl_core.model.components import Components, StepContext
from ctl_core.numerics.packing import find_length
from ctl_core.numerics.randomness import derive_generator_states
from ctl_core.types import Count

# Values of the argument ``purpose`` of ``derive_generator_states``.
TRAINING = 0
EVALUATION = 1
# Special values of the argument ``index`` of ``GeneratorStates.assign``, which is otherwise the
# index of a leaf. Generators keep the states of the update until the next step. Logical replicas
# set the states between steps separately, as they did in version 2.0.
UPDATE = -1
BETWEEN_STEPS = -2


class GeneratorStates:
    """Derives and assigns the states of random generators; see ``derive_generator_states``.

    Attributes:
        sets_states: whether there are states to assign; False if generators draw in sequence
    """

    def __init__(self, components: Components, leaves: int, drawn: Collection[int]) -> None:
        """Finds the generators whose states are set.

        Args:
            components: the components of the run
            leaves: the number of leaves
            drawn: the ids of the generators that are drawn from. With logical replicas, the states
                of all generators are set.
        """
        generators = components.generators
        pairs = list(zip(generators.variables, generators.initial_states, strict=True))
        if components.shape.logical_replicas is None:
            pairs = [pair for pair in pairs if id(pair[0]) in drawn and leaves > 1]
        self.sets_states = bool(pairs)
        self._pairs = pairs
        self._leaves = leaves

    def derive(self, purpose: int, step: Count, turn: Count) -> tf.Tensor | None:
        """Returns the states of an update, or of a batch of an evaluation, for each leaf.

        Args:
            purpose: ``TRAINING`` or ``EVALUATION``
            step: the number of the step
            turn: the index of the turn, or the number of the batch in an evaluation

        Returns:
            The states; None if there are no states to assign.
        """
        if not self.sets_states:
            return None
        initial_states = [initial_state for _, initial_state in self._pairs]
        with tf.device("CPU:0"):
            return derive_generator_states(initial_states, purpose, step, turn, self._leaves)

    def assign(self, states: tf.Tensor | None, index: Count) -> None:
        """Sets the states of all generators, on one device.

        Args:
            states: the result of ``derive``
            index: the index of a leaf, ``UPDATE`` or ``BETWEEN_STEPS``
        """
        if states is None:
            return
        # A negative index counts from the end, as in a Python list.
        states = tf.gather(states, index % find_length(states))
        rows = tf.unstack(states, len(self._pairs))  # one op for all generators
        for (variable, initial_state), row in zip(self._pairs, rows, strict=True):
            if row.shape[0] != len(initial_state):
                row = row[: len(initial_state)]
            variable.assign(tf.cast(row, variable.dtype))

    def are_between_steps(self, states: tf.Tensor | None) -> bool:
        """Returns True if the generators have the states that they have after a step."""
        for number, (variable, initial_state) in enumerate(self._pairs):
            assert states is not None
            state = states[BETWEEN_STEPS, number, : len(initial_state)]
            if not np.array_equal(tf.cast(state, variable.dtype), variable.numpy()):
                return False
        return True


def choose_generators(context: StepContext) -> GeneratorStates:
    """Returns the generators whose states are set in a step.

    In a step without noise, no states are set, so that the step writes the same variables on any
    number of devices.
    """
    components = context.components
    drawn: Collection[int] = components.generators.drawn
    if context.quiet:
        drawn = ()
    return GeneratorStates(components, components.shape.leaves, drawn)


def has_states_after(components: Components, step: int, leaves: int) -> bool:
    """Returns True if all generators have the states that follow from their initial states.

    Args:
        components: the components of a run
        step: the last step that was taken
        leaves: the number of leaves in which the step was computed
    """
    generators = components.generators
    if step == 0:
        states = [variable.numpy() for variable in generators.variables]
        return all(map(np.array_equal, states, generators.initial_states))
    last_turn = max(len(components.hooks.turns) - 1, 0)
    states_after = GeneratorStates(components, leaves, generators.drawn)
    return states_after.are_between_steps(states_after.derive(TRAINING, step, last_turn))
