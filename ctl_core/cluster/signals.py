"""SIGINT and SIGTERM: the first one stops a run and saves it; a second SIGINT ends it at once.

SIGUSR1, by which batch systems announce the end of a job, counts as SIGTERM.

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

# How long a signal may be repeated without counting as a second one (seconds).
SAME_SIGNAL = 1.0
INTERRUPTED = 128 + signal.SIGINT

_SIGUSR1 = getattr(signal, "SIGUSR1", None)  # Windows has none

# The handlers that signal.signal accepts and returns; None if the handler is not Python's.
Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class Signals:
    """Notes SIGINT and SIGTERM while it is entered, each of them once.

    A second SIGINT raises KeyboardInterrupt. If it comes within a second of the first, it counts as
    the same: a process manager may signal a whole cluster, whose supervisor passes the signal on to
    the same processes. Outside of the main thread nothing is noted, and the program there handles
    signals.

    Python runs a signal handler only between two instructions of the main thread, so not before a
    graph call ends. session/watch.py handles graph calls that do not end.

    Attributes:
        numbers: the numbers of the signals that were noted, in order of arrival
        patience: how long the current operation may take after a SIGTERM (seconds); 0: no limit
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """``say`` is called with a line about the effect of a signal, in a separate thread."""
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
            # A handler of the user's own for SIGUSR1 stays.
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
        """The numbers of the signals that are noted."""
        return frozenset(self._previous_handlers)

    def translate(self, number: int) -> int:
        """Returns SIGTERM for SIGUSR1, which has the same effect, and any other signal as it is."""
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
        self._say(f"{name}: the run stops after what is running now, and is saved.")
        if number == signal.SIGINT:
            self._say("Ctrl-C again, a second or more from now, ends it at once.")
        elif self.patience:
            self._say(f"If that does not end within {self.patience:.0f} s, the run ends unsaved.")

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child that multiprocessing, for one, has forked
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        number = self.translate(number)
        if number not in self.numbers:
            self._note_first(number)
        elif number == signal.SIGINT and time.monotonic() > self._interrupted_at + SAME_SIGNAL:
            raise KeyboardInterrupt

    def _note_first(self, number: int) -> None:
        """Notes a signal that has not come before, and prints its effect."""
        self.numbers.append(number)
        if number == signal.SIGINT:
            self._interrupted_at = time.monotonic()
        # In a thread, because the main thread may hold the lock that printing needs.
        threading.Thread(target=self.announce, args=(number,), daemon=True).start()
