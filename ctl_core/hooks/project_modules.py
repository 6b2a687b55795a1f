"""Gives each loaded run its own modules, and finds the modules that a run folder has copies of.

``ctl.load`` may load runs of several projects, and of this project before and after an edit. Their
files import modules that have the same names, such as ``features``, but not the same content.
"""

import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import marshal
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ctl_core.run.errors import NOT_THE_USERS

# Modules that all runs share, even if a project contains a folder of this name.
_SHARED = frozenset({"ctl_core", "keras", "numpy", "tensorflow"}) | sys.stdlib_module_names


class ProjectModules(importlib.abc.MetaPathFinder):
    """The modules of a project that a loaded run imports.

    These are the modules and packages in the project's folders. They are not in ``sys.modules``,
    except within ``activate`` and while an import statement of these modules runs.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        names: Sequence[str],
        copies: Path | None = None,
        root: Path | None = None,
    ) -> None:
        """Prepares to import modules; none is imported yet.

        Args:
            folders: the folders in which modules are searched
            names: further names of modules that belong to the project
            copies: the folder with the copies of the project's modules in a run, which are used
                instead of the files in the project. ``__file__`` is the path in the project, so
                that a module finds its data
            root: the folder whose modules were copied; default: the last one of ``folders``
        """
        self._folders = [str(folder) for folder in folders]
        self._root = str(root or folders[-1])
        self._copies = ""
        self._folders_of_copies: list[str] = []
        if copies is not None and copies.is_dir():
            self._copies = str(copies)
            copied = [
                copies / folder.relative_to(self._root)
                for folder in folders
                if folder.is_relative_to(self._root)
            ]
            self._folders_of_copies = [str(folder) for folder in copied]
            folders = [*filter(Path.is_dir, copied), *folders]
        self._names = {*names, *_list_modules(folders)} - _SHARED
        self._names -= {name for name in self._names if _is_library(sys.modules.get(name))}
        self._modules: dict[str, types.ModuleType] = {}
        self._is_active = False
        # Functions of the modules may import other modules later, when they are called.
        self.builtins = {**vars(builtins), "__import__": self._import}

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Replaces the modules of other projects in ``sys.modules`` with those of this project.

        When the context ends, ``sys.modules`` and ``sys.path`` are restored.
        """
        if self._is_active:
            yield
            return
        hidden = self._remove_modules()
        path = list(sys.path)
        sys.path[:0] = self._folders
        sys.meta_path.insert(0, self)
        sys.modules.update(self._modules)
        importlib.invalidate_caches()
        self._is_active = True
        try:
            yield
        finally:
            self._is_active = False
            sys.meta_path.remove(self)
            self._modules.update(self._remove_modules())
            sys.modules.update(hidden)
            sys.path[:] = path

    def _remove_modules(self) -> dict[str, types.ModuleType]:
        """Removes the modules whose names belong to the project from ``sys.modules``."""
        names = [name for name in sys.modules if name.partition(".")[0] in self._names]
        return {name: sys.modules.pop(name) for name in names}

    def _import(self, name: str, *args: Any, **options: Any) -> types.ModuleType:
        """Runs an import statement of the project's modules."""
        is_relative = bool(options.get("level") or (len(args) > 3 and args[3]))
        if not is_relative and name.partition(".")[0] not in self._names:
            return builtins.__import__(name, *args, **options)
        with self.activate():
            return builtins.__import__(name, *args, **options)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds a module of the project; returns None for all other modules."""
        if fullname.partition(".")[0] not in self._names:
            return None
        find = importlib.machinery.PathFinder.find_spec
        spec = None
        if self._copies:
            spec = find(fullname, self._folders_of_copies if path is None else path, target)
        if spec is None and self._copies and path is not None:
            path = [folder.replace(self._copies, self._root) for folder in path]
        if spec is None:
            spec = find(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            original = spec.loader.path
            if self._copies:
                original = original.replace(self._copies, self._root)
            spec.loader = _Loader(fullname, spec.loader.path, self.builtins, original)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs the current content of a file, with its own import statement."""

    def __init__(self, name: str, path: str, names: dict[str, Any], original: str) -> None:
        """Prepares to run a file.

        Args:
            name: the name of the module
            path: the path of the file
            names: the builtins of the module
            original: the path that the module has as ``__file__``
        """
        super().__init__(name, path)
        self._builtins = names
        self._original = original

    def get_code(self, fullname: str) -> types.CodeType:
        """Compiles the file. Bytecode might be stale if the file has just been edited."""
        path = self.get_filename(fullname)
        code: types.CodeType = self.source_to_code(self.get_data(path), path)
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__builtins__"] = self._builtins
        module.__file__ = self._original
        super().exec_module(module)


