"""Stops and starts training loops, so that several can be timed in turn, a segment at a time.

A loop that is not ours, such as Keras ``fit``, cannot be left and entered again without paying
for its start anew. So each peer trains in a thread of its own, of which only one runs at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

# Steps after which the weights are compared: one call of Keras with 50 steps a call.
CHECKED = 50


class Over(Exception):
    """Raised in a loop that is to end."""


class Pace:
    """One loop that trains in a thread of its own, and stands still between two segments.

    The loop sets ``weights``, a function that returns the model's.
    """

    def __init__(self, loop: Callable[[Pace], Any], segment: int) -> None:
        """The loop has to call ``stop`` after each step that is ``due``."""
        self.segment = segment
        self.weights: Callable[[], list[Any]] | None = None
        self._loop = loop
        self._go = threading.Semaphore(0)
        self._there = threading.Semaphore(0)
        self._start = self._seconds = 0.0
        self._over = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)

    def due(self, step: int) -> bool:
        """Whether the loop has to stop after this step."""
        return step == CHECKED or step % self.segment == 0

    def stop(self) -> None:
        """Ends the segment in the loop's thread; returns at the beginning of the next one.

        Raises:
            Over: there is no next one.
        """
        self._seconds = time.perf_counter() - self._start
        self._there.release()
        self._go.acquire()
        if self._over:
            raise Over
        self._start = time.perf_counter()

    def advance(self) -> float:
        """Lets the loop train up to its next stop; returns the seconds that it took.

        The first call takes it to step 50, the next one to the end of the segment it is in.
        """
        if not self._thread.is_alive():
            self._start = time.perf_counter()
            self._thread.start()
        else:
            self._go.release()
        self._there.acquire()
        if self._failure is not None:
            raise self._failure
        return self._seconds

    def end(self) -> None:
        """Ends the loop; what its thread still has to tear down after a moment, it does alone."""
        self._over = True
        self._go.release()
        self._thread.join(0.3)

    def _train(self) -> None:
        try:
            self._loop(self)
            self._failure = RuntimeError("the loop has ended by itself.")
        except Over:
            return
        except BaseException as error:
            self._failure = error
        finally:
            self._there.release()


def settle(longest: float = 3.0) -> None:
    """Waits until this process is at rest, at most so many seconds.

    A loop that stands still goes on to prepare batches until its buffer is full, which would be
    paid for by whoever is timed next.
    """
    end = time.perf_counter() + longest
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(0.02)
        if time.process_time() - before < 0.002:
            return


def timed(paces: dict[str, Pace], rounds: int) -> dict[str, list[float]]:
    """Times segments in turn; returns the seconds of a step, one for each round."""
    seconds: dict[str, list[float]] = {name: [] for name in paces}
    names = list(paces)
    for _ in range(rounds):
        names = [*names[1:], names[0]]  # who begins changes from round to round
        for name in names:
            settle()
            seconds[name].append(paces[name].advance() / paces[name].segment)
    return seconds
