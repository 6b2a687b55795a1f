"""Names of TensorFlow and Keras that are not public, one function each.

tests/engine/test_compat.py fails if one of them changes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


def flatten_layers(model: Any) -> list[keras.Layer]:
    """Returns a Keras model and all its layers, parents first; of anything else, nothing.

    ``_flatten_layers``: Keras has no public way to nested layers.
    """
    return list(model._flatten_layers()) if isinstance(model, keras.Layer) else []


def global_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the generator that ``keras.random`` draws from without a seed, if it has drawn."""
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("global_seed_generator")


_summed = threading.local()


@contextlib.contextmanager
def gradients_are_summed() -> Iterator[None]:
    """Where gradients are summed over the replicas already: Keras optimizers do not sum them again.

    Keras has no public switch for that: in a replica context, whatever optimizer is applied calls
    its ``_all_reduce_sum_gradients``. It is replaced on the class, since an optimizer may be inside
    any object, by one that looks whether its thread is in here: each replica is traced in a thread
    of its own.
    """
    kind = keras.optimizers.Optimizer
    if not hasattr(kind._all_reduce_sum_gradients, "of_keras"):
        of_keras = kind._all_reduce_sum_gradients

        @functools.wraps(of_keras)
        def sum_unless_summed(self: Any, grads_and_vars: Any) -> Any:
            here = getattr(_summed, "depth", 0)
            return grads_and_vars if here else of_keras(self, grads_and_vars)

        sum_unless_summed.of_keras = of_keras  # type: ignore[attr-defined]
        kind._all_reduce_sum_gradients = sum_unless_summed
    _summed.depth = getattr(_summed, "depth", 0) + 1
    try:
        yield
    finally:
        _summed.depth -= 1


def is_deterministic() -> bool:
    """Whether op determinism is on in this process, by us or by the user; it cannot be put off."""
    from tensorflow.python.framework import config

    return bool(config.is_op_determinism_enabled())


@contextlib.contextmanager
def global_seed_generator_kept() -> Iterator[None]:
    """Around ``keras.utils.set_random_seed``, which forgets that generator."""
    from keras.src.backend.common import global_state

    before = global_seed_generator()
    yield
    global_state.set_global_attribute("global_seed_generator", before)


def written_resources(graph: Any) -> list[Any]:
    """Returns the handles, of what a function's graph captures, that it does not only read.

    TensorFlow notes on each op that calls a function, in an attribute, which of its resources are
    only read; one without that note is taken to write.
    """
    reading = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
    written = set()
    for op in graph.get_operations():
        resources = [i for i, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource]
        if not resources or op.type in reading:
            continue
        try:
            read_only = set(op.get_attr("_read_only_resource_inputs"))
        except ValueError:
            read_only = set()
        written |= {op.inputs[i].name for i in resources if i not in read_only}
    return [outer for outer, inner in graph.captures if inner.name in written]
