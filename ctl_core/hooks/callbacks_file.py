"""Finds and imports the file with the hooks, whose name is callbacks.py by default.

Each run folder contains a copy of the file with which the run was trained, and copies of the
project's modules that it imports. If the copy of the file is passed to ``--callbacks``, it imports
the copies of the modules.
"""

import dataclasses
import os
import sys
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

from ctl_core.hooks.project_modules import (
    ProjectModules,
    find_changed_modules,
    list_edited_modules,
    read_project_modules,
    read_sources,
)
from ctl_core.run.errors import CtlError, SetupError, format_error, format_name, make_line
from ctl_core.run.files import relative_path
from ctl_core.run.settings import Config

# The default name of the file in a project, and the name of the copy in each run folder.
DEFAULT = Config().callbacks
COPY = "callbacks.py"
MODULE_COPIES = "modules"  # the folder in each run folder with copies of the project's modules
SAVED = "saved"  # the value of ``callbacks`` with which ``load`` uses the copies
# The module name of a hooks file that is not the project's callbacks.py. It differs from
# ``callbacks``, so that the file can import the project's callbacks.py as ``callbacks``.
MODULE = "ctl_callbacks"
PROJECT = "callbacks"  # the module name of the project's callbacks.py
_importing: list[Path] = []  # the files that are being imported, outermost first


@dataclasses.dataclass(frozen=True)
class HooksFile:
    """A file with hooks.

    Attributes:
        path: the file that is read, an absolute path
        stands_for: the original file, if ``path`` is a copy, and otherwise ``path``; an absolute
            path
        note: a line for the user, or an empty string
    """

    path: Path
    stands_for: Path
    note: str = ""


def find_callbacks(
    name: str,
    run: Path | None,
    trained_with: str,
    training: bool,
    project: Path | None = None,
    is_named: bool = True,
) -> HooksFile:
    """Finds the file with the hooks in a project.

    The result has a note if the file has changed since the run was trained with it.

    Args:
        name: the path of the file in the project
        run: the folder of the run; None if there is no run
        trained_with: the setting ``callbacks`` that the run was trained with
        training: whether the run continues training, with the current content of the file
        project: the folder of the project; None means the current folder
        is_named: whether the user has named the file. If only the run's config.yaml names the file,
            it has to be in the project, because the config.yaml may come from somebody else.

    Raises:
        SetupError: the file does not exist; or it is outside of the project, and the user has not
            named it.
    """
    project = project or Path.cwd()
    path = project / name
    if run is None:
        if not path.is_file():
            raise _reject_missing(name, project, "name another")
        return HooksFile(path, path)
    copy = (run / COPY).absolute()
    if os.path.realpath(path) == os.path.realpath(copy):
        return HooksFile(path, project / trained_with)
    if not is_named and not path.resolve().is_relative_to(project.resolve()):
        shown = format_name(path)
        raise SetupError(
            f"callbacks: the run's config.yaml names {shown}, outside the project "
            f"{format_name(project)}; to run that file, pass it: --callbacks {shown}, or "
            "ctl.load(run, callbacks=module)."
        )
    copy_name = format_name(relative_path(copy))
    has_copy = name == trained_with and copy.is_file()
    if not path.is_file():
        cure = "name another"
        if has_copy:
            cure = f"{copy_name} is the file with which the run was trained{_IN_PYTHON}"
        raise _reject_missing(name, project, cure)
    changed = []
    if has_copy and copy.read_bytes() != path.read_bytes():
        changed.append(name)
    if has_copy:
        changed += find_changed_modules(run / MODULE_COPIES, _find_root(path, project))
    if not changed:
        return HooksFile(path, path)
    return HooksFile(path, path, _describe_changes(changed, training, copy_name))


# Appended to a message about the copy of the hooks in a run.
_IN_PYTHON = '; in Python, ctl.load(run, callbacks="saved") uses it'


