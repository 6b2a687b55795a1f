"""The lock of a run: its log, which the process that trains it holds, however that ends."""

from __future__ import annotations

import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ctl_core.errors import SetupError
from ctl_core.files import from_here


def is_locked(log: Path) -> bool | None:
    """Whether a process holds this file of a run; None where there are no locks to tell.

    Looking takes the lock for an instant, which training waits out.
    """
    if fcntl is None:
        return None
    try:
        file = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


def refuse_second(folder: Path) -> SetupError:
    """Returns what to say of a run that another process is training."""
    return SetupError(
        f"{from_here(folder)}: another process is training this run; stop it, or choose another "
        "run_name."
    )
