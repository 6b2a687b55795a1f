"""The process that trains a run: process.json in the run folder, and what has become of it.

The lock of a run says whether it is being trained; this says by whom, and how it ended. It imports
no TensorFlow: ``runs``, ``stop`` and ``logs`` are answered at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ctl_core.files import written_whole
from ctl_core.metric_values import storable

FILE = "process.json"
# What a run in the background prints.
OUTPUT = "output.log"
# Whose locks say that a run is being trained: the chief's, and that of a supervisor.
_LOCKS = ("train.log", "worker-1.log")


@dataclasses.dataclass
class Process:
    """What process.json holds.

    Attributes:
        pid: of the process to signal, a cluster's supervisor say
        born: when it began, as the kernel counts, so that another of that number is not taken for
            it; None where that cannot be known
        host: the machine's name
        started: seconds since 1970
        background: whether it was started by ``--background``
        ended: seconds since 1970, or None
        how: done, ended (early), stopped, diverged or failed; None until then
        line: what a failure said, or which signal stopped the run
        step: after which it ended
        metrics: of the last evaluation
        training_log: the file with the run's entry, or None
    """

    pid: int
    born: int | None
    host: str
    started: float
    background: bool = False
    ended: float | None = None
    how: str | None = None
    line: str = ""
    step: int | None = None
    metrics: dict[str, float | None] = dataclasses.field(default_factory=dict)
    training_log: str | None = None

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.host == platform.node()

    def alive(self) -> bool:
        """Whether it is a process of this machine that goes on."""
        return self.here and exists(self.pid) and _born(self.pid) == self.born


def exists(pid: int) -> bool:
    """Whether there is a process of this number that has not ended."""
    with contextlib.suppress(OSError, IndexError):  # one that nobody has waited for yet has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _born(pid: int) -> int | None:
    with contextlib.suppress(OSError, IndexError, ValueError):  # the 22nd field; only on Linux
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def begin(folder: Path, pid: int, background: bool = False) -> Process:
    """Writes down that a process trains a run from now on.

    Raises:
        OSError: it cannot be written.
    """
    before = read_process(folder)
    process = Process(pid, _born(pid), platform.node(), time.time(), background)
    if before is not None:
        process.training_log = before.training_log
        same = (before.pid, before.born, before.host) == (pid, process.born, process.host)
        process.background |= same and before.background
    write(folder, process)
    return process


def end(
    folder: Path,
    how: str,
    line: str = "",
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Process | None:
    """Writes down how a run ended; returns what is known of its process, if anything is.

    Raises:
        OSError: it cannot be written.
    """
    process = read_process(folder)
    if process is None:
        return None
    process.ended, process.how, process.line, process.step = time.time(), how, line, step
    process.metrics = storable(metrics or {})
    write(folder, process)
    return process


def write(folder: Path, process: Process) -> None:
    """Writes process.json, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with written_whole(folder / FILE) as beside:
        beside.write_text(json.dumps(dataclasses.asdict(process)) + "\n", encoding="utf-8")


def read_process(folder: Path) -> Process | None:
    """Reads process.json; None where there is none that can be read."""
    known = {field.name for field in dataclasses.fields(Process)}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        process = Process(**{name: value for name, value in found.items() if name in known})
        if isinstance(process.pid, int) and isinstance(process.started, int | float):
            return process
    return None


def held(folder: Path) -> bool | None:
    """Whether a process trains a run, or starts its workers; None where no locks tell."""
    for name in _LOCKS:
        if (found := locked(folder / name)) is not False:
            return found
    return False


def locked(log: Path) -> bool | None:
    """Whether a process holds a run by this log of it; None where there are no locks to tell.

    Looking takes the lock for an instant, which training waits out.
    """
    if fcntl is None:
        return None
    try:
        with log.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False
