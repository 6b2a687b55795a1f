"""Random numbers: other ones on each replica, and what draws them.

Keras keeps the state of a SeedGenerator, one in each Dropout layer say, in a mirrored variable, so
that every replica would draw the same numbers (Keras pull request 20612).
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.cluster.task import Task
from ctl_core.compat import draw_from, get_seed_generator, keep_op_seed

# What the seeds of two neighbouring replicas differ by; any number that seeds rarely differ by.
_STRIDE = 1_000_003


def fold_in_replica_id(generators: list[Any], strategy: tf.distribute.Strategy, task: Task) -> None:
    """Gives each replica seeds of its own, worked out from those of the first of all.

    Done once, after the model is made and restored: until then all have those of the first. The
    ``generators`` are the states of Keras seed generators.
    """
    for state in generators:
        own = strategy.experimental_local_results(state)
        first = own[0].numpy()
        for index, replica in enumerate(own, start=task.index * len(own)):
            replica.assign(first + tf.constant([index * _STRIDE, 0], replica.dtype))


def find_random_ops(graph: tf.Graph, others: frozenset[str] = frozenset()) -> list[str]:
    """Names the types of ops in a graph, or in a function that it calls, that keep a random state.

    No checkpoint can hold it. They are told by their attribute ``seed``: the ops of
    ``tf.random.stateless_*`` take a seed as an input. One that was told not to draw is left out;
    ``others`` are more types of ops to look for.
    """

    def draws(node: Any) -> bool:
        dropout = node.attr["dropout"].f if "dropout" in node.attr else 1.0  # cuDNN's layers
        return "seed" in node.attr and dropout != 0.0 and not node.attr["deterministic"].b

    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    return sorted({node.op for node in nodes if node.op in others or draws(node)})


@contextmanager
def keep_seeds() -> Iterator[None]:
    """Afterwards, what Python, NumPy, TensorFlow and Keras draw is as if nothing were done within.

    What draws from TensorFlow or Keras within has to set a seed.
    """
    before = random.getstate(), np.random.get_state()
    try:
        with draw_from(get_seed_generator()), keep_op_seed():
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
