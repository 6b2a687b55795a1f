"""Waits for what other processes do."""

import subprocess
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    seconds: float = 300.0,
    interval: float = 0.02,
    explain: Callable[[], str] = lambda: "waited in vain",
) -> None:
    """Waits until a condition holds.

    Args:
        condition: a function whose result is true when the wait is over
        seconds: the maximum time to wait
        interval: the time between two calls of ``condition`` (seconds)
        explain: returns the message of the error

    Raises:
        AssertionError: the condition does not hold after the maximum time.
    """
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, explain()
        time.sleep(interval)


def wait_until_or_ended(
    condition: Callable[[], object], process: subprocess.Popen[bytes] | subprocess.Popen[str]
) -> None:
    """Waits until a condition, which is looked at often, holds or a process has ended."""
    wait_until(lambda: condition() or process.poll() is not None, interval=0.001)
