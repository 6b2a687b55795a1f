"""A process that renders projects for the tests: a request per line on standard input.

Not the process that tests: rendering takes a clean environment, and a process whose environment
changes while a thread of TensorFlow reads it may crash.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cookiecutter.exceptions import FailedHookException
from cookiecutter.main import cookiecutter


class Renderer:
    """Has projects rendered with ``environment`` as the whole environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def render(self, folder: Path, template: str | Path, answers: Mapping[str, Any]) -> Path:
        """The project's folder, in ``folder``. Raises ``FailedHookException`` as cookiecutter."""
        assert self._process.stdin is not None and self._process.stdout is not None
        json.dump([str(folder), str(template), answers], self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that renders has ended: its last words are on standard error"
        reply = json.loads(line)
        if "refused" in reply:
            raise FailedHookException(reply["refused"])
        return Path(reply["project"])

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def main() -> None:
    """Answers each request by a line; what hooks print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        folder, template, answers = json.loads(line)
        try:
            project = cookiecutter(
                template, no_input=True, extra_context=answers, output_dir=folder
            )
            reply = {"project": cast(str, project)}
        except FailedHookException as error:
            reply = {"refused": str(error)}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
