"""What is trainable and what is frozen: read, put back, and looked beyond.

Freezing is Python state of Keras layers, which no checkpoint of TensorFlow's holds.
"""

from __future__ import annotations

from typing import Any

import keras


def layers_of(model: Any) -> list[keras.Layer]:
    """Returns a Keras model and all its layers, parents first; of anything else, nothing.

    ``_flatten_layers`` is not public, but Keras has no public way to nested layers.
    tests/engine/test_freezing.py fails if Keras changes it.
    """
    return list(model._flatten_layers()) if isinstance(model, keras.Layer) else []


def freeze_flags(model: Any) -> list[bool]:
    """Returns what is trainable: a flag for each layer, then one for each variable."""
    layers = layers_of(model)
    variables = model.variables if layers else []
    return [layer.trainable for layer in layers] + [bool(v.trainable) for v in variables]


def set_freeze_flags(model: Any, flags: list[bool]) -> None:
    """Puts ``freeze_flags`` back, unless the model has other layers now."""
    layers = layers_of(model)
    variables = model.variables if layers else []
    if len(flags) != len(layers) + len(variables):
        return
    for layer, flag in zip(layers, flags, strict=False):  # parents first: setting one sets its own
        if layer.trainable != flag:
            layer.trainable = flag
    for variable, flag in zip(variables, flags[len(layers) :], strict=True):
        if bool(variable.trainable) != flag:
            variable.trainable = flag


def trainable_candidates(model: Any) -> list[Any]:
    """Returns the variables that would be trainable if no layer were frozen."""
    if not isinstance(model, keras.Layer):
        return list(getattr(model, "trainable_variables", []))
    flags = freeze_flags(model)
    # Layer by layer, and off before on: Keras passes on only a value that changes.
    for value in (False, True):
        for layer in layers_of(model):
            layer.trainable = value
    variables = list(model.trainable_variables)
    set_freeze_flags(model, flags)
    return variables
