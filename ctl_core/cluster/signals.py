"""SIGINT and SIGTERM: the first of them stops a run, which is saved; a second SIGINT ends it.

What one process has received it tells the others between two graph calls: see sync.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

# How long a signal may be repeated without meaning a second one (seconds).
SAME_SIGNAL = 1.0
INTERRUPTED = 128 + signal.SIGINT


class Signals:
    """Within, SIGINT and SIGTERM are noted, each once; a second SIGINT raises KeyboardInterrupt.

    What comes within a second of the first is taken for the same: a process manager may signal a
    whole cluster, of which the supervisor passes it on as well. In a thread that is not the main
    one, the program there decides what signals do.

    Python calls a handler between two of its own instructions, so not before a graph call ends.

    Attributes:
        numbers: of those that were noted, in their order
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """``say`` is told what a signal does, in a thread of its own."""
        self.numbers: list[int] = []
        self._say = say
        self._interrupted_at = 0.0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def received(self) -> int | None:
        """The number of the first one, or None."""
        return next(iter(self.numbers), None)

    def _note(self, number: int, _: object) -> None:
        if os.getpid() != self._process:  # forked off the run, as by multiprocessing
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif number not in self.numbers:
            self.numbers.append(number)
            name = signal.Signals(number).name
            text = f"{name}: the run stops after what is running now, and is saved"
            if number == signal.SIGINT:
                self._interrupted_at = time.monotonic()
                text += "; Ctrl-C again, a second or more from now, ends it at once"
            if self._say is not None:  # the main thread may hold the lock that it takes
                threading.Thread(target=self._say, args=(f"{text}.",), daemon=True).start()
        elif number == signal.SIGINT and time.monotonic() > self._interrupted_at + SAME_SIGNAL:
            raise KeyboardInterrupt
