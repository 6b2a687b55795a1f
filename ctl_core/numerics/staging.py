"""Copies of variables, so that a checkpoint is written while training goes on changing them.

TensorFlow's own asynchronous checkpoints (``CheckpointOptions(enable_async=True)``) fail at the
second save of a Keras 3 model. What is written, when, and when it counts is checkpoint.py's part.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.compat import GraphCheckpoint, saves_itself, trackable_node

_COUNTER = "save_counter"


class StagingCopy:
    """A checkpoint of copies: the same objects by the same names, with variables of its own.

    Costs host memory of the size of a checkpoint, and one copy of each variable when taken.

    Attributes:
        checkpoint: what is to be written
        is_whole: whether all of it are copies; a table, say, is itself in the checkpoint
    """

    def __init__(self, original: tf.train.Checkpoint) -> None:
        self.is_whole = True
        self._original = original
        self._parts = _parts_of(original)
        self._pairs: list[tuple[Any, tf.Variable]] = []
        self.checkpoint = GraphCheckpoint()
        self._copies: dict[int, Any] = {id(original): self.checkpoint}
        for part in self._parts:
            self._add_children(part)
        self._copy: Any = None
        if self._pairs:
            self.checkpoint._on = self._pairs[0][1].device

    def _add_children(self, part: Any) -> None:
        copy = self._copies.get(id(part))  # none for the counter
        if copy is None or copy is part or isinstance(copy, tf.Variable):
            return
        for name, child in tf.train.TrackableView.children(part).items():
            if part is self._original and name == _COUNTER:
                continue  # the copy makes its own
            if id(child) not in self._copies:
                self._copies[id(child)] = self._copy_of(child)
            setattr(copy, name, self._copies[id(child)])

    def _copy_of(self, part: Any) -> Any:
        if not isinstance(part, tf.Variable | keras.Variable):
            if not saves_itself(part):
                return trackable_node()
            self.is_whole = self.checkpoint._in_graph = False
            return part
        variable = part.value if isinstance(part, keras.Variable) else part
        with tf.device("CPU:0"):
            copy = tf.Variable(
                tf.zeros(variable.shape, variable.dtype),
                trainable=False,
                name=variable.name.split(":")[0],
            )
        self._pairs.append((variable, copy))
        return copy

    def fits(self) -> bool:
        """Whether the original still has the parts that it had when it was copied."""
        return [id(part) for part in _parts_of(self._original)] == [id(p) for p in self._parts]

    def take(self) -> None:
        """Copies the values."""
        if self._copy is None:

            @tf.function(autograph=False)
            def copy() -> None:
                for variable, target in self._pairs:
                    target.assign(variable.read_value())

            self._copy = copy.get_concrete_function()
        self._copy()


class ReplicaCopies:
    """What each of this process's replicas has in some variables, kept aside and put back.

    One graph call each, in which nothing passes between processes.

    Attributes:
        own: the copies, a variable for each replica's part of each variable
    """

    def __init__(self, strategy: tf.distribute.Strategy, variables: list[Any]) -> None:
        results = strategy.experimental_local_results
        self._here = [part for variable in variables for part in results(variable)]
        self.own = [tf.Variable(part.read_value(), trainable=False) for part in self._here]
        self._move: dict[bool, Any] = {}

    @contextlib.contextmanager
    def put_back_after(self) -> Iterator[None]:
        """Around something that changes the variables, and must not."""
        self.take()
        try:
            yield
        finally:
            self.put_back()

    def take(self) -> None:
        """Copies what the replicas have."""
        self._copy(to_own=True)

    def put_back(self) -> None:
        """Gives the replicas what ``own`` holds."""
        self._copy(to_own=False)

    def _copy(self, to_own: bool) -> None:
        if not self.own:
            return
        if to_own not in self._move:
            pairs = list(zip(self._here, self.own, strict=True))

            @tf.function(autograph=False)
            def copy() -> None:
                for here, own in pairs:
                    target, source = (own, here) if to_own else (here, own)
                    with tf.device(target.device):
                        target.assign(source.read_value())

            self._move[to_own] = copy.get_concrete_function()
        self._move[to_own]()


def _parts_of(checkpoint: tf.train.Checkpoint) -> list[Any]:
    """All objects that a checkpoint holds, in the order in which their names are found."""
    return tf.train.TrackableView(checkpoint).descendants()  # type: ignore[no-any-return]


class Background:
    """Does one thing at a time in a thread of its own.

    Attributes:
        failure: what the last one raised, or None
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, function: Callable[[], object]) -> None:
        """Starts; what was started before must have been waited for."""
        assert self._thread is None and self.failure is None

        def run() -> None:
            try:
                function()
            except Exception as error:
                self.failure = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until it has ended; raises what it has raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
