"""Defines listeners, which receive the events of a run.

The engine's listeners write metrics.jsonl, training_log.md and TensorBoard's files
(evaluation/summaries.py). To add your own listener, set ``listener`` to the name of a class, or
pass objects to ``train(..., listeners=[...])``.

The methods of listeners are called in the chief process, in the thread that trains, between two
graph calls. A slow listener therefore makes training slower. If a listener raises an error, the
error is reported once, and the listener is dropped.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ctl_core.run.console import LOG, format_evaluation, warn
from ctl_core.run.errors import SetupError, format_error, make_line, quote
from ctl_core.run.files import atomic_write, relative_path
from ctl_core.run.output import restore_letters
from ctl_core.run.settings import Config, flatten

FILE = "metrics.jsonl"
# The keys of a line of metrics.jsonl that are not names of values.
RESERVED = ("step", "split")
# The settings that affect only the location of a run, or the amount of its output.
_PLACE = ("run_name", "runs_dir", "debug")


class Listener:
    """Base class of listeners, which receive the events of a run.

    The methods of this class do nothing. Override the methods that you need.
    """

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        """Called before the first step of a process, after the run's files have been opened.

        Args:
            folder: the folder of the run, which has the name of the run; a listener may write files
                in it
            config: the settings, as in the run's config.yaml
            step: 0, or the step of the checkpoint that the run resumes from. If the run was killed,
                values of later steps may have been passed before, and will be passed again.
        """

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        """Called with each line of metrics.jsonl; ``split`` is train or eval."""

    def saved(self, step: int, path: Path) -> None:
        """Called when a checkpoint is complete, possibly some steps after ``step``.

        The files still exist at this time, because the next checkpoint is written only after the
        call.

        The files whose paths begin with ``path`` contain the objects of ``create_ckpt``. Everything
        else that a run needs to resume is in the folder ``engine`` next to these files.
        """

    def end(self, step: int, how: str) -> None:
        """Called when a run ends, except if the process is killed or Ctrl-C is pressed twice.

        Args:
            step: the last step
            how: done; ended (by a hook or early_stop); stopped (by a signal or max_time); diverged
                (the last loss is not finite); or failed
        """


def find_listener(name: str) -> type[Listener]:
    """Imports the class with a name of the form ``module.Class`` or ``module:Class``.

    Raises:
        SetupError: the class cannot be imported, or is not a listener.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        listener = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if f"{module}.".startswith(f"{missing}."):
            raise SetupError(f"listener: {name}: there is no module {missing}.") from error
        raise SetupError(
            f"listener: {name} needs the package {missing}: pip install {missing}"
        ) from error
    except (Exception, SystemExit) as error:
        raise SetupError(f"listener: {name}: {format_error(error)}") from error
    if not (isinstance(listener, type) and issubclass(listener, Listener)):
        raise SetupError(f"listener: {name} is not a subclass of ctl_core.Listener.")
    return listener


class Listeners:
    """The listeners of one run; they receive no events before ``start``.

    Attributes:
        candidates: listeners, and classes of listeners; ``start`` creates an object of each class
    """

    def __init__(self, candidates: Sequence[Listener | type[Listener]] = ()) -> None:
        self.candidates = list(candidates)
        self._listening: list[Listener] = []

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        """Calls the method ``start`` of each listener."""
        for candidate in self.candidates:
            with self._guard(candidate):
                listener = _create(candidate)
                listener.start(folder, config, step)
                self._listening.append(listener)

    def tell(self, method: str, *values: Any) -> None:
        """Calls a method of each listener."""
        for listener in list(self._listening):
            with self._guard(listener):
                getattr(listener, method)(*values)

    @contextlib.contextmanager
    def _guard(self, listener: Listener | type[Listener]) -> Iterator[None]:
        """Drops a listener that raises an error within the context, and warns the user."""
        try:
            yield
        except (Exception, SystemExit) as error:
            LOG.info("an error of a listener", exc_info=error)
            name = _name_class(listener)
            warn(f"listener: {name}: {format_error(error)}; training continues without it.")
            self._listening = [other for other in self._listening if other is not listener]


