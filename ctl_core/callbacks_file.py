"""The file with the hooks: which one it is, importing it, and the copy in the run folder.

Each run keeps a copy of the file that it was trained with, so that a run can be used when the file
has gone. What the file imports is not copied.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import os
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctl_core.errors import SetupError, brief
from ctl_core.files import from_here
from ctl_core.settings import Config, label, nearest, shown

# Its name in the project, unless a setting says otherwise, and that of each run's copy.
DEFAULT = Config().callbacks
COPY = "callbacks.py"
# The module's name where the file is not the project's callbacks.py. It is part of the names that
# checkpoints give to globals, so that it depends on no file name, nor on what is installed.
MODULE = "ctl_callbacks"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the hooks are read from.

    Attributes:
        path: the file, absolute
        stands_for: the file that it is a copy of, or itself
        note: a line for the user, or an empty text
    """

    path: Path
    stands_for: Path
    note: str = ""


def find_callbacks(
    name: str, run: Path | None, trained_with: str, training: bool, project: Path | None = None
) -> Source:
    """Finds the file with the hooks; the run's copy of it, if it is gone.

    Args:
        name: the setting ``callbacks``
        run: the folder of the run that is there already, if one is
        trained_with: what that run's own settings name
        training: whether the run goes on, perhaps with other hooks; otherwise it is used as it was
        project: the folder that names are relative to; default: the current one

    Raises:
        SetupError: there is no such file.
    """
    project = project or Path.cwd()
    path = project / name
    copy = (run / COPY).absolute() if run else None
    kept = label(from_here(copy)) if copy else ""
    if copy and os.path.realpath(path) == os.path.realpath(copy):
        return Source(path, project / trained_with)
    text = _read(copy) if copy and name == trained_with else None
    if not path.is_file():
        if copy is None or text is None:
            raise _missing(name, path)
        note = f"{label(name)} is not there; the run's copy of it is used, {kept}."
        return Source(copy, path, note)
    note = ""
    if text is not None and text != _read(path):
        now = "; the run goes on with what it is now" * training
        note = (
            f"{label(name)} is not as it was when the run was trained{now}; --callbacks {kept} "
            "takes what it was."
        )
    return Source(path, path, note)


def _missing(name: str, path: Path) -> SetupError:
    if name == DEFAULT:
        return SetupError(f"no file {path.name} in {Path.cwd()}; run this in the project's folder.")
    inside = sorted(each.name for each in path.glob("*.py")) if path.is_dir() else []
    if path.is_dir():
        there = f"name a file in it, such as {label(path / inside[0])}" if inside else "name a file"
        return SetupError(f"callbacks: {label(name)} is a folder; {there}.")
    near = nearest(name, _candidates(path), cutoff=0.7) or f" in {Path.cwd()}; name a Python file."
    return SetupError(f"callbacks: no file {label(name)}{near}")


def _candidates(path: Path) -> Iterator[str]:
    """Yields Python files that may have been meant: beside it, in the project, a folder down."""
    here = Path.cwd()
    for folder, pattern in ((path.parent, "*.py"), (here, "*.py"), (here, "*/*.py")):
        for each in folder.glob(pattern):
            inside = from_here(str(each))
            if not inside.startswith((".", "ctl_core" + os.sep)):
                yield inside


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs a file as it is now and keeps its text: no older bytecode, and none is written."""

    source: bytes | None = None

    def get_code(self, fullname: str) -> types.CodeType:
        self.source = self.get_data(self.path)
        return self.source_to_code(self.source, self.path)


def load_callbacks(source: Source, project: Path | None = None) -> types.ModuleType:
    """Imports the file, as Python would run it; modules beside it and in the project are found.

    Args:
        source: the file
        project: the folder of the project; default: the current one

    Raises:
        SetupError: it cannot be imported; with its own line and message.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    path, original, project = source.path, source.stands_for, project or Path.cwd()
    of_project = original == project / DEFAULT
    if not path.name.endswith(".py"):
        raise SetupError(
            f"callbacks: expected a Python file, whose name ends in .py, got {shown(str(path))}."
        )
    _search(project)
    if not of_project:
        _search(original.parent, last=_hides(original.stem))
    name = "callbacks" if of_project else MODULE
    loader = _Loader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(original)  # by which a file may find its data
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise SetupError(_why(error, source)) from error
    return module


def check_compiles(source: Source) -> None:
    """Refuses a file that is no Python, without running it, nor anything that it imports.

    Raises:
        SetupError: it cannot be compiled; with its own line and message.
    """
    text = _read(source.path)
    if text is None or source.path.suffix != ".py":  # importing it says so
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # importing it warns
            compile(text, str(source.path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise SetupError(_why(error, source)) from error


def _search(folder: Path, last: bool = False) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(len(sys.path) if last else 0, str(folder))


def _hides(name: str) -> bool:
    """Whether a file of this name, in the first folder of sys.path, would hide another module.

    ``experiments/optuna.py`` is to get the installed one when it says ``import optuna``.
    """
    if name in sys.stdlib_module_names:
        return True
    found = importlib.machinery.PathFinder.find_spec(name) if name.isidentifier() else None
    return found is not None and found.origin is not None


def _why(error: BaseException, source: Source) -> str:
    path, original = source.path, source.stands_for
    if isinstance(error, SyntaxError):
        where = Path(error.filename or path.name).name + (f":{error.lineno}" * bool(error.lineno))
        words = f"{where}: {type(error).__name__}: {error.msg}"
    else:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        where = f"{path.name}:{lines[-1]}" if lines else path.name
        words = f"{where}: {brief(error)}"
    if path != original:
        words += (
            f" ({from_here(path)} is a copy of {from_here(original)}, without the modules that it "
            "imports)"
        )
    return words


def source_of(callbacks: Any) -> bytes | None:
    """Returns what is in the file that the hooks are in; None if they are in none."""
    loader, file = getattr(callbacks, "__loader__", None), getattr(callbacks, "__file__", None)
    if isinstance(loader, _Loader):
        return loader.source
    return _read(Path(file)) if isinstance(file, str) else None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
