"""Copies of variables, so that a checkpoint is written while training goes on changing them.

TensorFlow's own asynchronous checkpoints (``CheckpointOptions(enable_async=True)``) fail at the
second save of a Keras 3 model. What is written, and when, is run_state/writer.py's part.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from ctl_core.compat import GraphCheckpoint, saves_itself, trackable_node
from ctl_core.model.variables import plain_variable
from ctl_core.numerics.replicas import define_copy

_COUNTER = "save_counter"


class StagingCopy:
    """A checkpoint of copies: the same objects by the same names, with variables of its own.

    Costs host memory of the size of a checkpoint, and one copy of each variable when taken.

    Attributes:
        checkpoint: what is to be written
        is_whole: whether all of it are copies; a table, say, is itself in the checkpoint
        take: copies the values
    """

    def __init__(self, original: tf.train.Checkpoint) -> None:
        self._original = original
        self._parts = _parts_of(original)
        self.checkpoint = GraphCheckpoint()
        copies: dict[int, Any] = {id(original): self.checkpoint}
        for part in self._parts:
            copy = copies.get(id(part))  # none of the counter, nor of what is inside a variable
            if copy is None or copy is part or isinstance(copy, tf.Variable):
                continue
            for name, child in tf.train.TrackableView.children(part).items():
                if part is original and name == _COUNTER:
                    continue  # the copy makes its own
                if id(child) not in copies:
                    copies[id(child)] = _copy_part(child)
                setattr(copy, name, copies[id(child)])
        self.is_whole = self.checkpoint._in_graph = all(
            copies.get(id(part)) is not part for part in self._parts
        )
        variables = [part for part in self._parts if isinstance(copies.get(id(part)), tf.Variable)]
        targets = [copies[id(part)] for part in variables]
        self.take = define_copy([plain_variable(part) for part in variables], targets)
        if targets:
            self.checkpoint._on = targets[0].device

    def fits(self) -> bool:
        """Whether the original still has the parts that it had when it was copied."""
        return [id(part) for part in _parts_of(self._original)] == [id(p) for p in self._parts]


def _parts_of(checkpoint: tf.train.Checkpoint) -> list[Any]:
    """All objects that a checkpoint holds, in the order in which their names are found."""
    return tf.train.TrackableView(checkpoint).descendants()  # type: ignore[no-any-return]


def _copy_part(part: Any) -> Any:
    """Returns a variable of the same name and shape, an empty object, or what saves itself."""
    variable = plain_variable(part)
    if isinstance(variable, tf.Variable):
        with tf.device("CPU:0"):
            zeros = tf.zeros(variable.shape, variable.dtype)
            return tf.Variable(zeros, trainable=False, name=variable.name.split(":")[0])
    return part if saves_itself(part) else trackable_node()


class Background:
    """Does one thing at a time in a thread of its own."""

    def __init__(self) -> None:
        self._pending: Future[object] | None = None

    def start(self, function: Callable[[], object]) -> None:
        """Starts; what was started before must have been waited for."""
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending = self._pool.submit(function)

    def wait(self) -> None:
        """Waits until it has ended; raises what it has raised, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._pool.shutdown()  # in a notebook, no thread is left after a run
            pending.result()
