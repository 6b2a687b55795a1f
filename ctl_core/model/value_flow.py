"""Finds out whether the values of a tensor influence another tensor of the same graph.

Ops that use only the shape of a tensor are ignored. Functions, branches and loops are followed
inside, because they may leave some of their arguments unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from ctl_core.compat import FunctionGraph, find_called_graphs

# The types of ops whose outputs depend only on the shape of their input.
_SHAPE_ONLY = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_LOOPS = frozenset({"While", "StatelessWhile"})


def find_path(source: tf.Tensor, targets: Iterable[tf.Tensor]) -> list[tf.Operation] | None:
    """Returns the ops through which the values of a tensor reach other tensors of its graph.

    Args:
        source: the tensor
        targets: tensors of the same graph

    Returns:
        The ops in the order of their creation; None if the values reach none of the targets.
    """
    reached = _follow(source.graph, {source.name})
    needed: set[str] = set()
    waiting = [target for target in targets if target.name in reached]
    if not waiting:
        return None
    while waiting:
        op = waiting.pop().op
        if op.name not in needed:
            needed.add(op.name)
            waiting += [tensor for tensor in op.inputs if tensor.name in reached]
    needed.discard(source.op.name)
    return [op for op in source.graph.get_operations() if op.name in needed]


def _follow(graph: tf.Graph, sources: Iterable[str]) -> set[str]:
    """Returns the names of the tensors of a graph that depend on the values of some tensors.

    Args:
        graph: the graph
        sources: the names of the tensors whose values are followed
    """
    reached = set(sources)
    for op in graph.get_operations():
        from_inputs = [tensor.name in reached for tensor in op.inputs]
        if any(from_inputs):
            flags = _find_reached_outputs(op, from_inputs)
            pairs = zip(op.outputs, flags, strict=True)
            reached |= {tensor.name for tensor, is_reached in pairs if is_reached}
    return reached


def _find_reached_outputs(op: tf.Operation, inputs: Sequence[bool]) -> Sequence[bool]:
    """Returns for each output of an op whether it depends on the marked inputs.

    Args:
        op: the op
        inputs: says for each input whether it is marked; at least one is
    """
    everything = [True] * len(op.outputs)
    if op.type in _SHAPE_ONLY:
        return [False] * len(op.outputs)
    if op.type == "IdentityN":  # tf.custom_gradient adds one; its outputs are its inputs
        return inputs
    graphs = find_called_graphs(op)
    if op.type in _CALLS and len(graphs) == 1:
        return _follow_function(graphs[0], inputs)
    if op.type in _BRANCHES and graphs and not inputs[0]:
        flags = [_follow_function(graph, inputs[1:]) for graph in graphs]
        return [any(branches) for branches in zip(*flags, strict=True)]
    if op.type in _LOOPS and len(graphs) == 2:
        body, condition = graphs
        return _follow_loop(body, condition, inputs)
    return everything


def _follow_function(graph: FunctionGraph, inputs: Sequence[bool]) -> list[bool]:
    """Returns for each output of a function whether it depends on the marked arguments."""
    pairs = zip(graph.inputs, inputs, strict=True)
    reached = _follow(graph, [tensor.name for tensor, is_marked in pairs if is_marked])
    return [tensor.name in reached for tensor in graph.outputs]


def _follow_loop(
    body: FunctionGraph, condition: FunctionGraph, inputs: Sequence[bool]
) -> Sequence[bool]:
    """Returns for each loop variable whether it depends on the marked variables after the loop.

    Args:
        body: the graph of an iteration, whose outputs are the next values of the loop variables
        condition: the graph that decides whether there is another iteration
        inputs: says for each loop variable whether its first value is marked
    """
    marked = list(inputs)
    while True:
        outputs = _follow_function(body, marked)
        updated = [before or after for before, after in zip(marked, outputs, strict=True)]
        if updated == marked:
            break
        marked = updated
    if any(_follow_function(condition, marked)):
        return [True] * len(marked)
    return marked
