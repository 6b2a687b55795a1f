"""How many steps one graph call runs: as many as possible, but no longer than about a second.

A signal is answered between two calls. The split of a run into calls does not change its
results: each step of a call is the same graph.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

TARGET_SECONDS = 1.0


# Most steps of a graph call: a signal and the clock are looked at between two.
MOST_STEPS = 1000


class ChunkLength:
    """Learns from the calls so far how many steps fit into a second.

    Attributes:
        limit: the most steps that the next call should run
    """

    def __init__(self, most: int) -> None:
        self.limit = min(8, most)
        self._most = most

    @contextmanager
    def timed(self, steps: int) -> Iterator[int]:
        """Measures a call of ``steps`` steps, which it yields back."""
        start = time.monotonic()
        yield steps
        seconds = max(time.monotonic() - start, 1e-9)
        fitting = int(steps * TARGET_SECONDS / seconds)
        # Growing fourfold at most, so that one quick call does not lead to a very long one.
        self.limit = max(1, min(fitting, 4 * self.limit, self._most))
