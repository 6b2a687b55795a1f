"""Gives each leaf different random numbers, and finds the ops that draw random numbers.

Keras keeps the state of a SeedGenerator, such as that of a Dropout layer, in a mirrored variable.
By default, every replica would therefore draw the same numbers (Keras pull request 20612).
"""

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from ctl_core.compat import draw_from, get_seed_generator, keep_op_seed
from ctl_core.numerics.variables import unwrap
from ctl_core.types import Count

# Distinguishes the seeds of ``derive_generator_states`` from seeds that hooks compute from a step
# number.
_TAG = 0x6C6F676963616C


def derive_generator_states(
    initial_states: Sequence[np.ndarray], purpose: int, step: Count, turn: Count, leaves: int
) -> tf.Tensor:
    """Returns the states of random generators in a step, for each leaf.

    The states depend only on the arguments, and therefore not on the number of devices. Generators
    with equal initial states get equal states, just as generators with equal seeds draw equal
    numbers.

    Args:
        initial_states: the state of each generator at the beginning of the run, an integer vector
        purpose: 0 for training, 1 for an evaluation
        step: the number of the step, or the step at which the evaluation takes place
        turn: the index of the turn, or the number of the batch in an evaluation
        leaves: the number of leaves

    Returns:
        An int64 tensor of shape [leaves + 2, generators, length]. The first entries are the states
        for each leaf. The last two are the states for work that every device does in the same way,
        such as the update. If a state is shorter than ``length``, the numbers at
        its end have to be ignored.
    """
    length = max(len(state) for state in initial_states)
    initial = np.stack([np.resize(state, length).astype("int64") for state in initial_states])
    seed = tf.stack([tf.cast(step, tf.int64), 2 * tf.cast(turn, tf.int64) + purpose])
    # With a fixed algorithm, a seed gives the same numbers on CPUs and GPUs.
    numbers = tf.random.stateless_uniform(
        [leaves + 2, 1, length],
        tf.bitwise.bitwise_xor(seed, tf.constant(_TAG, tf.int64)),
        minval=None, maxval=None, dtype=tf.int64, alg="philox",
    )  # fmt: skip
    return tf.bitwise.bitwise_xor(numbers, tf.constant(initial))


def find_drawing_layers(layers: list[keras.Layer], drawn: Collection[int]) -> list[str]:
    """Returns the class names of the layers that draw random numbers in training.

    Args:
        layers: the layers of a run
        drawn: the ids of the generator variables that the forward pass reads. A layer may have a
            generator that it does not use, such as the generator of a GRUCell without dropout.
    """
    kinds = set()
    for layer in layers:
        for value in vars(layer).values():
            is_generator = isinstance(value, keras.random.SeedGenerator)
            if is_generator and id(unwrap(value.state)) in drawn:
                kinds.add(type(layer).__name__)
    return sorted(kinds)


def find_random_ops(graph: tf.Graph, others: frozenset[str] = frozenset()) -> list[str]:
    """Returns the types of the ops that keep a random state, which checkpoints cannot save.

    These ops have an attribute ``seed``, whereas the ops of ``tf.random.stateless_*`` have a seed
    as an input. Ops that are configured not to draw random numbers are left out.

    Args:
        graph: the graph to search, including the functions that it calls
        others: additional types of ops to look for
    """
    return sorted({node.op for node in list_nodes(graph) if node.op in others or _draws(node)})


def list_nodes(graph: tf.Graph) -> list[Any]:
    """Returns the NodeDefs of the ops in a graph, and in the functions that it calls."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    return nodes


def _draws(node: Any) -> bool:
    """Returns whether a NodeDef is an op that draws random numbers from its own state."""
    if "seed" not in node.attr or node.attr["deterministic"].b:
        return False
    if node.op == "ComputeAccidentalHits":  # looks up the negatives that a loss has drawn
        return False
    # The cuDNN ops of recurrent layers always have a seed, but draw random numbers only for
    # dropout.
    return "dropout" not in node.attr or node.attr["dropout"].f != 0.0


def find_seeded_op(operations: Iterable[tf.Operation]) -> tf.Operation | None:
    """Returns the first op that draws random numbers from a seed of its own; None if none does."""
    has_seed: dict[str, bool] = {}  # by the type of the op
    for op in operations:
        if op.type not in has_seed:
            has_seed[op.type] = any(attribute.name == "seed" for attribute in op.op_def.attr)
        if has_seed[op.type] and _draws(op.node_def):
            return op
    return None


class TypedOp(Protocol):
    """An op of a graph, or an object that describes one."""

    @property
    def type(self) -> str:
        """The type of the op."""


def draws_random_numbers(op: TypedOp) -> bool:
    """Returns whether an op draws random numbers, from a state or from a seed passed as input."""
    kinds = ("Random", "Truncated", "Multinomial", "RngReadAndSkip", "Stateful")
    return any(kind in op.type for kind in kinds) and not op.type.endswith("PartitionedCall")


def is_noise_of_replica(op: tf.Operation) -> bool:
    """Returns whether an op draws random numbers that may differ between replicas.

    Stateless ops draw the same numbers on all replicas, unless their shape depends on the number of
    rows of a replica. The random ops of Keras are stateless, too: they read their seeds from
    variables.
    """
    if not draws_random_numbers(op):
        return False
    if "Stateless" not in op.type:
        return True
    return not all(output.shape.is_fully_defined() for output in op.outputs)


@contextmanager
def keep_seeds() -> Iterator[None]:
    """Restores the random states of Python, NumPy, TensorFlow and Keras when the context ends.

    Inside the context, code that draws random numbers from TensorFlow or Keras has to set a seed.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with draw_from(get_seed_generator()), keep_op_seed():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
