"""SIGINT and SIGTERM: noted here, and agreed on with the other processes between graph calls."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

from ctl_core.cluster import Cluster, Word

# How long a signal may be repeated without meaning a second one (seconds).
SAME_SIGNAL = 1.0


class Agreement:
    """What all processes have agreed on; asked after each graph call.

    Attributes:
        signal: the signal that ends training, or 0; on every process the same
    """

    def __init__(self, cluster: Cluster, signals: Signals) -> None:
        self.signal = 0
        self._cluster = cluster
        self._signals = signals

    def __call__(self, word: Word) -> Word:
        """Takes this process's word, adds the signal it received, and returns that of all."""
        word = self._cluster.agree(
            dataclasses.replace(word, signal=self.signal or self._signals.received or 0)
        )
        self.signal = word.signal
        return word


class Signals:
    """Notes SIGTERM and SIGINT instead of dying of them; a second one is not held back.

    What comes within a second of the first is taken for the same: a process manager may signal
    a whole cluster, of which the supervisor passes it on as well.

    Attributes:
        received: the number of the first one, or None
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread: the program there decides
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = number, now
        elif now - self._at > SAME_SIGNAL:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
