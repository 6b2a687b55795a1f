"""Compares the forward passes that the processes of a cluster have traced.

The fingerprint of a graph covers the types of its ops, the numeric attributes of the ops and the
values of constants. It ignores names and strings, because paths may differ between machines. It
also ignores the order of the ops, because Python iterates over a set in no fixed order.
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

# The fields of TensorFlow's AttrValue that contain numbers: integer, float and bool.
_NUMERIC = ("i", "f", "b")


def compare_forward(cluster: Cluster, hooks: Hooks, operations: Iterable[tf.Operation]) -> None:
    """Checks that all processes of a cluster have traced the same forward pass.

    Args:
        cluster: the processes
        hooks: the hooks of the run, which the error message names
        operations: the ops of the forward pass, which each process has traced as replica 0

    Raises:
        SetupError: the forward passes differ; the message names the process, the ops and their
            lines.
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
    """Returns the number of times that each op occurs in a graph.

    The keys describe the op and the line that created it. Finding the line takes long for a large
    graph, because the stack trace of each op has to be read.
    """
    counts: collections.Counter[str] = collections.Counter()
    for op in operations:
        line = find_line(op, hooks) or hooks.create_model
        counts[f"the op {_describe_op(op)} of {line}"] += 1
    return {name: f"{count}×" for name, count in counts.items()}


def _describe_op(op: tf.Operation) -> str:
    """Returns the type and numeric attributes of an op, or the value of a constant."""
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
    """Returns the value of a scalar, or the dtype, shape and digest of an array.

    An array of strings is described without a digest.
    """
    array = tf.make_ndarray(proto)
    kind = f"{array.dtype}{list(array.shape)}"
    if array.dtype == np.object_:
        return kind
    if array.ndim == 0:
        return str(array)
    return f"{kind} {hashlib.sha256(array.tobytes()).hexdigest()[:12]}"
