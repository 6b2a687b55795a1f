"""Sets the states of the random generators for each leaf of a step.

With a single leaf, generators draw in sequence. With several, the states with which a leaf begins
depend only on the initial states of the run, on the step and on the index of the leaf. N devices
with A micro-batches each therefore draw the same numbers as N x A devices.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import tensorflow as tf

from ctl_core.model.components import Components
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
    """The states of the random generators in a step, or in the evaluation of a batch.

    Attributes:
        sets_states: whether there are states to assign; False if generators draw in sequence
    """

    def __init__(
        self,
        components: Components,
        purpose: int,
        step: Count,
        turn: Count,
        leaves: int,
        drawn: Collection[int],
    ) -> None:
        """Derives the states.

        Args:
            components: the components of the run
            purpose: see ``derive_generator_states``, also for the next three arguments
            step: the number of the step
            turn: the index of the turn, or the number of the batch in an evaluation
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
        if pairs:
            initial_states = [initial_state for _, initial_state in pairs]
            with tf.device("CPU:0"):
                self._states = derive_generator_states(initial_states, purpose, step, turn, leaves)

    def assign(self, index: Count) -> None:
        """Sets the states of all generators, on one device.

        Args:
            index: the index of a leaf, ``UPDATE`` or ``BETWEEN_STEPS``
        """
        if not self.sets_states:
            return
        # A negative index counts from the end, as in a Python list.
        states = tf.gather(self._states, index % find_length(self._states))
        rows = tf.unstack(states, len(self._pairs))  # one op for all generators
        for (variable, initial_state), row in zip(self._pairs, rows, strict=True):
            if row.shape[0] != len(initial_state):
                row = row[: len(initial_state)]
            variable.assign(tf.cast(row, variable.dtype))

    def are_between_steps(self) -> bool:
        """Returns True if the generators have the states that they have after a step."""
        for number, (variable, initial_state) in enumerate(self._pairs):
            state = self._states[BETWEEN_STEPS, number, : len(initial_state)]
            if not np.array_equal(tf.cast(state, variable.dtype), variable.numpy()):
                return False
        return True


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
    states_after = GeneratorStates(components, TRAINING, step, last_turn, leaves, generators.drawn)
    return states_after.are_between_steps()
