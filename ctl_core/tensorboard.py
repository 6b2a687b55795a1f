"""``train --tensorboard``: TensorBoard beside a training, on all runs of the project.

It is a process of its own, ``python -m ctl_core.tensorboard FOLDER``, which serves until its
standard input is closed: by the training that has started it, or because that is gone, in whatever
way.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ctl_core.apart import start_apart
from ctl_core.console import say
from ctl_core.errors import SetupError, brief
from ctl_core.files import from_here

PACKAGE = "tensorboard"
# How often the process looks whether the training is still there, beside its pipe (seconds).
POLL = 1.0
# How long it may take to end (seconds).
LAST = 3


def check_board() -> None:
    """Refuses where TensorBoard is not installed; imports nothing.

    Raises:
        SetupError: it is not.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise SetupError(
            f"tensorboard: it is not installed in {sys.prefix}; in the project's folder: "
            f"{sys.executable} -m pip install --editable ."
        )


def command() -> str:
    """Returns what starts the TensorBoard of this Python from here, in the fewest words."""
    own = os.path.dirname(sys.executable)
    for name, words in ((PACKAGE, PACKAGE), ("python", "python -m tensorboard.main")):
        found = shutil.which(name)
        if found and os.path.dirname(os.path.abspath(found)) == own:
            return words
    return f"{shlex.quote(from_here(sys.executable))} -m tensorboard.main"


class Board:
    """TensorBoard, as a process of this one's."""

    def __init__(self, runs_dir: Path) -> None:
        """Starts it, and says where it serves as soon as it does.

        Args:
            runs_dir: the folder of the runs

        Raises:
            SetupError: it cannot be started.
        """
        self._runs = from_here(runs_dir)
        self._url: str | None = None
        # TensorBoard reads with TensorFlow, which would take the GPUs' memory.
        own = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            self._process = start_apart(
                "ctl_core.tensorboard",
                str(runs_dir.absolute()),
                environ=own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise SetupError(f"tensorboard: it cannot be started: {error}") from error
        self._reader = threading.Thread(target=self._hear, daemon=True)
        self._reader.start()

    def _hear(self) -> None:
        """Waits for its one line: where it serves, or why it does not."""
        assert self._process.stdout is not None
        try:
            self._url, why = json.loads(self._process.stdout.readline())
        except ValueError:  # it is gone, perhaps since the training is over
            return
        if self._url is None:
            say(f"warning: TensorBoard cannot be started: {why}")
        else:
            say(f"TensorBoard: {self._url} has the runs in {self._runs}")

    def keep(self) -> None:
        """Lets it serve on until Ctrl-C."""
        self._reader.join()
        if self._url is None:
            return
        print(f"TensorBoard goes on at {self._url} until Ctrl-C.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            self._process.wait()

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(LAST)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def farewell(self) -> None:
        """Says that it ends, and how the runs are looked at afterwards."""
        print(
            f"TensorBoard ends with the training: {command()} --logdir {shlex.quote(self._runs)} "
            "shows the runs again, and --tensorboard keep lets it go on.",
            flush=True,
        )


def main(folder: str) -> int:
    """Serves the runs in a folder until standard input is closed, or the parent is gone."""
    parent, serves, closed = os.getppid(), threading.Event(), threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        if not serves.is_set():  # it may be importing for seconds yet
            os._exit(0)
        closed.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        from tensorboard import program

        board: Any = program.TensorBoard()
        board.configure(logdir=folder)  # at 6006, or the next port that is free
        url = board.launch()
    except Exception as error:
        print(json.dumps([None, brief(error)]), flush=True)
        return 1
    serves.set()
    print(json.dumps([url, ""]), flush=True)
    while os.getppid() == parent and not closed.wait(POLL):
        pass
    if hasattr(signal, "alarm"):
        signal.alarm(60)  # whatever of it does not end, and whose parent is gone
    return 0  # its own folder of temporary files is removed now


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
