"""A start that a setting refuses leaves the run folder as it was: its name is free for a right one.

The line that refuses it says all there is; where a hook fails, the log keeps the traceback. Of
several processes, each takes away its own, and the last one the folder.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from ctl_core import run_process


class Before:
    """What a run folder holds before a start."""

    def __init__(self, folder: Path, paths: Sequence[Path]) -> None:
        """Looks, before anything is written there.

        Args:
            folder: of the run
            paths: in it, what a start makes before it has looked at all settings
        """
        self._folder, self._new = folder, [path for path in paths if not path.exists()]
        self._process = run_process.read_process(folder)

    def give_back(self, trains: bool = False) -> None:
        """Takes away what is new, and the folder if it is empty then.

        Args:
            trains: whether this process has written process.json, which it takes back
        """
        file = self._folder / run_process.FILE
        with contextlib.suppress(OSError):
            if trains and self._process is not None:
                run_process.write(self._folder, self._process)
            elif trains:
                file.unlink(missing_ok=True)
            for path in self._new:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            self._folder.rmdir()