def _create(candidate: Listener | type[Listener]) -> Listener:
    """Returns a listener; if the candidate is a class, creates an object of it."""
    if isinstance(candidate, type):
        return candidate()
    return candidate


def _name_class(listener: Listener | type[Listener]) -> str:
    """Returns the full name of the class of a listener."""
    kind = type(listener)
    if isinstance(listener, type):
        kind = listener
    return f"{kind.__module__}.{kind.__qualname__}"


class MetricsFile(Listener):
    """Writes metrics.jsonl, a file with one JSON object per line.

    Each object contains the step, the split, and the values by name. A value that is not finite is
    written as null.
    """

    def __init__(self, name: str = FILE) -> None:
        """Creates the listener; ``name`` is the name of the file in the run's folder."""
        self._name = name
        self._file: TextIO

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        """Opens the file, and removes the lines of steps that are about to run again."""
        path = folder / self._name
        before = [line for line in read_metrics(path) if line["step"] <= step]
        with atomic_write(path) as temporary:
            lines = [f"{json.dumps(line)}\n" for line in before]
            temporary.write_text("".join(lines), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        """Appends a line with the values of a step."""
        finite: dict[str, float | None] = dict(values)
        for name, value in values.items():
            if not math.isfinite(value):
                finite[name] = None  # JSON has no NaN
        self._file.write(json.dumps({"step": step, "split": split, **finite}) + "\n")

    def end(self, step: int, how: str) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Returns the parsed lines of a metrics file; an empty list if the file does not exist.

    A line that is incomplete after a kill is left out.
    """
    if not file.is_file():
        return []
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


class TrainingLog(Listener):
    """Appends notes about runs, and their results, to training_log.md in the current folder.

    A run with a note gets an entry when it begins, and a line whenever it ends. The file belongs to
    the user, so its existing content is never changed.
    """

    def __init__(self, note: str | None) -> None:
        """Creates the listener with the note of a run; None if the run has no note."""
        self._path = Path("training_log.md").absolute()
        self._note = note
        if note is not None:
            self._note = restore_letters(note)
        self._run = ""
        self._evaluated: tuple[dict[str, float], int] | None = None

    def start(self, folder: Path, config: dict[str, Any], step: int) -> None:
        """Appends an entry for a run with a note, unless the file already has the same entry."""
        self._run = relative_path(folder)
        if self._note is None:
            return
        text = self._read()
        entry = f"\n## {self._run}\n\n- Expected: {make_line(self._note, 2000)}\n"
        if entry in text:
            return
        env = json.loads((folder / "env.json").read_text())
        commit = "without a git commit"
        if env["commit"]:
            commit = f"from commit {env['commit'][:10]}"
        settings = [f"{name} {quote(value, 40)}" for name, value in find_changes(config).items()]
        entry += f"- Settings: {', '.join(settings) or 'the defaults'}\n"
        entry += f"- {time.strftime('%F %H:%M')}: started {commit}"
        if env["dirty"]:
            entry += ", with uncommitted changes"
        self._append(f"{entry}\n")

    def values(self, step: int, split: str, values: dict[str, float]) -> None:
        """Keeps the values of the last evaluation."""
        if split == "eval":
            self._evaluated = values, step

    def end(self, step: int, how: str) -> None:
        """Appends a line about the end of a run, if the run has an entry."""
        if f"\n## {self._run}\n" in self._read():
            result = f"{how} at step {step}"
            if self._evaluated is not None:
                result += f"; {format_evaluation(*self._evaluated, step)}"
            self._append(f"- {time.strftime('%F %H:%M')}: {self._run} {make_line(result)}\n")

    def _read(self) -> str:
        if not self._path.exists():
            return ""
        return self._path.read_text(errors="replace")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            if file.tell() == 0:  # the file is new
                file.write("# Training log\n")
            file.write(text)


def find_changes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that differ from the defaults, by name.

    Hyperparameters have names of the form ``hparams.NAME``.
    """
    defaults = flatten(dataclasses.asdict(Config()))
    return {
        name: value
        for name, value in flatten(config).items()
        if name not in _PLACE and value != defaults.get(name)
    }
