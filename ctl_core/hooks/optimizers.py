"""Checks the optimizers that ``create_opt`` returned."""

from collections.abc import Iterator

import keras

from ctl_core.hooks.hooks import Hook
from ctl_core.types import Optimizer, UserObject


def refuse_loss_scales(hook: Hook, optimizers: UserObject) -> None:
    """Rejects optimizers that divide gradients by a loss scale.

    Nothing multiplies the loss by this scale, so the gradients would be too small.

    Args:
        hook: the hook ``create_opt``
        optimizers: the value that the hook returned: an optimizer, pairs, or a dict

    Raises:
        SetupError: such an optimizer is in the value, or is wrapped by an optimizer in it.
    """
    for optimizer in find_optimizers(optimizers):
        name = type(optimizer).__name__
        scale = getattr(optimizer, "loss_scale_factor", None)
        cure = None
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            cure = "return its inner_optimizer"
        elif scale not in (None, 1):
            name += f" with loss_scale_factor={scale:g}"
            cure = "leave the factor out"
        if cure is not None:
            raise hook.reject(
                f"{name} divides gradients by a loss scale that the loss was not multiplied by; "
                f"{cure}. With --precision float16, the engine scales the loss."
            )


def find_optimizers(value: UserObject) -> Iterator[Optimizer]:
    """Yields the optimizers in a structure, and the optimizers that they wrap or contain."""
    seen: dict[int, UserObject] = {}  # keeps all objects alive, so that their ids stay unique
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        elif hasattr(item, "apply_gradients") and not isinstance(item, type):
            yield item
            waiting.extend(getattr(item, "__dict__", {}).values())
