"""Rejects calls that would silently make the gradients of a loss wrong.

A function can be imported under any name, and can be called by any other function, so the source
code does not reveal every call. However, the stack trace of each op in a graph names the functions
that created the op. The ops of a traced graph therefore show whether a function was called, and
where.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.run.errors import (
    ENGINE,
    NOT_THE_USERS,
    GraphOp,
    SetupError,
    format_file_name,
    read_calls,
)

# The functions with which TensorFlow's tutorial on distributed training loops scales losses, and
# the values that hooks should return instead.
_SCALED = {
    "compute_average_loss": "one number per example: the engine divides by the global batch size",
    "scale_regularization_loss": "the unscaled sum: the engine counts extra_loss once",
}
# The types of the ops that the scaling functions create last.
_DIVISIONS = ("DivNoNan", "RealDiv")
_EXCHANGES = ("all_reduce", "all_gather")
_COLLECTIVES = [
    str(Path(ENGINE, "cluster", f"{name}.py")) for name in ("collectives", "replica_contexts")
]
_REPLICA_CONTEXT = str(Path("tensorflow", "python", "distribute", "distribute_lib.py"))
_METRICS = str(Path(ENGINE, "model", "metrics.py"))
_MODEL = str(Path(ENGINE, "model", "forward.py")), "call_model"
_OPTIMIZER = str(Path(ENGINE, "update.py")), "apply_updates"

# A call in a stack trace: file, line number and function name.
Call = tuple[str, int, str]


class TypedOp(GraphOp, Protocol):
    """An operation of a graph.

    This protocol describes ``tf.Operation``, because this module does not import TensorFlow.
    """

    @property
    def type(self) -> str:
        """The type of the operation, such as ``RealDiv``."""


def refuse_scaled_losses(hooks: Hooks, operations: Iterable[TypedOp]) -> None:
    """Rejects calls of TensorFlow's functions that divide a loss.

    The engine divides the loss, too, so it would be divided twice.

    Args:
        hooks: the hooks of the run
        operations: the ops of a graph in which the hooks were traced

    Raises:
        SetupError: one of the functions was called; the message has the line of the call.
    """
    divisions = (op for op in operations if op.type in _DIVISIONS)
    for calls, index in _find_calls(hooks, divisions, _SCALED):
        file, _, name = calls[index]
        if "tensorflow" in file:
            raise SetupError(
                f"{locate_calls(hooks, calls[:index])}: tf.nn.{name} scales the loss, which would "
                f"then be scaled twice; return {_SCALED[name]}."
            )


def refuse_exchanges(hooks: Hooks, operations: Iterable[TypedOp], value: str = "loss") -> None:
    """Rejects collectives between replicas in a loss that is computed in micro-batches.

    Such a collective would combine only the rows of one micro-batch rather than those of the whole
    batch. Layers of the model, however, may sum statistics over replicas: they then normalize with
    the statistics of a micro-batch.

    Args:
        hooks: the hooks of the run, which uses ``accumulate_steps``
        operations: the ops of a graph in which the hooks were traced on a ``LoneReplica``
        value: the value that would be wrong: the loss or its gradient

    Raises:
        SetupError: a hook, or the loss, calls a collective; the message has the line of the call.
    """
    identities = (op for op in operations if op.type == "Identity")
    for calls, index in _find_calls(hooks, identities, _EXCHANGES):
        file, _, name = calls[index]
        is_sum_of_layer = name == "all_reduce" and is_in_model(calls)
        is_of_hook = not is_sum_of_layer and not _is_in_keras(calls[:index])
        if file in _COLLECTIVES and is_of_hook:
            raise SetupError(
                f"{locate_calls(hooks, calls[:index])}: {name} exchanges only the rows of one "
                f"micro-batch, so the {value} would depend on accumulate_steps; leave that "
                "setting out."
            )


def makes_exchange(operations: Iterable[TypedOp]) -> bool:
    """Returns whether ops exchange values between replicas, even if there is only one replica."""
    return any(
        name in _EXCHANGES and file in _COLLECTIVES
        for op in operations
        if op.type == "Identity"
        for file, _, name in read_calls(op)
    )


def refuse_calls_of_collectives(hooks: Hooks, operations: Iterable[TypedOp], reason: str) -> None:
    """Rejects collectives between replicas in hooks, and in the objects that hooks returned.

    Args:
        hooks: the hooks of the run
        operations: the ops of a graph in which the hooks were traced
        reason: the part of the message that follows the name of the called function

    Raises:
        SetupError: a collective is called; the message has the line of the call.
    """
    for op in operations:
        if op.type != "Identity":
            continue
        calls = read_calls(op)
        for index, (file, _, name) in enumerate(calls):
            is_collective = name in _EXCHANGES and file in _COLLECTIVES
            if is_collective and not _is_in_engine(calls[:index]):
                raise SetupError(f"{locate_calls(hooks, calls[:index])}: {name} {reason}")


def _find_calls(
    hooks: Hooks, operations: Iterable[TypedOp], functions: Collection[str]
) -> Iterator[tuple[list[Call], int]]:
    """Yields the stack of each op that was created by certain functions.

    Calls that update metrics are skipped, because metrics do not affect training.

    Args:
        hooks: the hooks of the run
        operations: the ops
        functions: the names of the functions

    Yields:
        The calls of the stack, and the index of the first call of one of the functions.
    """
    for op in operations:
        calls = read_calls(op)
        indices = [index for index, call in enumerate(calls) if call[2] in functions]
        if indices and not _is_for_metrics(hooks, calls):
            yield calls, indices[0]


def _is_for_metrics(hooks: Hooks, calls: list[Call]) -> bool:
    """Returns True if the calls in a call stack are those that update a metric."""
    frames = [(file, line) for file, line, _ in calls]
    return hooks.metric_pre.has_frame(frames) or any(file == _METRICS for file, _ in frames)


def is_in_model(calls: list[Call]) -> bool:
    """Returns whether the calls of a stack run the model."""
    return any((file, function) == _MODEL for file, _, function in calls)


def is_exchange(calls: list[Call]) -> bool:
    """Returns whether the calls of a stack exchange values between replicas."""
    places = (*_COLLECTIVES, _REPLICA_CONTEXT)
    return any(name in _EXCHANGES and file.endswith(places) for file, _, name in calls)


def _is_in_engine(calls: list[Call]) -> bool:
    """Returns whether the last call, ignoring calls of AutoGraph, is in the engine."""
    files = [file for file, _, _ in calls if "autograph" not in file]
    return files[-1].startswith(ENGINE)


def _is_in_keras(calls: list[Call]) -> bool:
    """Returns whether the last call, ignoring calls of AutoGraph, is in Keras."""
    files = [file for file, _, _ in calls if "autograph" not in file]
    return str(Path("keras", "src")) in files[-1]


def _find_creator(hooks: Hooks, calls: list[Call]) -> Hook:
    """Returns the hook that created the model, metric, optimizer or loss that is called."""
    if is_in_model(calls):
        return hooks.create_model
    if any(file == _METRICS for file, _, _ in calls):
        return hooks.create_metrics
    if any((file, function) == _OPTIMIZER for file, _, function in calls):
        return hooks.create_opt
    return hooks.create_loss


def locate_calls(hooks: Hooks, calls: list[Call]) -> str:
    """Returns the hook and the last line of user code: ``create_loss (callbacks.py:31)``."""
    frames = [(file, line) for file, line, _ in calls]
    owner = hooks.find_hook(frames)
    if owner is None:
        owner = _find_creator(hooks, calls)
    lines = [
        f"{format_file_name(file)}:{line}"
        for file, line in frames
        if not any(place in file for place in NOT_THE_USERS)
    ]
    if not lines:
        return str(owner)
    return f"{owner.name} ({lines[-1]})"


def locate_op(hooks: Hooks, op: GraphOp) -> str:
    """Returns the hook that created an op, with the last line of user code."""
    return locate_calls(hooks, read_calls(op))
