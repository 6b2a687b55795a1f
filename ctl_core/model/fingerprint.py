"""Compares the forward passes that the processes of a cluster have traced.

The fingerprint of a graph covers the types of its ops, their numeric attributes and the values of
constants. It ignores names and strings, because paths may differ between machines. It also ignores
the order of the ops, because iterating over a Python set has no fixed order.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.cluster.facts import Facts
from ctl_core.cluster.sync import Cluster
from ctl_core.hooks.hooks import Hooks
from ctl_core.model.failures import find_line

# The kinds of attributes that the fingerprint covers, by their names in TensorFlow's AttrValue.
_NUMERIC = ("i", "f", "b")


def compare_forward(cluster: Cluster, hooks: Hooks, operations: Iterable[tf.Operation]) -> None:
    """Refuses to train if the forward pass differs between the processes.

    Args:
        cluster: the processes
        hooks: the hooks of the run, which the message names
        operations: the ops of the forward pass, traced as replica 0 on each process

    Raises:
        SetupError: there is a difference; the message names the process, the ops and their lines.
    """
    if cluster.task.processes == 1:
        return
    operations = list(operations)
    fingerprint = compute_fingerprint(operations)
    if len({*cluster.share(fingerprint)}) == 1:
        return
    cluster.compare(
        _count_by_line(operations, hooks),
        "the forward pass is not the same on every process of the cluster",
        "hooks must build the same graph on all of them, whatever their environment.",
        absent="0×",
    )


def compute_fingerprint(operations: Iterable[tf.Operation]) -> str:
    """Returns the fingerprint of a graph."""
    descriptions = sorted(map(_describe_op, operations))
    return hashlib.sha256("\n".join(descriptions).encode()).hexdigest()


def _count_by_line(operations: Iterable[tf.Operation], hooks: Hooks) -> Facts:
    """Returns how often each op occurs in a graph, by its description and its line.

    This reads the stack trace of each op, which takes long for a large graph.
    """
    counts: collections.Counter[str] = collections.Counter()
    for op in operations:
        line = find_line(op, hooks) or hooks.create_model
        counts[f"the op {_describe_op(op)} of {line}"] += 1
    return {name: f"{count}×" for name, count in counts.items()}


def _describe_op(op: tf.Operation) -> str:
    """Returns the type of an op with its numeric attributes; for a constant, with its value."""
    if op.type == "Const":
        return f"Const {_describe_constant(op.get_attr('value'))}"
    attributes = [
        f"{name}={getattr(value, kind)!r}"
        for name, value in sorted(op.node_def.attr.items())
        for kind in _NUMERIC
        if value.HasField(kind) and not name.startswith(("_", "seed"))
    ]
    return " ".join([op.type, *attributes])


def _describe_constant(proto: Any) -> str:
    """Returns a scalar, or the shape and a digest of an array; of strings, the shape only."""
    array = tf.make_ndarray(proto)
    kind = f"{array.dtype}{list(array.shape)}"
    if array.dtype == np.object_:
        return kind
    if array.ndim == 0:
        return str(array)
    return f"{kind} {hashlib.sha256(array.tobytes()).hexdigest()[:12]}"
