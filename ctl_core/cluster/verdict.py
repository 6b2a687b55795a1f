"""What became of a cluster, by how its workers ended."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from typing import Literal

from ctl_core.errors import PeerLost

# A worker that ended so has done what it was told to.
ORDERLY = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
# The same signals before it listened to them, or a second time.
BY_SIGNAL = (-signal.SIGINT, -signal.SIGTERM)
# Hooks, settings, files: trying again would fail again.
_USERS_FAILURE = (1, 2)


@dataclasses.dataclass(frozen=True)
class End:
    """How a worker ended: its exit code, negative for the signal that killed it."""

    worker: int
    code: int

    def __str__(self) -> str:
        if self.code == PeerLost.exit_code:
            return f"worker {self.worker} lost another worker"
        if self.code >= 0:
            return f"worker {self.worker} ended with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"worker {self.worker} was killed by {name}"


def judge(ends: Sequence[End]) -> tuple[Literal["done", "failed", "crashed"], End]:
    """Says what became of a cluster, and which worker decides it.

    Args:
        ends: in the order in which they ended, those that the supervisor killed left out

    Returns:
        ``done``, with the chief's end if it is among them; ``failed``, the user's own failure,
        which starting again would repeat; or ``crashed``, with what looks most like the cause.
    """
    by_chief = sorted(ends, key=lambda end: end.worker != 0)
    if failed := [end for end in by_chief if end.code in _USERS_FAILURE]:
        return "failed", failed[0]
    if crashed := [end for end in ends if end.code not in ORDERLY]:
        # TensorFlow answers the loss of a peer by PeerLost, or by aborting.
        consequences = (-signal.SIGABRT, PeerLost.exit_code)
        return "crashed", min(
            crashed,
            key=lambda end: consequences.index(end.code) + 1 if end.code in consequences else 0,
        )
    return "done", by_chief[0]
