"""The run of a trial: a process of its own, watched by the files that it writes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ctl_core import run_process
from ctl_core.errors import RunError, one_line
from ctl_core.files import from_here, written_whole
from ctl_core.metric_values import read_metrics
from ctl_core.run_process import OUTPUT, held, read_process
from ctl_core.sweep.plan import Plan, nested
from ctl_core.tools.runs import look_at


class Job:
    """A trial that runs.

    Attributes:
        trial: Optuna's
        name: of the run
        settings: by name
        slot: which of the jobs that run at once it is
        pruned: whether it was told to end, since others are better
        step: the last one known of
        best: the best value of the metric so far
    """

    def __init__(
        self,
        trial: Any,
        folder: Path,
        settings: Mapping[str, Any],
        slot: int,
        plan: Plan,
    ) -> None:
        self.trial, self.name, self.folder = trial, folder.name, folder
        self.settings, self.slot, self._plan = settings, slot, plan
        self.pruned = False
        self.step: int | None = None
        self.best: float | None = None
        self._reported = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._output = folder / OUTPUT
        self._since = 0

    def start(self, files: Path, environ: Mapping[str, str]) -> None:
        """Starts the run, or goes on with it; one whose process still lives is only watched.

        Args:
            files: the folder for the file with its settings
            environ: what it has of environment variables beside those of this process

        Raises:
            RunError: it cannot be started.
        """
        if self._lives():
            return
        config = files / f"{self.name}.yaml"
        flags = ["--config", "config.yaml"] if Path("config.yaml").is_file() else []
        flags += ["--config", str(config)]
        flags += ["--run-name", self.name, "--runs-dir", str(self.folder.parent)]
        try:
            files.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            with written_whole(config) as beside:
                beside.write_text(yaml.safe_dump(nested(self.settings)), encoding="utf-8")
            with self._output.open("ab", buffering=0) as log:
                self._since = os.fstat(log.fileno()).st_size
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "ctl_core", "train", *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environ, "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,  # Ctrl-C is the sweep's, which tells its runs to end
                )
            run_process.begin(self.folder, self._process.pid, background=True)
        except OSError as error:
            raise RunError(f"{from_here(self.folder)}: cannot be started: {error}.") from error

    def runs(self) -> bool:
        """Whether it goes on."""
        if self._process is not None:
            return self._process.poll() is None
        return self._lives()

    def _lives(self) -> bool:
        """Whether a process trains the run, or is about to."""
        process = read_process(self.folder)
        begins = process is not None and process.ended is None and process.alive()
        return begins or held(self.folder) is True

    def stop(self) -> None:
        """Tells it to save and to end."""
        with contextlib.suppress(OSError):
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)
            elif (process := read_process(self.folder)) is not None and process.alive():
                os.kill(process.pid, signal.SIGTERM)

    def look(self) -> list[str]:
        """Reads what it has measured; returns the names of an evaluation's values, if any."""
        names: list[str] = []
        for line in read_metrics(self.folder):
            self.step = max(self.step or 0, line["step"])
            if line.get("split") != "eval":
                continue
            names = [name for name in line if name not in ("step", "split")]
            value = line.get(self._plan.metric)
            if not isinstance(value, int | float):
                continue
            better = max if self._plan.highest else min
            self.best = value if self.best is None else better(self.best, value)
            if line["step"] > self._reported:
                self._reported = line["step"]
                self.trial.report(value, line["step"])
        return names

    def ended(self) -> tuple[str, str]:
        """Returns how it ended, ``complete``, ``pruned``, ``stopped`` or ``fail``, and why."""
        if self._process is None:
            found = look_at(self.folder)
            state, said = found.state, found.said
        else:
            code = self._process.returncode
            known = {0: "done", 130: "stopped", 143: "stopped", -signal.SIGTERM: "stopped"}
            why = f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
            if code < 0 and (words := signal.strsignal(-code)):
                why += f" ({words})"
            state, said = known.get(code, "failed"), self._error() or why
            if state == "stopped" and (process := read_process(self.folder)) is not None:
                state = process.how or state  # told to end when it had come to its end already
        if state in ("done", "ended"):
            why = f"{self._plan.metric} was never a finite number"
            return ("complete", "") if self.best is not None else ("fail", why)
        if state == "stopped":
            self._mark()
            return ("pruned", "") if self.pruned else ("stopped", "stopped")
        return "fail", said or state

    def _mark(self) -> None:
        """Writes down that a run was pruned: ``runs`` would have it as stopped by hand."""
        process = read_process(self.folder) if self.pruned else None
        if process is not None and process.how == "stopped":
            process.line = "pruned: others were better at this step"
            with contextlib.suppress(OSError):
                run_process.write(self.folder, process)

    def _error(self) -> str:
        """Returns the last error that it has printed since this start."""
        with contextlib.suppress(OSError), self._output.open("rb") as log:
            log.seek(max(self._since, os.fstat(log.fileno()).st_size - (1 << 16)))
            found = re.findall(r"^error: (.+)", log.read().decode(errors="replace"), re.MULTILINE)
            return one_line(found[-1], 160) if found else ""
        return ""
