"""Random numbers: different ones on each replica, and the ops that draw them.

Keras keeps the state of a SeedGenerator, such as that of a Dropout layer, in a mirrored variable.
Every replica would draw the same numbers (Keras pull request 20612).
"""

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.cluster.task import Task
from ctl_core.compat import draw_from, get_seed_generator, keep_op_seed
from ctl_core.numerics.variables import unwrap
from ctl_core.types import Count

# The difference between the seeds of neighboring replicas: a number by which seeds rarely differ.
_STRIDE = 1_000_003
# Distinguishes the seeds of ``derive_generator_states`` from those that hooks compute from a step.
_TAG = 0x6C6F676963616C


def fold_in_replica_id(
    generators: list[tf.Variable], strategy: tf.distribute.Strategy, task: Task
) -> None:
    """Gives each replica seeds of its own, computed from those of the first replica.

    Called once, after the model was created and restored. Until then, all replicas have the seeds
    of the first one.

    Args:
        generators: the states of Keras seed generators, int64 vectors [seed, counter]
        strategy: whose replicas draw
        task: the process in its cluster
    """
    for state in generators:
        components = strategy.experimental_local_results(state)
        first_state = components[0].numpy()
        first_replica = task.index * len(components)
        for replica, component in enumerate(components, start=first_replica):
            component.assign(first_state + tf.constant([replica * _STRIDE, 0], component.dtype))


def derive_generator_states(
    initial_states: Sequence[np.ndarray], purpose: int, step: Count, turn: Count, replicas: int
) -> tf.Tensor:
    """Returns the states of random generators in a step, for each logical replica.

    They are a function of the arguments alone, so they do not depend on the number of devices.
    Generators with equal initial states get equal states, as generators with equal seeds do.

    Args:
        initial_states: the state of each generator when the run began, an integer vector
        purpose: 0 for training, 1 for an evaluation
        step: the number of the step, or of the step that is evaluated
        turn: the index of the turn, or the number of the batch in an evaluation
        replicas: the number of logical replicas

    Returns:
        int64[replicas + 2, generators, length]: the states for each logical replica, and two more
        for what all devices do alike. A state that is shorter than the longest one ends with
        numbers to be left out.
    """
    length = max(len(state) for state in initial_states)
    initial = np.stack([np.resize(state, length).astype("int64") for state in initial_states])
    seed = tf.stack([tf.cast(step, tf.int64), 2 * tf.cast(turn, tf.int64) + purpose])
    # With a fixed algorithm, a seed has the same numbers on CPUs and GPUs.
    numbers = tf.random.stateless_uniform(
        [replicas + 2, 1, length],
        tf.bitwise.bitwise_xor(seed, tf.constant(_TAG, tf.int64)),
        minval=None, maxval=None, dtype=tf.int64, alg="philox",
    )  # fmt: skip
    return tf.bitwise.bitwise_xor(numbers, tf.constant(initial))


def find_drawing_layers(layers: list[keras.Layer], drawn: Collection[int]) -> list[str]:
    """Returns the kinds of the layers that draw random numbers in training.

    Args:
        layers: the layers of a run
        drawn: the ids of the variables of generators that the forward pass reads. A layer may have
            a generator that it does not use, such as a GRUCell without dropout.
    """
    kinds = set()
    for layer in layers:
        for value in vars(layer).values():
            is_generator = isinstance(value, keras.random.SeedGenerator)
            if is_generator and id(unwrap(value.state)) in drawn:
                kinds.add(type(layer).__name__)
    return sorted(kinds)


def find_random_ops(graph: tf.Graph, others: frozenset[str] = frozenset()) -> list[str]:
    """Returns the types of ops that keep a random state, which no checkpoint can hold.

    They are recognized by their attribute ``seed``; the ops of ``tf.random.stateless_*`` take a
    seed as an input instead. Ops that were told not to draw are left out.

    Args:
        graph: is searched, with the functions that it calls
        others: more types of ops to look for
    """
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    return sorted({node.op for node in nodes if node.op in others or _draws(node)})


def _draws(node: Any) -> bool:
    """Returns whether a NodeDef is an op that draws from a random state of its own."""
    if "seed" not in node.attr or node.attr["deterministic"].b:
        return False
    # cuDNN's recurrent layers have a seed, and draw only if they drop something out.
    return "dropout" not in node.attr or node.attr["dropout"].f != 0.0


def draws_random_numbers(op: tf.Operation) -> bool:
    """Returns whether an op draws random numbers, of a state or of a seed that is its input."""
    kinds = ("Random", "Truncated", "Multinomial", "RngReadAndSkip", "Stateful")
    return any(kind in op.type for kind in kinds) and not op.type.endswith("PartitionedCall")


def is_noise_of_replica(op: tf.Operation) -> bool:
    """Returns whether an op draws random numbers that may differ between replicas.

    Stateless ops draw the same numbers everywhere if nothing in their shape depends on the rows of
    a replica. Those of Keras are stateless, too: their seeds are variables.
    """
    if not draws_random_numbers(op):
        return False
    if "Stateless" not in op.type:
        return True
    return not all(output.shape.is_fully_defined() for output in op.outputs)


@contextmanager
def keep_seeds() -> Iterator[None]:
    """Restores the random states of Python, NumPy, TensorFlow and Keras afterwards.

    Code that draws from TensorFlow or Keras inside this context has to set a seed.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with draw_from(get_seed_generator()), keep_op_seed():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
