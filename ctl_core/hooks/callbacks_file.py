"""The file with the hooks: which one it is, importing it, and the copy in the run folder.

Each run keeps a copy of the file that it was trained with, for ``--callbacks``. What the file
imports is not copied.
"""

import contextlib
import dataclasses
import os
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctl_core.run.errors import CtlError, SetupError, format_error, format_name
from ctl_core.run.files import relative_path
from ctl_core.run.settings import Config

# Its name in the project, unless a setting says otherwise, and that of each run's copy.
DEFAULT = Config().callbacks
COPY = "callbacks.py"
# The module's name where the file is not the project's callbacks.py, which it may import.
MODULE = "ctl_callbacks"
PROJECT = "callbacks"  # the module's name otherwise
_importing: list[Path] = []  # the files that are being run, outermost first


@dataclasses.dataclass(frozen=True)
class HooksFile:
    """Where the hooks are read from: the file, what it is a copy of or itself, a line for the user.

    Both paths are absolute.
    """

    path: Path
    stands_for: Path
    note: str = ""


def find_callbacks(
    name: str, run: Path | None, trained_with: str, training: bool, project: Path | None = None
) -> HooksFile:
    """Finds the file ``name`` of a project, the current folder unless another one is given.

    A note says where it is not what the ``run`` that is there was ``trained_with``; when
    ``training``, that goes on with the file as it is now.

    Raises:
        SetupError: there is no such file.
    """
    project = project or Path.cwd()
    path = project / name
    copy = (run / COPY).absolute() if run else path
    if run and os.path.realpath(path) == os.path.realpath(copy):
        return HooksFile(path, project / trained_with)
    is_other = run is not None and name == trained_with and copy.is_file()
    if not path.is_file():
        other = (
            f"{format_name(relative_path(copy))} is as the run was trained"
            if is_other
            else "name another"
        )
        raise SetupError(f"callbacks: no file {format_name(name)} in {project}; {other}.")
    if not is_other or copy.read_bytes() == path.read_bytes():
        return HooksFile(path, path)
    now = "; the run goes on with what it is now" * training
    note = f"{format_name(name)} is not as it was when the run was trained{now}; "
    return HooksFile(
        path, path, f"{note}--callbacks {format_name(relative_path(copy))} takes what it was."
    )


def check_compiles(hooks_file: HooksFile) -> types.CodeType:
    """Returns the code of the file, of which nothing has run, nor anything that it imports.

    Raises:
        SetupError: it is no Python; with its own line and message.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return compile(
                hooks_file.path.read_bytes(), str(hooks_file.path), "exec", dont_inherit=True
            )
    except (SyntaxError, ValueError) as error:
        raise SetupError(_why(error, hooks_file)) from error


def load_callbacks(hooks_file: HooksFile, project: Path | None = None) -> types.ModuleType:
    """Runs the file as it is now; modules beside it and in the project are found.

    Raises:
        SetupError: it cannot be imported; with its own line and message; or it is being imported
            already, and loads a run of its own hooks.
    """
    if hooks_file.stands_for in _importing:
        raise SetupError(
            f"ctl.load at the top of {format_name(hooks_file.stands_for.name)} loads a run of that "
            "same file, which would import itself without end; call it in a hook that runs while "
            "training, pass the hooks of another file (callbacks=module), or begin with the "
            "run's weights (--init-from RUN, without the head: --init-skip 'head/*')."
        )
    original, project = hooks_file.stands_for, project or Path.cwd()
    for folder in (project, original.parent):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    module = types.ModuleType(PROJECT if original == project / DEFAULT else MODULE)
    module.__file__ = str(original)  # by which a file may find its data
    vars(module)["__file_content__"] = hooks_file.path.read_bytes()
    sys.modules[module.__name__] = module
    code = check_compiles(hooks_file)
    from ctl_core.hooks.recording import IMPORTED, note_layers  # as late as TensorFlow can be

    IMPORTED.clear()
    _importing.append(original)
    try:
        with note_layers(IMPORTED):
            exec(code, vars(module))
    except (Exception, SystemExit) as error:
        raise SetupError(_why(error, hooks_file)) from error
    finally:
        _importing.remove(original)
    return module


@contextlib.contextmanager
def keep_imports() -> Iterator[None]:
    """Lets a project's files load other hooks, whose module and folders replace theirs only within.

    Where nothing had been imported before, what is imported within stays.
    """
    path, modules = list(sys.path), {name: sys.modules.get(name) for name in (PROJECT, MODULE)}
    try:
        yield
    finally:
        for name, module in modules.items():
            if module is not None:
                sys.path[:] = path
                sys.modules[name] = module


def _why(error: BaseException, hooks_file: HooksFile) -> str:
    file = hooks_file.path.name
    text = str(error) if isinstance(error, CtlError) else format_error(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(hooks_file.path)]
    if isinstance(error, SyntaxError):
        file, lines = Path(error.filename or file).name, [error.lineno]
        text = f"{type(error).__name__}: {error.msg}"
    return f"{file}:{lines[-1]}: {text}" if lines else f"{file}: {text}"


def read_hooks_file(callbacks: Any) -> bytes | None:
    """Returns the content of the file with the hooks; None if they are in no file."""
    content: bytes | None = getattr(callbacks, "__file_content__", None)
    path = Path(getattr(callbacks, "__file__", None) or "")
    if content is None and path.is_file():
        return path.read_bytes()
    return content
