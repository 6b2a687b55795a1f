"""``--background``: trains in a process of its own, which goes on without the terminal.

The command waits until that process has taken its first step, so that a run that cannot start is
reported here. The process appends what it prints to ``runs/NAME/train.log``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ctl_core.run.errors import SetupError
from ctl_core.run.files import LOCK, is_run_locked, relative_path

# Names the file descriptor of a pipe, to which the process writes once it has taken a step.
PIPE = "BACKGROUND_PIPE"
_STEP = b"."


def is_in_background() -> bool:
    """Returns whether this process was started by ``start``."""
    return PIPE in os.environ


def list_inherited() -> tuple[int, ...]:
    """Returns the file descriptors that the processes of a cluster need to call ``tell_step``."""
    if PIPE not in os.environ:
        return ()
    return (int(os.environ[PIPE]),)


def tell_step() -> None:
    """Tells the command that has started this process, if there is one, that a step was taken."""
    _tell(_STEP)


def tell_failure(text: str) -> None:
    """Tells that command why this process ends before its first step."""
    _tell(text.encode())


def _tell(content: bytes) -> None:
    """Writes to the command that waits for this process; only the first time."""
    pipe = os.environ.pop(PIPE, None)
    if pipe is None:
        return
    with contextlib.suppress(OSError):  # nobody waits any more
        os.write(int(pipe), content)
        os.close(int(pipe))


def start(argv: Sequence[str], folder: Path) -> int:
    """Starts the training in a process of its own, and waits for its first step.

    Args:
        argv: the command line, without ``--background`` and with the name of the run
        folder: of the run

    Returns:
        0 when the process trains or has trained already; otherwise its exit code.

    Raises:
        SetupError: another process trains this run.
        KeyboardInterrupt: Ctrl-C was pressed before the first step; the process is stopped, too.
    """
    shown = relative_path(folder)
    if is_run_locked(folder):
        raise SetupError(
            f"{shown}: another process is training this run: kill $(cat {shown}/{LOCK}) saves and "
            "ends it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    with (folder / "train.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ctl_core", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, PIPE: str(write_end), "PYTHONUNBUFFERED": "1"},
            pass_fds=(write_end,),
            start_new_session=True,  # neither Ctrl-C nor the end of the terminal reaches it
        )
    os.close(write_end)
    try:
        with os.fdopen(read_end, "rb") as pipe:
            message = pipe.read()  # until all processes that have the other end have closed it
        if message == _STEP:
            print(
                f"process {process.pid} trains {shown}: tail -f {shown}/train.log; "
                f"kill {process.pid} saves and ends it",
                flush=True,
            )
            return 0
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    if code == 0:
        print(f"{shown}: there was nothing left to train; see {shown}/train.log", flush=True)
        return 0
    text = message.decode() or f"error: training ended before its first step; see {shown}/train.log"
    print(text, file=sys.stderr, flush=True)
    if code < 0:  # ended by a signal
        return 128 - code
    return code
