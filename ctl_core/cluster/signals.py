"""Handles signals: SIGINT and SIGTERM stop and save a run; a second SIGINT ends it immediately.

SIGUSR1, with which batch systems announce the end of a job, is handled like SIGTERM.

A signal that only one process receives is passed to the others between two graph calls: see
sync.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

# A SIGINT that arrives within this time of the first one does not count as a second SIGINT
# (seconds).
SAME_SIGNAL = 1.0
INTERRUPTED = 128 + signal.SIGINT

_SIGUSR1 = getattr(signal, "SIGUSR1", None)  # Windows has no SIGUSR1

# A handler that signal.signal accepts or returns; None if it was not installed from Python.
Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class Signals:
    """A context that notes SIGINT and SIGTERM, each of them once.

    A second SIGINT raises KeyboardInterrupt. A SIGINT within a second of the first one does not
    count as a second one: a process manager may signal all processes of a cluster, and the
    supervisor of the cluster passes the signal on to the same processes.

    If the context is entered outside of the main thread, no signal is noted, because Python handles
    signals only in the main thread.

    Python runs a signal handler only between two instructions of the main thread, and therefore
    never during a graph call. session/watch.py handles graph calls that do not end.

    Attributes:
        numbers: the numbers of the signals that were noted, in order of arrival
        patience: the maximum time that the current operation may take after a SIGTERM (seconds); 0
            means no limit
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """Creates the context.

        Args:
            say: prints a line about the effect of a signal; it is called in a separate thread
        """
        self.numbers: list[int] = []
        self.patience = 0.0
        self._say = say
        self._announced: set[int] = set()
        self._announcing = threading.Lock()
        self._interrupted_at = 0.0
        self._previous_handlers: dict[int, Handler] = {}
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._note)
            # If the user has installed a handler for SIGUSR1, it is kept.
            if _SIGUSR1 is not None and signal.getsignal(_SIGUSR1) is signal.SIG_DFL:
                self._previous_handlers[_SIGUSR1] = signal.signal(_SIGUSR1, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @property
    def received(self) -> int | None:
        """The number of the first signal that was noted, or None."""
        if not self.numbers:
            return None
        return self.numbers[0]

    @property
    def handled(self) -> frozenset[int]:
        """The numbers of the signals that this context handles."""
        return frozenset(self._previous_handlers)

    def translate(self, number: int) -> int:
        """Returns SIGTERM for SIGUSR1, which has the same effect, and other signals unchanged."""
        if number == _SIGUSR1:
            return signal.SIGTERM
        return number

    def announce(self, number: int) -> None:
        """Prints the effect of a signal once; must not be called from the thread that trains."""
        with self._announcing:
            if self._say is None or number in self._announced:
                return
            self._announced.add(number)
        name = signal.Signals(number).name
        self._say(f"{name}: the run stops and is saved as soon as the current steps have ended.")
        if number == signal.SIGINT:
            self._say("Press Ctrl-C again, a second or more from now, to end it at once.")
        elif self.patience:
            self._say(
                f"If that takes longer than {self.patience:.0f} s, the run ends without saving."
            )

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:  # in a forked child process, as of multiprocessing
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        number = self.translate(number)
        if number not in self.numbers:
            self._note_first(number)
        elif number == signal.SIGINT and time.monotonic() > self._interrupted_at + SAME_SIGNAL:
            raise KeyboardInterrupt

    def _note_first(self, number: int) -> None:
        """Notes a signal that was not received before, and prints its effect."""
        self.numbers.append(number)
        if number == signal.SIGINT:
            self._interrupted_at = time.monotonic()
        # Another thread prints, because the main thread may hold the lock that printing needs.
        threading.Thread(target=self.announce, args=(number,), daemon=True).start()
