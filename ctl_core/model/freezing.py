"""What is frozen: Python state of Keras layers and variables, which no checkpoint holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ctl_core.hooks.recording import Recording


def read_flags(recording: Recording) -> list[bool]:
    """Returns what is trainable: a flag for each layer, then one for each variable."""
    parts = (*recording.layers, *recording.keras_variables())
    return [bool(part.trainable) for part in parts]


def set_flags(recording: Recording, flags: list[bool]) -> bool:
    """Sets the flags; returns False, and changes nothing, if they are those of other layers."""
    layers, variables = recording.layers, recording.keras_variables()
    if len(flags) != len(layers) + len(variables):
        return False
    pairs = list(zip(layers, flags, strict=False))
    # Setting a layer's flag sets those within it, so that more than one round may be needed.
    while changed := [pair for pair in pairs if bool(pair[0].trainable) != pair[1]]:
        for layer, flag in changed:
            layer.trainable = flag
    for variable, flag in zip(variables, flags[len(layers) :], strict=True):
        if bool(variable.trainable) != flag:
            variable.trainable = flag
    return True


@contextlib.contextmanager
def unfrozen(recording: Recording) -> Iterator[bool]:
    """Within, no layer is frozen; afterwards all are as they were.

    Yields:
        Whether any was frozen.
    """
    flags, free = read_flags(recording), _count_free(recording)
    # Layer by layer, and off before on: Keras passes on only a value that changes.
    for value in (False, True):
        for layer in recording.layers:
            layer.trainable = value
    try:
        yield _count_free(recording) != free
    finally:
        set_flags(recording, flags)


def _count_free(recording: Recording) -> set[int]:
    return {id(v) for layer in recording.layers for v in layer.trainable_variables}
