"""What follows a training by ``--then``, in process.json: its run goes on until that has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ctl_core import run_process, training_log
from ctl_core.errors import CtlError, brief


@contextlib.contextmanager
def following(folder: Path, name: str) -> Iterator[None]:
    """Around a command that follows a training: writes down how that ends.

    Raises:
        BaseException: what is raised within, after it was written down.
    """
    try:
        yield
    except KeyboardInterrupt:
        _write(folder, name, "stopped", f"SIGINT in {name}")
        raise
    except CtlError as error:
        _write(folder, name, "failed", f"{name}: {error}")
        raise
    except BaseException as error:
        _write(folder, name, "failed", f"{name}: {brief(error)}")
        raise
    _write(folder, name)


def cut_short(folder: Path, line: str) -> None:
    """Writes down that a process was stopped in what followed the training, by a signal.

    Raises:
        OSError: it cannot be written.
    """
    process = run_process.read_process(folder)
    if process is not None and process.following is not None:
        process.line, process.how, process.then = f"{line} in {process.following}", "stopped", []
        run_process.write(folder, process)
        training_log.complete(folder, process)


def _write(folder: Path, name: str, how: str | None = None, line: str = "") -> None:
    """Writes how a command has ended; not if another process trains the run by now."""
    with contextlib.suppress(OSError):  # the command has said what it has to say
        process = run_process.read_process(folder)
        if process is None or not process.own or process.following != name:
            return
        if how is None:
            process.then = process.then[1:]
        else:
            process.how, process.line, process.then = how, line, []
        run_process.write(folder, process)
        if how is not None:
            training_log.complete(folder, process)
