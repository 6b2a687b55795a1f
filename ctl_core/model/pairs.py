"""A loss of each example with every other: what broadcasting makes of [b, 1] and [b] by a slip."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ctl_core.errors import SetupError, frames_of
from ctl_core.hooks import Hooks

# How many ops back from the loss the slip is looked for.
_REACH = 50


def refuse_pairs(hooks: Hooks, loss: Any) -> None:
    """Refuses a loss of shape [b, b] that some op has made of [b, 1] and [b].

    Args:
        hooks: of the run; the message names the one whose line the op is of
        loss: what ``grad_pre`` or ``eval_pre`` returned as the loss of a batch

    Raises:
        SetupError: it is such a loss.
    """
    if not tf.is_tensor(loss) or loss.shape.rank != 2 or tf.executing_eagerly():
        return
    waiting, seen = [loss.op], set[Any]()
    while waiting and len(seen) < _REACH:
        op = waiting.pop(0)
        if op in seen:
            continue
        seen.add(op)
        shapes = [value.shape for value in op.inputs]
        if len(shapes) == 2 and sorted(str(shape.rank) for shape in shapes) == ["1", "2"]:
            row, column = sorted(shapes, key=lambda shape: shape.rank)
            if column[1] == 1 and column.is_compatible_with([row[0], 1]):
                raise SetupError(_describe(hooks, op, row[0]))
        waiting += [value.op for value in op.inputs]


def _describe(hooks: Hooks, op: Any, size: int | None) -> str:
    frames = frames_of(op)
    made = [hook for hook in (hooks.loss_pre, hooks.grad_pre) if hook.made(frames)]
    hook, size = made[0] if made else hooks.create_loss, size or "b"  # type: ignore[assignment]
    return (
        f"{hook.locate(frames)}: {op.type} of the shapes [{size}, 1] "
        f"and [{size}] gives [{size}, {size}], each example with every other; give both one shape, "
        "with tf.squeeze(output, -1) or labels[:, None]; if all pairs are meant, make the second "
        f"[1, {size}], with labels[None, :]."
    )
