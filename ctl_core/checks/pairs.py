"""A loss that pairs by broadcasting what does not belong together: found before training.

An output of shape [b, 1] less labels of shape [b] is a matrix of all pairs, by broadcasting, and
its mean or sum a loss that trains something else, in silence. So is a number of a class that
``tf.nn.softmax_cross_entropy_with_logits`` takes for the probability of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ctl_core.compat import with_called
from ctl_core.context import StepContext
from ctl_core.errors import SetupError
from ctl_core.step import loss_of, run_model

# Element-wise arithmetic of two; comparisons, masks and products of matrices are meant for pairs.
_ARITHMETIC = frozenset({"Add", "AddV2", "Sub", "Mul", "MulNoNan", "Div", "RealDiv", "DivNoNan"})
_ARITHMETIC |= {"Xdivy", "Xlogy", "SquaredDifference", "Maximum", "Minimum", "Pow"}
# Makes a column of a vector.
_RESHAPING = frozenset({"ExpandDims", "Reshape", "StridedSlice"})
# A size of batches that no other dimension is likely to have.
_ODD = 7919


@contextlib.contextmanager
def pairs_refused(
    context: StepContext, element_spec: Any, placeholders: Callable[[Any], Any]
) -> Iterator[None]:
    """Refuses such pairs in what is added within to the default graph: loss and ``grad_pre``.

    Costs a look at the shapes of its ops. Only where some could be such pairs, the step is built
    once more with batches of another size, since a dimension may be as large as the batch by
    chance. What cannot be built with that size gives no verdict.

    Args:
        context: what the step is made of
        element_spec: of one replica's batch
        placeholders: makes a batch for a specification

    Raises:
        SetupError: an op has a column of one number per example and a vector of such.
    """
    graph, size = tf.compat.v1.get_default_graph(), context.micro_batch_size
    first = len(graph.get_operations())
    try:
        yield
    finally:
        operations = graph.get_operations()[first:]
        if (found := _numbers_for_softmax(operations)) is not None:
            raise SetupError(
                f"{_where(context, found[0])}: labels that are numbers of classes are for "
                "tf.nn.sparse_softmax_cross_entropy_with_logits; or make them one-hot, with "
                f"tf.one_hot(labels, {found[1]})."
            )
        if _find(operations, {size, None}, {size, None}) is not None:
            batch = placeholders(tf.nest.map_structure(lambda s: _resized(s, size), element_spec))
            if (pair := _find(_rebuilt(context, batch), {_ODD, None}, {_ODD})) is not None:
                raise SetupError(_message(context, pair))


def _resized(spec: Any, size: int) -> Any:
    """Returns the specification of a tensor of a batch as that of one of the odd size."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    if spec.shape[0] not in (size, None):
        return spec
    return tf.TensorSpec([_ODD, *spec.shape[1:]], spec.dtype)


def _rebuilt(context: StepContext, batch: Any) -> list[Any]:
    """Returns the ops of the loss and ``grad_pre`` for a batch, as far as they can be built."""
    graph, hooks = tf.compat.v1.get_default_graph(), context.hooks
    first = None
    with contextlib.suppress(Exception):  # a model or a loss for one size of batches only
        output = run_model(context, batch, training=True)
        first = len(graph.get_operations())
        loss = loss_of(context, batch, output, training=True)
        hooks.grad_pre.in_graph(loss=loss, output=output, batch=batch, **context.hook_arguments())
    return [] if first is None else graph.get_operations()[first:]


def _find(operations: list[Any], columns: set[int | None], rows: set[int | None]) -> Any:
    """Returns the first op, also in functions, of a column [n, 1] and a vector [m] of such sizes.

    A vector that the column is made of, as in ``x[:, None] - x``, is meant.
    """
    for op in with_called(operations):
        if op.type not in _ARITHMETIC:
            continue
        for column, row in (op.inputs, reversed(op.inputs)):
            if (
                (column.shape.rank, row.shape.rank) == (2, 1)
                and column.shape[1] == 1
                and column.shape[0] in columns
                and row.shape[0] in rows
                and not (column.op.type in _RESHAPING and column.op.inputs[0] is row)
            ):
                return op
    return None


def _numbers_for_softmax(operations: list[Any]) -> tuple[Any, int] | None:
    """Returns the first op, also in functions, that gets numbers of classes for probabilities.

    TensorFlow makes one row of a vector, and the op takes one row or column for all.

    Returns:
        The op, and how many classes there are.
    """
    for op in with_called(operations):
        if op.type != "SoftmaxCrossEntropyWithLogits":
            continue
        logits, labels = (
            (value.op.inputs[0] if value.op.type == "Reshape" else value).shape
            for value in op.inputs
        )
        if not logits.rank or not labels.rank or (logits[-1] or 1) == 1:
            continue
        if labels.rank == logits.rank - 1 or (labels.rank == logits.rank and labels[-1] == 1):
            return op, logits[-1]
    return None


def _where(context: StepContext, op: Any) -> str:
    """Names the hook that an op is of, and its line."""
    hooks = context.hooks
    frames = [(frame.filename, frame.lineno) for frame in op.traceback]
    made = [hook for hook in (hooks.loss_pre, hooks.grad_pre) if hook.made(frames)]
    hook = made[0] if made else hooks.create_loss
    return f"{hook.name} ({hook.line_in(frames) or hook.where})"


def _message(context: StepContext, op: Any) -> str:
    size = context.micro_batch_size
    return (
        f"{_where(context, op)}: {op.type} of the shapes [{size}, 1] "
        f"and [{size}] gives [{size}, {size}], each example with every other; give both one shape, "
        "with tf.squeeze(output, -1) or labels[:, None]; if all pairs are meant, make the second "
        f"[1, {size}], with labels[None, :]."
    )
