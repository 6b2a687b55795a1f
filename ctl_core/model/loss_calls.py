"""Refuses functions that must not be called for a loss, because they make weights wrong silently.

A function may be imported under any name, and be called by any other. The traceback of an op names
the functions that made it, so the ops of a trace tell whether they were called, and where.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from ctl_core.hooks.hooks import Hooks
from ctl_core.run.errors import ENGINE, NOT_THE_USERS, SetupError, format_file_name, read_calls

# What TensorFlow's tutorial on distributed loops scales losses with, and what replaces it.
_SCALED = {
    "compute_average_loss": "one number per example: the engine divides by the global batch size",
    "scale_regularization_loss": "the unscaled sum: the engine counts extra_loss once",
}
_DIVISIONS = ("DivNoNan", "RealDiv")  # the ops that these two functions end with
_EXCHANGES = ("all_reduce", "all_gather")
_COLLECTIVES = [
    str(Path(ENGINE, "cluster", f"{name}.py")) for name in ("collectives", "replica_contexts")
]
_METRICS = str(Path(ENGINE, "model", "metrics.py"))
_MODEL = str(Path(ENGINE, "model", "forward.py")), "call_model"

Call = tuple[str, int, str]  # file, line, function


def refuse_scaled_losses(hooks: Hooks, operations: Iterable[Any]) -> None:
    """Refuses TensorFlow's functions that divide a loss, which the engine would divide again.

    Args:
        hooks: of the run
        operations: of a graph in which the hooks were traced

    Raises:
        SetupError: one of the functions was called; the message has the line of the call.
    """
    divisions = (op for op in operations if op.type in _DIVISIONS)
    for calls, index in _find_calls(hooks, divisions, _SCALED):
        file, _, name = calls[index]
        if "tensorflow" in file:
            raise SetupError(
                f"{_locate(hooks, calls[:index])}: tf.nn.{name} scales the loss, which would then "
                f"be scaled twice; return {_SCALED[name]}."
            )


def refuse_exchanges(hooks: Hooks, operations: Iterable[Any]) -> None:
    """Refuses exchanges of replicas for a loss that is computed in micro-batches.

    They would bring together the rows of one micro-batch, not those of the batch. A layer of the
    model may add up statistics: those of a micro-batch are what it normalizes with.

    Args:
        hooks: of the run, which has ``accumulate_steps``
        operations: of a graph in which the hooks were traced, by a ``LoneReplica``

    Raises:
        SetupError: a hook, or the loss, exchanges something; the message has the line of the call.
    """
    identities = (op for op in operations if op.type == "Identity")
    for calls, index in _find_calls(hooks, identities, _EXCHANGES):
        file, _, name = calls[index]
        is_layers = (
            any((file, function) == _MODEL for file, _, function in calls) and name == "all_reduce"
        )
        if file in _COLLECTIVES and not is_layers and not _is_in_keras(calls[:index]):
            raise SetupError(
                f"{_locate(hooks, calls[:index])}: {name} brings together the rows of one "
                "micro-batch only, so the loss would depend on accumulate_steps; leave that out."
            )


def _find_calls(
    hooks: Hooks, operations: Iterable[Any], functions: Collection[str]
) -> Iterator[tuple[list[Call], int]]:
    """Yields the calls that made an op, and the index of the first one of such a function.

    What was called for metrics, which train nothing, is left out.
    """
    for op in operations:
        calls = read_calls(op)
        index = next((i for i, call in enumerate(calls) if call[2] in functions), None)
        if index is not None and not _is_for_metrics(hooks, calls):
            yield calls, index


def _is_for_metrics(hooks: Hooks, calls: list[Call]) -> bool:
    frames = [(file, line) for file, line, _ in calls]
    return hooks.metric_pre.has_frame(frames) or any(file == _METRICS for file, _ in frames)


def _is_in_keras(calls: list[Call]) -> bool:
    """Returns whether the last of these calls, but for those of AutoGraph, is in Keras."""
    files = [file for file, _, _ in calls if "autograph" not in file]
    return str(Path("keras", "src")) in files[-1]


def _locate(hooks: Hooks, calls: list[Call]) -> str:
    """Returns ``create_loss (callbacks.py:31)``: the hook, and the user's line of the last call."""
    frames = [(file, line) for file, line, _ in calls]
    owner = hooks.find_hook(frames)
    if owner is None:
        is_in_model = any((file, function) == _MODEL for file, _, function in calls)
        owner = hooks.create_model if is_in_model else hooks.create_loss
    lines = [
        f"{format_file_name(file)}:{line}"
        for file, line in frames
        if not any(part in file for part in NOT_THE_USERS)
    ]
    return f"{owner.name} ({lines[-1]})" if lines else str(owner)
