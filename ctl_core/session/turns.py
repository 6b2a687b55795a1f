"""Lets one thread at a time use the state of the process that training and loading share.

Training a run, and loading one, change state that all threads of the process have in common: the
random numbers of Python and NumPy, the layers that Keras notes, and whether ops are deterministic.
Therefore, a process trains only one run at a time, and ``ctl.load`` in another thread waits until
training is between two graph calls. There, loading a run does not affect training, in the same way
as ``ctl.load`` in a hook.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

from ctl_core.compat import has_started
from ctl_core.run.errors import SetupError

# The number of seconds that ``ctl.load`` waits at most for a training in another thread. After
# that, it loads the run nevertheless, because a hook of the training may be waiting for it.
LONGEST_WAIT = 60.0


class Turns:
    """Decides which thread may train or load a run.

    A thread that has the turn can take it again, so that a hook can load a run.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._queue: list[object] = []
        self._training: str | None = None

    @contextlib.contextmanager
    def train(self, run: str) -> Iterator[None]:
        """Takes the turn for a training.

        Args:
            run: the run, for messages

        Raises:
            SetupError: this process trains a run already, in this thread or in another one; or it
                was forked, see ``refuse_in_fork``.
        """
        refuse_in_fork("ctl.train")
        with self._changed:
            if self._training is not None:
                raise SetupError(
                    f"ctl.train: this process is training {self._training} already, and two "
                    "runs in one process would mix their weights and random numbers; train each "
                    "run in a process of its own, for example with subprocess."
                )
            self._training = run
        try:
            with self._take(None):
                yield
        finally:
            with self._changed:
                self._training = None

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Takes the turn for loading a run, when the training in another thread offers it.

        Raises:
            SetupError: this process was forked, see ``refuse_in_fork``.
        """
        refuse_in_fork("ctl.load")
        # A thread that TensorFlow has started, such as one that reads data, belongs to the
        # training. The training may be waiting for it.
        is_of_tensorflow = threading.current_thread().name.startswith("Dummy-")
        if is_of_tensorflow and self._training is not None:
            yield
            return
        with self._take(LONGEST_WAIT):
            yield

    def offer(self) -> None:
        """Lets the threads that are waiting load their runs now; returns when they are done."""
        with self._changed:
            if not self._queue or self._owner != threading.get_ident():
                return
            depth = self._depth
            self._depth = 0
            self._owner = None
            self._changed.notify_all()
            self._wait(None)
            self._depth = depth

    @contextlib.contextmanager
    def _take(self, longest: float | None) -> Iterator[None]:
        """Waits for the turn and keeps it within the context.

        Args:
            longest: the maximum number of seconds to wait; None waits until the turn is free
        """
        with self._changed:
            has_turn = self._owner == threading.get_ident() or self._wait(longest)
            if has_turn:
                self._depth += 1
        try:
            yield
        finally:
            if has_turn:
                self._give_back()

    def _wait(self, longest: float | None) -> bool:
        """Waits until the turn is free and all threads that came earlier have had it; takes it.

        Returns:
            False if ``longest`` seconds have passed first.
        """
        ticket = object()
        self._queue.append(ticket)
        try:
            is_free = self._changed.wait_for(
                lambda: self._owner is None and self._queue[0] is ticket, longest
            )
        finally:
            self._queue.remove(ticket)
            self._changed.notify_all()
        if is_free:
            self._owner = threading.get_ident()
        return is_free

    def _give_back(self) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._changed.notify_all()


PROCESS_TURN = Turns()
# Whether this process was forked from one in which TensorFlow was running.
_is_forked = False


def refuse_in_fork(name: str) -> None:
    """Checks that TensorFlow can run in this process.

    A forked process has none of the threads of TensorFlow, so its first graph call would hang.

    Args:
        name: the function that is called, for the message

    Raises:
        SetupError: this process was forked from one in which TensorFlow was running.
    """
    if _is_forked:
        raise SetupError(
            f"{name}: this process was forked from one that was already using TensorFlow, so it "
            "would hang; start processes with multiprocessing.get_context('spawn'), and load runs "
            "in each of them (gunicorn: without --preload)."
        )


def _start_again() -> None:
    """Forgets the threads of the process from which this one was forked."""
    global _is_forked
    PROCESS_TURN.__init__()  # type: ignore[misc]
    _is_forked = _is_forked or has_started()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)
