"""Whether all processes of a cluster see the run folder that process 0 writes to.

One that sees a folder of its own would begin anew where the others resume.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from ctl_core.cluster.sync import Cluster
from ctl_core.errors import SetupError
from ctl_core.files import from_here

# How long a file may take from one machine to another: a network file system asks its server anew
# only after some time (seconds).
_LATENESS = 30.0


def check_shared(cluster: Cluster, folder: Path) -> None:
    """Compares what the processes see in the run folder.

    Raises:
        SetupError: processes see another folder than process 0 writes to.
        PeerLost: another process is gone.
    """
    task = cluster.task
    if task.processes == 1:
        return
    number = secrets.randbits(60) + 1 if task.chief else 0
    own = folder / f".seen-{number}"
    with contextlib.suppress(OSError):  # then nobody sees it
        if task.chief:
            own.touch()
    number = int(cluster.gather([number]).max())
    seen = _sees(folder, f".seen-{number}")
    table = cluster.gather([int(seen)])[:, 0]
    if task.chief:
        own.unlink(missing_ok=True)
    if blind := [task.shown(index) for index in range(task.processes) if not table[index]]:
        raise SetupError(
            f"runs_dir: what {task.shown(0)} writes in {from_here(folder)} is not seen by "
            f"{', '.join(blind[:4])}{f' and {len(blind) - 4} more' * (len(blind) > 4)}; name a "
            "folder of a file system that all of them share."
        )


def _sees(folder: Path, name: str) -> bool:
    end = time.monotonic() + _LATENESS
    while True:
        with contextlib.suppress(OSError):
            if name in os.listdir(folder):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
