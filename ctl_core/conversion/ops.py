"""Names the ops of a graph that a format lacks, with the layer, the hook and the line."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from ctl_core.compat import add_called_ops
from ctl_core.hooks.hooks import Hooks
from ctl_core.model.failures import find_line


def describe_ops(kinds: Iterable[str], graph: tf.Graph, hooks: Hooks) -> str:
    """Describes ops, such as ``Erfc (sequential/conv2d, callbacks.py:62)``.

    Args:
        kinds: the types of the ops
        graph: the graph that contains them; the first op of each type is described
        hooks: the hooks of the run
    """
    first_ops: dict[str, tf.Operation] = {}
    for op in add_called_ops(graph.get_operations()):
        first_ops.setdefault(op.type, op)
    descriptions = []
    for kind in kinds:
        places: list[str] = []
        if kind in first_ops:
            layer, _, _ = first_ops[kind].name.rpartition("/")
            line = find_line(first_ops[kind], hooks)
            places = [place for place in (layer, line) if place]
        if places:
            descriptions.append(f"{kind} ({', '.join(places)})")
        else:
            descriptions.append(kind)
    return ", ".join(descriptions)
