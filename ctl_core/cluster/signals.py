"""SIGINT and SIGTERM: the first of them stops a run, which is saved; a second SIGINT ends it.

What one process has received it tells the others between two graph calls: see sync.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl_core.run.console import Console

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
        received: the number of the first one, or None
        numbers: of all that were noted, in their order
    """

    def __init__(self, console: Console | None = None) -> None:
        self.received: int | None = None
        self.numbers: list[int] = []
        self._console = console
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

    def _note(self, number: int, _: object) -> None:
        if os.getpid() != self._process:  # forked off the run, as by multiprocessing
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif number not in self.numbers:
            self.received = self.received or number
            self.numbers.append(number)
            if number == signal.SIGINT:
                self._interrupted_at = time.monotonic()
            if self._console is not None:  # whose lock the main thread may hold just now
                threading.Thread(target=self._answer, args=(number,), daemon=True).start()
        elif number == signal.SIGINT and time.monotonic() > self._interrupted_at + SAME_SIGNAL:
            raise KeyboardInterrupt

    def _answer(self, number: int) -> None:
        assert self._console is not None
        again = "; Ctrl-C again, a second or more from now, ends it at once"
        self._console.say(
            f"{signal.Signals(number).name}: the run stops after what is running now, and is saved"
            f"{again if number == signal.SIGINT else ''}."
        )