def _describe_changes(changed: list[str], training: bool, copy_name: str) -> str:
    """Returns a note about files that have changed since a run was trained."""
    names = make_line(", ".join(changed), 100)
    note = f"{format_name(names)} has changed since the run was trained; "
    current = "the current file"
    old = "the old one"
    if len(changed) > 1:
        note = f"{format_name(names)} have changed since the run was trained; "
        current = "the current files"
        old = "the old ones"
    if training:
        note += f"the run continues with {current}; "
    note += f"--callbacks {copy_name} uses {old}"
    if not training:
        note += _IN_PYTHON
    return f"{note}."


def find_saved_callbacks(run: Path, name: str, project: Path) -> HooksFile:
    """Returns the copy of the hooks with which a run was trained.

    Args:
        run: the folder of the run
        name: the path of the original file in the project
        project: the folder of the project, in which the hooks find their data

    Raises:
        SetupError: the run has no copy.
    """
    copy = (run / COPY).absolute()
    if not copy.is_file():
        raise SetupError(
            f"callbacks: there is no {format_name(relative_path(copy))}, because the hooks of the "
            "run were not in a file; pass the hooks themselves."
        )
    return HooksFile(copy, project / name)


def _reject_missing(name: str, project: Path, cure: str) -> SetupError:
    if (project / name).is_dir():
        file = format_name(Path(name, "__init__.py"))
        cure = f"it is a folder; name the file in it, such as {file}"
    return SetupError(f"callbacks: no file {format_name(name)} in {project}; {cure}.")


def check_compiles(hooks_file: HooksFile) -> types.CodeType:
    """Compiles the file, without running the file or importing any module.

    Raises:
        SetupError: the file has a syntax error; the message has its line.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return compile(
                hooks_file.path.read_bytes(), str(hooks_file.path), "exec", dont_inherit=True
            )
    except (SyntaxError, ValueError) as error:
        raise SetupError(_explain(error, hooks_file)) from error


def find_modules(hooks_file: HooksFile, project: Path) -> ProjectModules:
    """Returns the modules that the file can import, for a run that is loaded, or for a copy."""
    folders = list(dict.fromkeys((hooks_file.stands_for.parent, project)))
    copies = None
    if hooks_file.path != hooks_file.stands_for:
        copies = hooks_file.path.parent / MODULE_COPIES
    root = _find_root(hooks_file.stands_for, project)
    return ProjectModules(folders, [PROJECT, MODULE], copies, root)


def load_callbacks(
    hooks_file: HooksFile, project: Path | None = None, modules: ProjectModules | None = None
) -> types.ModuleType:
    """Imports the current content of the file.

    The file can import modules from its own folder and from the project.

    Args:
        hooks_file: the file
        project: the folder of the project; None means the current folder
        modules: the modules of a loaded run or of a copy, which are active; None if the file
            belongs to the command of this process, which has all modules in ``sys.modules``

    Raises:
        SetupError: the import fails; the message has the line. This includes a file that calls
            ``ctl.load`` at its top level to load a run with the same hooks.
    """
    if hooks_file.stands_for in _importing:
        raise SetupError(
            f"ctl.load at the top of {format_name(hooks_file.stands_for.name)} loads a run of "
            "that same file, which would import itself endlessly; call it in a hook that only "
            "training calls, pass the hooks of another file (callbacks=module), or start with "
            "the run's weights (--init-from RUN, without the head: --init-skip 'head/*')."
        )
    original = hooks_file.stands_for
    project = project or Path.cwd()
    for folder in (project, original.parent):
        if modules is None and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    name = MODULE
    if original == project / DEFAULT:
        name = PROJECT
    module = types.ModuleType(name)
    module.__file__ = str(original)  # callbacks.py may use this to find its data
    vars(module)["__file_content__"] = hooks_file.path.read_bytes()
    if modules is not None:
        vars(module)["__builtins__"] = modules.builtins
    sys.modules[module.__name__] = module
    code = check_compiles(hooks_file)
    from ctl_core.hooks.recording import IMPORTED, note_layers  # late, since this loads TensorFlow

    IMPORTED.clear()
    _importing.append(original)
    try:
        with note_layers(IMPORTED):
            exec(code, vars(module))
    except (Exception, SystemExit) as error:
        raise SetupError(_explain(error, hooks_file)) from error
    finally:
        _importing.remove(original)
    return module


def _explain(error: BaseException, hooks_file: HooksFile) -> str:
    """Describes in one line why the file cannot be imported, including the line in the file."""
    if isinstance(error, SyntaxError):
        file = Path(error.filename or hooks_file.path).name
        return f"{file}:{error.lineno}: {type(error).__name__}: {error.msg}"
    text = format_error(error)
    if isinstance(error, CtlError):
        text = str(error)
    elif isinstance(error, ImportError) and "relative import" in str(error):
        text += (
            "; the file is not imported as a part of a package, so use the full name of the "
            f"module: from {_name_package(hooks_file)}MODULE import ..."
        )
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(hooks_file.path)]
    place = hooks_file.path.name
    if lines:
        place += f":{lines[-1]}"
    return f"{place}: {text}"


def _name_package(hooks_file: HooksFile) -> str:
    """Returns the package of a file's folder with a dot, as seen from the project."""
    folder = hooks_file.stands_for.parent
    if folder == Path.cwd() or not folder.is_relative_to(Path.cwd()):
        return ""
    return f"{'.'.join(folder.relative_to(Path.cwd()).parts)}."


