"""What of a model no step changes, or nothing calls, though it looks as if."""

from __future__ import annotations

import keras
import numpy as np

from ctl_core.run_state.tracking import adapter_of, names_in
from ctl_core.state import State

# What ``fit`` calls of a model.
_OF_FIT = ("train_step", "compute_loss")


def dead_adapters(state: State) -> list[str]:
    """Warns of adapters of which both matrices are 0, so that neither ever has a gradient."""
    dead = [
        layer.name
        for layer in state.found.layers
        if (adapter := adapter_of(layer)) and not any(np.any(part.numpy()) for part in adapter)
    ]
    if not dead:
        return []
    more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
    return [
        f"both matrices of the LoRA adapters of {', '.join(dead[:3])}{more} are 0, so that no step "
        "will change them: Keras' load_weights makes them so; call enable_lora after it."
    ]


def not_called(state: State) -> list[str]:
    """Warns of what a model overrides for ``fit``, which is not what trains it here."""
    kind = state.train_model.__class__
    if not issubclass(kind, keras.Model):
        return []
    codes = (getattr(hook, "__code__", None) for hook in state.hooks.functions().values())
    called = {name for code in codes if code is not None for name in names_in(code)}
    own = [
        name
        for name in _OF_FIT
        if getattr(kind, name) is not getattr(keras.Model, name) and name not in called
    ]
    return [
        f"{state.hooks.create_model}: {kind.__name__} has a {name} of its own, which is not called "
        "here: what it computes belongs into hooks, such as loss_pre and grad_pre."
        for name in own[:1]
    ]
