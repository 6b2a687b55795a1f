"""What a tracker is, what it is told of a run, and how one is found by its name.

A tracker runs in a process of its own (follow.py), which reads the run's files: nothing that it
does, imports or patches reaches the training.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ctl_core.errors import SetupError, brief

# What each of ours is imported from; the extra of the project that installs it has its own name.
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml", "trackio": "trackio"}
# The states in which a run has come to the end that was planned for it.
WELL = ("done", "ended")


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
        """Logs what was measured after a step, of ``train`` or ``eval``."""
        ...

    def finish(self, status: Status) -> None:
        """Ends; whatever was logged has been handed over when it returns."""
        ...


def check_installed(name: str) -> None:
    """Refuses a tracker of ours whose package is not there; imports nothing.

    Raises:
        SetupError: it is not.
    """
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise SetupError(f"trackers: {missing(name)}")


def missing(name: str) -> str:
    """Says that the package of a tracker is not installed, and what installs it."""
    return (
        f"{name} is not installed; in the project's folder: "
        f'python -m pip install --editable ".[{name}]"'
    )


def find_tracker(name: str) -> Tracker:
    """Makes a tracker: one of ours, or what a dotted path names, a class or a module.

    Raises:
        Refused: it cannot be imported, or is none.
    """
    try:
        if name in PACKAGES:
            return importlib.import_module(f"ctl_core.trackers.{name}").Tracker()  # type: ignore[no-any-return]
        found = _imported(name)
    except ModuleNotFoundError as error:
        if error.name == PACKAGES.get(name):
            raise Refused(missing(name)) from error
        raise Refused(f"{name}: {brief(error)}") from error
    except Exception as error:
        raise Refused(f"{name}: {brief(error)}") from error
    lacking = [each for each in ("start", "log", "finish") if not callable(getattr(found, each, 0))]
    if lacking:
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
        return found() if isinstance(found, type) else found
    raise AssertionError(path)


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
