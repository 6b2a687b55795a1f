"""What is trainable and what is frozen: read, put back, and looked beyond.

Freezing is Python state of Keras layers and variables, which no checkpoint of TensorFlow's holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ctl_core.run_state.tracking import Found, find


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


@contextlib.contextmanager
def unfrozen(*objects: Any) -> Iterator[bool]:
    """Within, no layer that the objects reach is frozen; afterwards all are as they were.

    Yields:
        Whether any was frozen.
    """
    found = find({str(index): one for index, one in enumerate(objects)})
    freezing = Freezing(found)
    flags, free = freezing.flags(), _free(found)
    # Layer by layer, and off before on: Keras passes on only a value that changes.
    for value in (False, True):
        for layer in found.layers:
            layer.trainable = value
    try:
        yield _free(found) != free
    finally:
        freezing.put_back(flags)


def _free(found: Found) -> set[int]:
    return {id(variable) for layer in found.layers for variable in layer.trainable_variables}