def _find_root(file: Path, project: Path) -> Path:
    """Returns the folder to which the paths of copied modules are relative.

    This is the project, unless the file with the hooks is outside of it.
    """
    if file.is_relative_to(project):
        return project
    return file.parent


def read_modules(callbacks: Any, name: str) -> dict[str, bytes]:
    """Returns the content of the modules that the hooks have imported, by path in the project.

    If the file with the hooks is outside of the project, the modules are those in its own folder.

    Args:
        callbacks: the hooks; if they are not in a file, the result is empty
        name: the setting ``callbacks``
    """
    root = _find_root_of_hooks(callbacks, name)
    if root is None:
        return {}
    contents = read_project_modules(root)
    contents.pop(Path(callbacks.__file__).absolute().relative_to(root).as_posix(), None)
    return contents


def refuse_edited_modules(callbacks: Any, name: str) -> None:
    """Checks that no file of the hooks was edited after it was imported, as in a notebook.

    Args:
        callbacks: the hooks; if they are not in a file, nothing is checked
        name: the setting ``callbacks``

    Raises:
        SetupError: a file was edited; the message names it.
    """
    root = _find_root_of_hooks(callbacks, name)
    edited = list_edited_modules(root) if root is not None else []
    if edited:
        names = format_name(make_line(", ".join(edited), 100))
        raise SetupError(
            f"callbacks: {names} was edited after it was imported, and Python still has the old "
            "functions; restart the kernel, or reload the module and those that import it: "
            "importlib.reload(callbacks)."
        )


def read_sources_of_hooks(callbacks: Any, name: str) -> dict[str, bytes]:
    """Returns the sources of the hooks and of the modules that they have imported, by file.

    Args:
        callbacks: the hooks; if they are not in a file, the result is empty
        name: the setting ``callbacks``
    """
    root = _find_root_of_hooks(callbacks, name)
    if root is None:
        return {}
    sources = read_sources(root)
    content = read_hooks_file(callbacks)
    if content is not None:
        sources[callbacks.__file__] = content
    return sources


def _find_root_of_hooks(callbacks: Any, name: str) -> Path | None:
    """Returns the folder of the modules of the hooks; None if the hooks are not in a file."""
    if read_hooks_file(callbacks) is None or getattr(callbacks, "__file__", None) is None:
        return None
    file = Path(callbacks.__file__).absolute()
    names = Path(name).parts
    if Path(name).is_absolute():
        return _find_root(file, Path.cwd())
    if file.parts[-len(names) :] == names:
        return Path(*file.parts[: -len(names)])
    return file.parent


def read_hooks_file(callbacks: Any) -> bytes | None:
    """Returns the content of the file with the hooks; None if the hooks are not in a file."""
    content: bytes | None = getattr(callbacks, "__file_content__", None)
    if content is not None:
        return content
    file = Path(getattr(callbacks, "__file__", None) or "")
    if not file.is_file():
        return None
    return file.read_bytes()
