"""Where in a graph a NaN or an infinity arose, by which of its tensors are finite.

A way leads back from the loss, over what is not finite, to an op whose inputs all are; that of a
gradient leads on from a variable. What a layer makes infinite and masks is on no such way. Which
tensors are finite is found out in replay.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

# NaN, or an infinity; for a tensor that is finite, an empty text.
Kind = str
NAN, INFINITE = "NaN", "infinity"
Largest = Callable[[Iterable[Any]], float]

# Where the gradient is infinite, or 0 times infinity, at some finite value.
_SINGULAR = {
    *(
        "Log",
        "Log1p",
        "Sqrt",
        "Rsqrt",
        "Pow",
        "RealDiv",
        "Div",
        "Reciprocal",
        "Inv",
        "Acos",
        "Asin",
    ),
    *("Atan2", "Acosh", "Atanh", "Xlogy", "Xlog1py", "Xdivy", "Lgamma", "SelfAdjointEigV2", "Svd"),
}
# What hands on an infinity that stands in the program, such as that of a mask.
_HANDS_ON = {
    *("Const", "SelectV2", "Select", "Fill", "BroadcastTo", "Cast", "Reshape", "Identity", "Tile"),
    *("ExpandDims", "Squeeze", "Pack", "ConcatV2", "Transpose", "StridedSlice", "Neg"),
}
# What makes the least number of a NaN, and so hides it.
_HIDES = ("MaxPool", "MaxPoolV2", "MaxPool3D")
_HUGE = 1e37
_SELECTS = ("SelectV2", "Select")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where it arose.

    Attributes:
        op: the op of the forward pass
        kind: ``NaN`` or ``infinity``: what its output has, or the gradient of its input
        backward: whether it is the gradient
        masked: whether the op's value goes into a tf.where, which does not mask the gradient
        intended: whether an infinity that stands in the program comes into it
        way: tensors from the origin on, to find the examples by
    """

    op: tf.Operation
    kind: Kind
    backward: bool = False
    masked: bool = False
    intended: bool = False
    way: tuple[Any, ...] = ()


def origin_of(sink: tf.Tensor, kind: Callable[[Any], Kind], largest: Largest) -> Origin:
    """Returns where a tensor that is not finite comes from.

    Args:
        sink: the tensor
        kind: says of any tensor of its graph what it has
        largest: says of tensors how large the largest number in them is
    """
    chain, tensor = [sink], sink
    while bad := [x for x in tensor.op.inputs if kind(x) or _is_hidden(x, kind, largest)]:
        # Of NaN, the cause is a NaN before it; an infinity only where there is none.
        tensor = min(bad, key=lambda one: (not kind(one), kind(chain[-1]) == NAN != kind(one)))
        chain.append(tensor)
    chain.reverse()
    first, intended = 0, chain[0].op.type == "Const"
    if intended:  # it becomes a mistake where a NaN is made of it, or where it is let through
        made = (i for i, one in enumerate(chain) if kind(one) == NAN)
        used = (i for i, one in enumerate(chain) if one.op.type not in _HANDS_ON)
        first = next(made, next(used, 0))
    return Origin(chain[first].op, kind(chain[first]), intended=intended, way=tuple(chain[first:]))


def _is_hidden(tensor: tf.Tensor, kind: Callable[[Any], Kind], largest: Largest) -> bool:
    """Whether a finite tensor stands for what was not finite, by numbers as large as there are."""
    todo, seen = [tensor], {tensor.op.name}
    while todo:
        one = todo.pop()
        if one.op.type in _HIDES and kind(one.op.inputs[0]):
            return True
        large = [part for part in one.op.inputs if largest([part]) > _HUGE]
        todo += [part for part in large if part.op.name not in seen]
        seen |= {part.op.name for part in large}
    return False


def origin_of_gradient(
    forward: list[tf.Tensor], gradients: Mapping[int, Any], kind: Callable[[Any], Kind]
) -> Origin | None:
    """Returns the op of which the gradient of the output is finite, and that of an input not.

    Args:
        forward: the tensors of the forward pass, in the order in which they were made
        gradients: those of the objective by them, by the id of the tensor
        kind: says of any tensor of the graph, and of any gradient, what it has

    Returns:
        None if there is none on the way to a variable.
    """
    own = {id(tensor) for tensor in forward}

    def bad(tensor: Any) -> Kind:
        gradient = gradients.get(id(tensor))
        return kind(gradient) if gradient is not None else ""

    def uses(tensor: Any) -> Iterator[tuple[tf.Operation, Any]]:
        """Yields the ops that take it, and what of their outputs, or after, has a gradient."""
        todo, seen = [(op, op) for op in tensor.consumers()], set()
        while todo:
            first, op = todo.pop(0)
            if op.name in seen:
                continue
            seen.add(op.name)
            for output in op.outputs:
                if id(output) in gradients:
                    yield first, output
                elif id(output) in own:  # such as within a function with a gradient of its own
                    todo += [(first, later) for later in output.consumers()]

    def of_variable(tensor: Any) -> bool:
        return any(one.dtype == tf.resource for one in tensor.op.inputs)

    def suspected(use: tuple[tf.Operation, Any]) -> tuple[bool, bool]:
        op, _ = use
        return not any(map(kind, op.outputs)), op.type not in _SINGULAR

    begin = [tensor for tensor in forward if bad(tensor)]
    for tensor in [tensor for tensor in begin if of_variable(tensor)] or begin:
        way = [tensor]
        while later := [output for _, output in uses(way[-1]) if bad(output)]:
            way.append(later[0])
        if found := list(uses(way[-1])):
            op, _ = min(found, key=suspected)
            after = [gradients[id(one)] for one in op.outputs if id(one) in gradients]
            # A variable's first dimension may be as long as a batch by chance.
            own_way = [one for one in reversed(way) if not of_variable(one)]
            before = [gradients[id(one)] for one in own_way]
            masked = _is_masked(op, {one.op.name for one in forward})
            return Origin(op, bad(way[-1]), True, masked, way=(*before, *own_way[:1], *after))
    return None


def seen_through(origin: Origin, kind: Callable[[Any], Kind], largest: Largest) -> Origin:
    """Returns where that comes from which makes a gradient not finite: 0 times a value, say.

    The loss may be finite for all that, as behind a pooling that takes no NaN for its largest.

    Args:
        origin: of a gradient
        kind, largest: as for ``origin_of``
    """
    bad = [tensor for tensor in origin.op.inputs if kind(tensor)]
    if not bad:
        return origin
    value = origin_of(min(bad, key=lambda one: kind(one) != NAN), kind, largest)
    if value.intended:
        return dataclasses.replace(origin, intended=True)
    return dataclasses.replace(value, masked=origin.masked)


def _is_masked(op: tf.Operation, forward: set[str], most: int = 8) -> bool:
    """Whether what an op gives goes, within some ops, into one that selects by a condition."""
    near = [op]
    for _ in range(most):
        later = [user for one in near for output in one.outputs for user in output.consumers()]
        near = list({one.name: one for one in later if one.name in forward}.values())
        if any(one.type in _SELECTS for one in near):
            return True
    return False
