"""What is trainable and what is frozen: read, put back, and looked beyond.

Freezing is Python state of Keras layers and variables, which no checkpoint of TensorFlow's holds.
"""

from __future__ import annotations

from typing import Any

from ctl_core.tracking import Found, find, trainable_variables


class Freezing:
    """The freeze flags of all layers and Keras variables that a run reaches."""

    def __init__(self, found: Found) -> None:
        self._layers = found.layers
        self._variables = found.keras_variables()

    def flags(self) -> list[bool]:
        """Returns what is trainable: a flag for each layer, then one for each variable."""
        return [bool(part.trainable) for part in (*self._layers, *self._variables)]

    def put_back(self, flags: list[bool]) -> bool:
        """Puts ``flags`` back; returns False, and changes nothing, if they are of other layers."""
        if len(flags) != len(self._layers) + len(self._variables):
            return False
        pairs = list(zip(self._layers, flags, strict=False))
        # Setting a layer's flag sets those within it, so that more than one round may be needed.
        while changed := [pair for pair in pairs if bool(pair[0].trainable) != pair[1]]:
            for layer, flag in changed:
                if bool(layer.trainable) != flag:
                    layer.trainable = flag
        for variable, flag in zip(self._variables, flags[len(self._layers) :], strict=True):
            if bool(variable.trainable) != flag:
                variable.trainable = flag
        return True


def trainable_candidates(model: Any) -> list[Any]:
    """Returns the variables that would be trainable if no layer of the model were frozen."""
    freezing = Freezing(found := find({"": model}))
    flags = freezing.flags()
    # Layer by layer, and off before on: Keras passes on only a value that changes.
    for value in (False, True):
        for layer in found.layers:
            layer.trainable = value
    variables = trainable_variables(model)
    freezing.put_back(flags)
    return variables
