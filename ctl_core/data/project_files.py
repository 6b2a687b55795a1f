"""Files of a project, found from a file of hooks wherever in the project that lies."""

from __future__ import annotations

from pathlib import Path

from ctl_core.errors import SetupError
from ctl_core.files import from_here


def project_file(path: str | Path, hooks: str | Path) -> Path:
    """Returns the path of a file of the project, such as ``data/digits.npz``.

    ``project_file("data/digits.npz", __file__)`` is the same in ``callbacks.py``, in
    ``experiments/gan.py`` and in the copy of the hooks in ``runs/a``, whatever folder the process
    works in: the first found in the folder of the hooks, or in one above.

    Args:
        path: relative to the project's folder
        hooks: the ``__file__`` of the hooks

    Raises:
        SetupError: it is not there.
    """
    folders = Path(hooks).resolve().parents
    for folder in folders:
        if (folder / path).exists():
            return folder / path
    raise SetupError(
        f"{path}: not there, neither in {from_here(folders[0])} nor in a folder above it; put the "
        "file into the project, or name another one in the hooks."
    )
