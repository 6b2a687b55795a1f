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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ctl_core.errors import SetupError
from ctl_core.files import from_here, written_whole
from ctl_core.metric_values import storable

FILE = "process.json"
# What a run in the background prints.
OUTPUT = "output.log"
# Held by who evaluates a run's checkpoints as they come.
WATCHED = "watch.jsonl"
# What has stopped a run that a second Ctrl-C has ended there and then, without saving it.
AT_ONCE = "SIGINT, at once"
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
        evaluated: the step of that, or None
        seconds: how long the run was trained, in all its starts that have ended; None if not known
        training_log: the file with the run's entry, or None
        changed: settings that later starts of such a run had otherwise, by name, as a person reads
            them
        then: the commands of ``--then`` that have not come to their end; the first follows the
            training, or goes on after it
        program: whether it is a program that calls ``train``, or a notebook: it goes on when the
            run has ended
        flags: for settings, that the command was given, or took over of an earlier start
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
    evaluated: int | None = None
    seconds: float | None = None
    training_log: str | None = None
    changed: dict[str, str] = dataclasses.field(default_factory=dict)
    then: list[str] = dataclasses.field(default_factory=list)
    program: bool = False
    flags: list[str] = dataclasses.field(default_factory=list)

    @property
    def following(self) -> str | None:
        """The command that follows the training, which has come to its end; or None."""
        return self.then[0] if self.how is not None and self.then else None

    @property
    def at_work(self) -> bool:
        """Whether it has not written down that the run has ended, with all that follows."""
        return self.ended is None or self.following is not None

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.host == platform.node()

    @property
    def own(self) -> bool:
        """Whether it is this process."""
        return self.pid == os.getpid() and self.alive()

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


class Concluded(KeyboardInterrupt):
    """A Ctrl-C that came when the run was stopped and saved, and had said so."""


# Whether it was.
_stopped = False
# What this process does when it has trained; None in a program that is not ours.
_then: list[str] | None = None
# The flags for settings of its command.
_flags: list[str] = []


@contextlib.contextmanager
def of_command(then: Sequence[str], flags: Sequence[str]) -> Iterator[None]:
    """Within, a run that this process trains is all that it is there for, and what follows it.

    Raises:
        Concluded: KeyboardInterrupt came late.
    """
    global _then, _flags, _stopped
    _then, _flags, _stopped = list(then), list(flags), False
    try:
        yield
    except KeyboardInterrupt as error:
        if _stopped:
            raise Concluded from error
        raise
    finally:
        _then, _flags = None, []


def begin(folder: Path, pid: int, background: bool = False, flags: Sequence[str] = ()) -> Process:
    """Writes down that a process trains a run from now on.

    Args:
        folder: of the run
        pid: of the process to signal
        background: whether that was started by ``--background``
        flags: for settings, that it was given, where it is not this process

    Raises:
        OSError: it cannot be written.
    """
    before = read_process(folder)
    process = Process(pid, _born(pid), platform.node(), time.time(), background)
    process.then, process.program = _then or [], _then is None and not background
    process.flags = list(flags) or _flags
    if before is not None:
        process.training_log, process.changed = before.training_log, before.changed
        process.seconds = before.seconds
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
    evaluated: int | None = None,
    seconds: float | None = None,
) -> Process | None:
    """Writes down how a run ended; returns what is known of its process, if anything is.

    Raises:
        OSError: it cannot be written.
    """
    global _stopped
    _stopped = how == "stopped" and line != AT_ONCE
    process = read_process(folder)
    if process is None:
        return None
    process.ended, process.how, process.line, process.step = time.time(), how, line, step
    process.metrics, process.evaluated = storable(metrics or {}), evaluated
    if seconds is not None:
        process.seconds = seconds
    if how not in ("done", "ended"):  # then nothing follows
        process.then = []
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
    """Reads process.json; None where there is none, or what is there is damaged."""
    path = folder / FILE
    if not path.is_file():  # a folder, or a named pipe, which would keep us waiting
        return None
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {name: value for name, value in found.items() if name in _SOUND}
        if all(_SOUND[name](value) for name, value in known.items()):
            return Process(**known)
    return None


def seconds_trained(folder: Path, lines: Iterable[Mapping[str, Any]]) -> float | None:
    """Returns how long a run was trained, in all its starts; None where that is not known.

    Args:
        folder: of the run
        lines: of its progress.jsonl, which tell of a start that was killed
    """
    process = read_process(folder)
    known = [line.get("seconds") for line in lines] + [process.seconds if process else None]
    return max((value for value in known if isinstance(value, int | float)), default=None)


def _whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _time(value: Any) -> bool:
    return _number(value) and 0 <= value < 1e11


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(sound: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or sound(value)


# Which values process.json may have: a file may have been copied, cut short or edited.
_SOUND: dict[str, Callable[[Any], bool]] = {
    "pid": lambda value: _whole(value) and 0 < value < 1 << 31,
    "born": _or_none(_whole),
    "host": _text,
    "started": _time,
    "background": lambda value: isinstance(value, bool),
    "ended": _or_none(_time),
    "how": _or_none(_text),
    "line": _text,
    "step": _or_none(_whole),
    "metrics": lambda value: all(value is None or _number(value) for value in value.values()),
    "evaluated": _or_none(_whole),
    "seconds": _or_none(_time),
    "training_log": _or_none(_text),
    "changed": lambda value: all(map(_text, value.values())),
    "then": lambda value: isinstance(value, list) and all(map(_text, value)),
    "program": lambda value: isinstance(value, bool),
    "flags": lambda value: isinstance(value, list) and all(map(_text, value)),
}


def held(folder: Path) -> bool | None:
    """Whether a process trains a run, or starts its workers; None where no locks tell."""
    for name in _LOCKS:
        if (found := locked(folder / name)) is not False:
            return found
    return False


def refuse_taken(folder: Path) -> None:
    """Refuses to train a run that another process is at work on.

    Raises:
        SetupError: one trains it, or does what follows.
    """
    process = read_process(folder)
    if process is not None and process.at_work and process.alive() and not process.own:
        raise taken(folder, process.following)
    if held(folder):
        raise taken(folder)


def taken(folder: Path, following: str | None = None) -> SetupError:
    """Returns what to say of a run that another process is at work on.

    Args:
        folder: of the run
        following: the command that it does after the training, if it has come to that
    """
    doing = f"goes on with {following} of this run" if following else "is training this run"
    return SetupError(
        f"{from_here(folder)}: another process {doing}; stop it (python -m ctl_core stop "
        f"{folder.name}), or choose another run_name."
    )


def locked(log: Path) -> bool | None:
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
