"""Pauses training loops, so that several loops can be timed in turn, one segment at a time.

A loop such as Keras ``fit`` cannot be left and entered again without the cost of a new start.
Therefore, each peer trains in its own thread, and only one of the threads runs at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

# The number of steps after which weights are compared: one call of Keras with 50 steps per call.
CHECKED = 50


class Over(Exception):
    """Raised in a loop in order to end it."""


class Pace:
    """A loop that trains in its own thread, and is paused between two segments.

    The loop sets ``weights``, a function that returns the weights of its model.
    """

    def __init__(self, loop: Callable[[Pace], Any], segment: int) -> None:
        """Creates the thread of a loop, which calls ``stop`` after each step that is ``due``."""
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
        """Returns True if the loop must call ``stop`` after this step."""
        return step == CHECKED or step % self.segment == 0

    def stop(self) -> None:
        """Ends a segment, and waits for the beginning of the next one; the loop calls it.

        Raises:
            Over: there is no next segment.
        """
        self._seconds = time.perf_counter() - self._start
        self._there.release()
        self._go.acquire()
        if self._over:
            raise Over
        self._start = time.perf_counter()

    def advance(self) -> float:
        """Lets the loop train up to its next call of ``stop``; returns the seconds that it took.

        The first call of ``advance`` trains up to step 50, the next one to the end of the segment
        that contains step 50.
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
        """Ends the loop, and waits until it has ended.

        Otherwise, the next loop would begin while this one ends. Then its weights may be others,
        because both change the same global settings.
        """
        self._over = True
        self._go.release()
        self._thread.join(60)

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
    """Waits until this process is idle, but not longer than ``longest`` seconds.

    A paused loop still prepares batches until its buffer is full, which would increase the time of
    the loop that is timed next.
    """
    end = time.perf_counter() + longest
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(0.02)
        if time.process_time() - before < 0.002:
            return


def timed(paces: dict[str, Pace], rounds: int) -> dict[str, list[float]]:
    """Times the segments of all loops in turn; returns the seconds per step of each round."""
    seconds: dict[str, list[float]] = {name: [] for name in paces}
    names = list(paces)
    for _ in range(rounds):
        names = [*names[1:], names[0]]  # each round begins with another loop
        for name in names:
            settle()
            seconds[name].append(paces[name].advance() / paces[name].segment)
    return seconds
