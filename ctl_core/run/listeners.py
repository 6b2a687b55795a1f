"""What listens to a run: metrics.jsonl, TensorBoard, and classes of one's own.

The setting ``listener`` names one, and ``train(..., listeners=[...])`` takes objects. They hear the
run in the process of the chief, in the thread that trains, between two calls of the graph: what a
listener takes is the training's time. One that raises is warned of once and hears no more.
"""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ctl_core.console import LOG, warn
from ctl_core.errors import SetupError, brief
from ctl_core.settings import nearest


class Listener:
    """Hears what a run says. Each method does nothing here: override those that you need."""

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        """Is called before the first step of a process, once the run's files are open.

        Args:
            folder: of the run; its name is the run's, and a listener may write there
            config: the settings, as config.yaml of the run has them
            step: 0, or that of the checkpoint from which a run goes on that was stopped or killed:
                values of later steps may have been heard before, and come again
        """

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        """Is called with each line of metrics.jsonl; ``split`` is train or eval."""

    def saved(self, step: int, path: Path) -> None:
        """Is called when a checkpoint is whole, perhaps steps later; ``path`` is its prefix."""

    def end(self, step: int, how: str) -> None:
        """Is called at the end, but not where the process is killed or Ctrl-C comes twice.

        Args:
            step: the last one
            how: done; ended, by a hook or early_stop; stopped, by a signal or max_time; diverged,
                where the last loss is not finite; or failed
        """


def find_listener(name: str) -> type[Listener]:
    """Imports the class that is named, as ``module.Class`` or ``module:Class``.

    Raises:
        SetupError: it cannot be imported, or is no listener.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        there = vars(importlib.import_module(module))
    except (Exception, SystemExit) as error:
        raise SetupError(f"listener: {name}{_line_in(error)}: {brief(error)}") from error
    found = there.get(attribute)
    if found is None:
        classes = [each for each, value in there.items() if isinstance(value, type)]
        hint = nearest(attribute, classes) or "."
        raise SetupError(f"listener: {module} has no class {attribute!r}{hint}")
    if not (isinstance(found, type) and issubclass(found, Listener)):
        raise SetupError(f"listener: {name} is no class that is made of ctl_core.Listener.")
    return found


class Listeners:
    """The listeners of one run; without any, it does nothing."""

    def __init__(self, listeners: Sequence[Listener | type[Listener]] = ()) -> None:
        """Takes objects, and classes of which one is made when the run starts."""
        self._given = list(listeners)
        self._hearing: list[Listener] = []

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        """Calls ``start`` of each; only then do they hear the rest."""
        for each in self._given:
            with self._guard(each):
                listener = each() if isinstance(each, type) else each
                listener.start(folder, config, step)
                self._hearing.append(listener)

    def tell(self, method: str, *values: Any) -> None:
        """Calls a method of each."""
        for listener in self._hearing:
            with self._guard(listener):
                getattr(listener, method)(*values)

    @contextlib.contextmanager
    def _guard(self, listener: Listener | type[Listener]) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            kind = listener if isinstance(listener, type) else type(listener)
            where = f"{kind.__module__}.{kind.__qualname__}{_line_in(error)}"
            LOG.info("what a listener has raised", exc_info=error)
            warn(f"listener: {where}: {brief(error)}; training goes on without it.")
            self._hearing = [each for each in self._hearing if each is not listener]


def _line_in(error: BaseException) -> str:
    """Returns where in the listener's own file something was raised, if it came so far."""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if "importlib" not in frame.filename and not file.is_relative_to(Path(__file__).parents[1]):
            return f" ({file.name}:{frame.lineno})"
    return ""
