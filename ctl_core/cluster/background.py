"""Implements ``--background``, which trains in a separate process that outlives the terminal.

The command waits until the process has taken its first step, so that it can report a run that
cannot start. The output of the process is appended to ``runs/NAME/train.log``.
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
from ctl_core.run.files import LOCK, is_run_locked, prepare_output, relative_path

# The environment variable with the file descriptor of a pipe. The process writes to this pipe once
# it has taken a step.
PIPE = "BACKGROUND_PIPE"
_STEP = b"."


def is_in_background() -> bool:
    """Returns True if this process was started by ``start`` and has not reported to it yet."""
    return PIPE in os.environ


def list_inherited() -> tuple[int, ...]:
    """Returns the file descriptors that the processes of a cluster need to call ``tell_step``."""
    if PIPE not in os.environ:
        return ()
    return (int(os.environ[PIPE]),)


def tell_step() -> None:
    """Reports to the command that started this process, if there is one, that a step was taken."""
    _tell(_STEP)


def tell_failure(text: str) -> None:
    """Reports to the command that started this process why it ends before its first step."""
    _tell(text.encode())


def _tell(content: bytes) -> None:
    """Writes to the command that waits for this process; further calls do nothing."""
    pipe = os.environ.pop(PIPE, None)
    if pipe is None:
        return
    with contextlib.suppress(OSError):  # the command no longer waits
        os.write(int(pipe), content)
        os.close(int(pipe))


def start(argv: Sequence[str], folder: Path) -> int:
    """Starts training in a separate process, and waits for its first step.

    Args:
        argv: the command line, without ``--background`` and with the name of the run
        folder: the folder of the run

    Returns:
        0 if the process has taken a step, or if there is nothing left to train; otherwise, the exit
        code of the process.

    Raises:
        SetupError: another process is training this run.
        KeyboardInterrupt: Ctrl-C was pressed before the first step; the process is stopped, too.
    """
    shown = relative_path(folder)
    if is_run_locked(folder):
        raise SetupError(
            f"{shown}: another process is training this run; to save and end it: kill $(cat "
            f"{shown}/{LOCK})"
        )
    prepare_output("runs_dir", folder)
    read_end, write_end = os.pipe()
    with (folder / "train.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ctl_core", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, PIPE: str(write_end), "PYTHONUNBUFFERED": "1"},
            pass_fds=(write_end,),
            start_new_session=True,  # Ctrl-C and the end of the terminal do not reach the process
        )
    os.close(write_end)
    try:
        with os.fdopen(read_end, "rb") as pipe:
            # The first read is a single byte, because a supervisor or a process that a hook has
            # forked may keep the other end of the pipe open until training ends.
            message = pipe.read(1)
            if message != _STEP:
                message += pipe.read()
        if message == _STEP:
            print(
                f"process {process.pid} trains {shown}. To follow it: tail -f {shown}"
                f"/train.log. To save and end it: kill {process.pid}",
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
    if code < 0:  # a signal ended the process
        return 128 - code
    return code
