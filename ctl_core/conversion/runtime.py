"""Runs an exported file in another process, with the runtime of its format."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ctl_core.conversion import run_file
from ctl_core.conversion.run_file import Arrays
from ctl_core.run.errors import make_line


class RuntimeFailed(Exception):
    """The runtime cannot load or run a file; the message is the last line that it has printed."""


class Runtime:
    """A process that has loaded an exported file.

    Attributes:
        versions: the versions of the runtime, NumPy and Python by name
        seconds: the time that the runtime has computed so far
    """

    def __init__(self, process: subprocess.Popen[bytes], path: Path, errors: Path) -> None:
        """Waits until the process has loaded the file.

        Args:
            process: the process
            path: the exported file
            errors: the file to which the process writes its errors

        Raises:
            RuntimeFailed: the runtime cannot load the file.
        """
        self._process = process
        self._path = path
        self._errors = errors
        self.versions: dict[str, str] = json.loads(self._read())
        self.seconds = 0.0

    def compute(self, inputs: Arrays) -> Arrays:
        """Returns the outputs of the file for a batch, by name.

        Raises:
            RuntimeFailed: the runtime cannot compute them.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has failed, and _read says why
            run_file.write_message(self._process.stdin, run_file.pack(inputs))
        self.seconds += float(json.loads(self._read()))
        return run_file.unpack(self._read())

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        message = run_file.read_message(self._process.stdout)
        if message is None:
            code = self._process.wait()
            lines = self._errors.read_text(errors="replace").strip().splitlines()
            if not lines:
                raise RuntimeFailed(f"it ended with code {code}")
            raise RuntimeFailed(make_line(lines[-1].replace(str(self._path), self._path.name)))
        return message


@contextlib.contextmanager
def start_runtime(format: str, path: Path, rows: int | None) -> Iterator[Runtime]:
    """Starts a process that loads an exported file; the process ends with the context.

    Args:
        format: ``litert`` or ``onnx``
        path: the file
        rows: the number of examples that the file takes in each call; None if it takes any number

    Raises:
        RuntimeFailed: the runtime cannot load the file.
    """
    # -P: the folder of the program is not searched for modules.
    command = [sys.executable, "-P", run_file.__file__, format, str(path), str(rows or 0)]
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder, "errors.txt")
        with errors.open("wb") as error_file:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=error_file
            )
        try:
            yield Runtime(process, path, errors)
        finally:
            process.kill()
            process.communicate()
