"""What a tracker is, what it is told of a run, and how one is found by its name.

A tracker runs in a process of its own (follow.py), which reads the run's files: nothing that it
does, imports or patches reaches the training.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ctl_core.apart import start_apart
from ctl_core.errors import SettingError, brief

# What each of ours is imported from; the extra of the project that installs it has its own name.
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml", "trackio": "trackio"}
# The states in which a run has come to the end that was planned for it.
WELL = ("done", "ended")
# What comes before the answer of a process that looks at a tracker, whatever that prints itself.
_SAYS = "\0refused: "
# How long such a process may take (seconds).
_PATIENCE = 30.0


class Refused(Exception):
    """A tracker cannot be used as things are here: a package or a login is missing, say.

    Its message is for the user: what is missing, and what to do. Anything else that a tracker
    raises counts as a service that cannot be reached now, and is tried again.
    """


@dataclasses.dataclass(frozen=True)
class Tracked:
    """A run, as a tracker is told of it when it starts.

    Attributes:
        name: of the run
        folder: of the run, absolute
        project: the name of the folder that the run was started in
        id: with which the run goes on where it has been logged before; None: it is new there
        finished: whether ``finish`` has returned when it was logged there before
        step: at which it begins or goes on
        note: what is expected of it, or ""
        env: what env.json has: commit, host, devices, versions, command and so on
    """

    name: str
    folder: Path
    project: str
    id: str | None
    finished: bool
    step: int
    note: str
    env: Mapping[str, Any]

    @property
    def files(self) -> Path:
        """The folder for what a tracker keeps on this machine."""
        return self.folder / "trackers"


@dataclasses.dataclass(frozen=True)
class Status:
    """How a run has ended.

    Attributes:
        how: done, ended (early), stopped, diverged, failed or killed
        line: what a failure said, or which signal stopped the run
        step: after which it ended, or the last one known of
        metrics: of its last evaluation; NaN where a value was not finite
    """

    how: str
    line: str
    step: int
    metrics: Mapping[str, float]


class Tracker(Protocol):
    """What a tracker has, the user's own, too.

    It may also have ``image(step, name, png)``, with the bytes of a PNG file; ``flush()``, called
    after several calls; and ``safe`` = False where nothing is safe until ``finish`` has returned.
    """

    def start(self, config: Mapping[str, Any], run: Tracked) -> str | None:
        """Begins, or goes on with ``run.id``; returns the id to go on with.

        Raises:
            Refused: it cannot be used here.
        """
        ...

    def log(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Logs what was measured after a step, of ``train`` or ``eval``.

        Or, of ``progress``, the learning rate and the speed of the training.
        """
        ...

    def finish(self, status: Status) -> None:
        """Ends; whatever was logged has been handed over when it returns."""
        ...


def check_installed(name: str) -> None:
    """Refuses a tracker of ours whose package is not there, and one of the user's that is none.

    It imports nothing here: the user's is imported by a process of its own, once.

    Raises:
        SettingError: as said.
    """
    package = PACKAGES.get(name)
    if package is None:
        _check_own(name, os.getcwd())
    elif importlib.util.find_spec(package) is None:
        raise SettingError(f"trackers: {missing(name)}")


@functools.cache  # what is refused is not kept
def _check_own(name: str, folder: str) -> None:
    checking = start_apart(
        "ctl_core.trackers.base",
        name,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        said = checking.communicate(timeout=_PATIENCE)[1]
    except subprocess.TimeoutExpired:  # the run says so when it has waited for the tracker
        checking.kill()
        checking.communicate()
        return
    if checking.returncode == 2:
        raise SettingError(f"trackers: {said.rpartition(_SAYS)[2]}")


def missing(name: str) -> str:
    """Says that the package of a tracker is not installed, and what installs it."""
    return (
        f"{name} is not installed; in the project's folder: "
        f'python -m pip install --editable ".[{name}]"'
    )


def find_tracker(name: str, make: bool = True) -> Tracker:
    """Makes a tracker: one of ours, or what a dotted path names, a class or a module.

    Args:
        name: of the tracker
        make: whether an object of a user's class is made; otherwise the class is looked at

    Raises:
        Refused: it cannot be imported, or is none.
    """
    try:
        if name in PACKAGES:
            return importlib.import_module(f"ctl_core.trackers.{name}").Tracker()  # type: ignore[no-any-return]
        found = _imported(name)
        of_class = isinstance(found, type)
        found = found() if of_class and make else found
    except ModuleNotFoundError as error:
        if error.name == PACKAGES.get(name):
            raise Refused(missing(name)) from error
        raise Refused(f"{name}: {brief(error)}{line_in(error)}") from error
    except Exception as error:
        raise Refused(f"{name}: {brief(error)}{line_in(error)}") from error
    lacking = [each for each in ("start", "log", "finish") if not callable(getattr(found, each, 0))]
    late = of_class and not make and found.__init__ is not object.__init__  # it may have them then
    if lacking and not late:
        raise Refused(f"{name}: has no {', '.join(lacking)}; a tracker has start, log and finish.")
    return found  # type: ignore[no-any-return]


def _imported(path: str) -> Any:
    """Imports the longest part of a dotted path that is a module, and takes the rest from there."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if length > 1 and error.name is not None and module.startswith(error.name):
                continue
            raise
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


def line_in(error: BaseException) -> str:
    """Says at which line of the user's own code something was raised, if any had a part in it."""
    ours = Path(__file__).parents[1]
    installed = [Path(path) for path in {*sysconfig.get_paths().values()}]
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        inside = any(path.is_relative_to(folder) for folder in (ours, *installed))
        if path.is_file() and not inside:
            found = f" ({path.name}:{frame.lineno})"
    return found


_DENIED = re.compile(
    r"\b40[13]\b|unauthori[sz]ed|unauthenticated|forbidden|permission denied|invalid api key", re.I
)


def denied(error: Exception) -> bool:
    """Whether a service has answered, and says that the login is not good enough.

    Their packages have no exception of one kind for it: it is told by name and text.
    """
    return _DENIED.search(f"{type(error).__name__} {error}") is not None


def flat_env(run: Tracked) -> dict[str, Any]:
    """Returns what is known of where a run is trained, as names and texts or numbers."""
    found: dict[str, Any] = {}
    for name, value in run.env.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": part for key, part in value.items()}
        else:
            found[name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return {name: value for name, value in found.items() if value is not None}


def named(split: str, values: Mapping[str, float]) -> dict[str, float]:
    """Returns values as trackers name them: ``train/loss``."""
    return {f"{split}/{name}": value for name, value in values.items()}


def _look(name: str) -> int:
    """Looks whether a tracker can be imported and is one, as a process of its own."""
    try:
        find_tracker(name, make=False)
    except Refused as error:
        print(f"{_SAYS}{error}", end="", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_look(sys.argv[1]))