def _list_modules(folders: Sequence[Path]) -> Iterator[str]:
    """Yields the names of the modules and packages in some folders."""
    for folder in folders:
        for path in folder.iterdir():
            is_package = path.is_dir() and next(path.glob("*.py"), None) is not None
            name = path.stem if path.suffix == ".py" else path.name
            if (is_package or path.suffix == ".py") and name.isidentifier():
                yield name


def _is_library(module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None) or ""
    return any(place in file for place in NOT_THE_USERS)


_HEADER = 16  # the number of bytes before the code in a file with bytecode
# The sources that ``keep_sources`` keeps, by the path of the file.
_kept: dict[str, bytes] = {}


@contextlib.contextmanager
def keep_sources(sources: Mapping[str, bytes]) -> Iterator[None]:
    """Lets AutoGraph, tracebacks and copies read sources as they are now, even after an edit.

    AutoGraph reads the source of a function when the function is traced. This may be minutes after
    the import, for example in the first evaluation. It also needs ``compat.read_sources_once``.

    Args:
        sources: the content of files by their paths
    """
    for file, content in sources.items():
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # edited after the import
            text = importlib.util.decode_source(content)
            # ``linecache.checkcache`` keeps an entry without a time.
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    _kept.update(sources)
    try:
        yield
    finally:
        for file in sources:
            linecache.cache.pop(file, None)
            _kept.pop(file, None)


def read_sources(project: Path) -> dict[str, bytes]:
    """Returns the content of the project's modules that are imported, by the path of the file."""
    return {module.file: module.content for module in _list_imported(project)}


def read_project_modules(project: Path, with_program: bool = False) -> dict[str, bytes]:
    """Returns the content of the project's modules that are imported, by path in the project.

    Args:
        project: the folder of the project
        with_program: whether to include the program itself, and modules that are not Python source
    """
    return {module.path: module.content for module in _list_imported(project, with_program)}


def list_edited_modules(project: Path) -> list[str]:
    """Returns the paths of the project's modules that were edited after their import.

    The functions in memory are the old ones, but AutoGraph would read their new source. Python does
    not keep the source of a module, so the bytecode that it has cached is compared. If Python
    writes no bytecode, no edit is found.
    """
    return [module.path for module in _list_imported(project) if module.is_edited()]


class _Imported(NamedTuple):
    """A module of the project that is imported.

    Attributes:
        file: the path of the file that was imported
        path: the path in the project, with slashes
        content: the content of the file
        cached: the path of the bytecode that Python wrote at the import; None if there is none
    """

    file: str
    path: str
    content: bytes
    cached: str | None

    def is_edited(self) -> bool:
        """Returns whether the file now has other code than the cached bytecode."""
        if self.cached is None or sys.dont_write_bytecode or not os.access(self.cached, os.W_OK):
            return False
        try:
            imported = marshal.loads(Path(self.cached).read_bytes()[_HEADER:])
            now: types.CodeType = compile(self.content, self.file, "exec", dont_inherit=True)
        except SyntaxError:
            return True
        except (OSError, EOFError, ValueError, TypeError):  # damaged, or being written
            return False
        return bool(imported != now)


def _list_imported(project: Path, with_program: bool = False) -> Iterator[_Imported]:
    """Yields the modules of the project that are imported, see ``read_project_modules``."""
    project = project.resolve()
    for full_name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_module = full_name != "__main__" and file.endswith(".py")
        if not file or _is_library(module) or not (is_module or with_program):
            continue
        path = Path(file).resolve()
        # If the module was imported from a copy, the loader has the path of the copy.
        spec = getattr(module, "__spec__", None)
        source = getattr(spec, "loader", None)
        cached = None
        if type(source) is importlib.machinery.SourceFileLoader:  # others do not cache bytecode
            cached = getattr(spec, "cached", None)
        with contextlib.suppress(OSError):  # the file was removed
            if path.is_relative_to(project):
                file = getattr(source, "path", file)
                content = _kept.get(file) or Path(file).read_bytes()
                name = path.relative_to(project).as_posix()
                yield _Imported(file, name, content, cached)


def find_changed_modules(copies: Path, project: Path) -> list[str]:
    """Returns the paths of the copied modules that differ from the files in the project."""
    changed = []
    for copy in sorted(copies.rglob("*.py")):
        path = copy.relative_to(copies)
        original = project / path
        if not original.is_file() or original.read_bytes() != copy.read_bytes():
            changed.append(path.as_posix())
    return changed
