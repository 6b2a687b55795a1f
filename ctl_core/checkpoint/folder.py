"""The run folder: runs/NAME/ with config.yaml, callbacks.py, train.log, metrics.jsonl, ckpt/, …"""

import contextlib
import dataclasses
import json
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core import __version__
from ctl_core.checkpoint.source import Source, find_start
from ctl_core.cluster.task import Task
from ctl_core.evaluation.summaries import Summaries
from ctl_core.hooks.callbacks_file import COPY
from ctl_core.run.console import LOG, Console, activate
from ctl_core.run.errors import CtlError, SetupError
from ctl_core.run.files import choose_run_name, lock_file, relative_path
from ctl_core.run.listeners import Listener, Listeners, MetricsFile, TrainingLog
from ctl_core.run.settings import Config
from ctl_core.run.sources import write_config


class _Handler(logging.FileHandler):
    """Writes the log; of a full disk it says nothing, which the next checkpoint does."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class Run:
    """The folder of one run, and what is written there while training.

    In a cluster, only the chief writes; the others have a log, worker-1.log and so on. It is held
    until it is closed, or the process ends in any way.

    Attributes:
        path, ckpt, config_file: runs/NAME, its folder of checkpoints, and its settings
        start: the checkpoint that it goes on from, or None
        listeners: hear what it says, once it is opened
        steps_taken: how many steps this process has trained
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        note: str | None = None,
        reading: bool = False,
        listeners: Sequence[Listener | type[Listener]] = (),
    ) -> None:
        """Creates the folder and its log, by which it is held; ``reading`` does neither.

        Raises:
            SetupError: it cannot begin as the settings say, or another process is training it.
        """
        name = config.run_name or choose_run_name(Path(config.runs_dir))
        self.path = Path(config.runs_dir).absolute() / name  # also after a hook's os.chdir
        self.ckpt, self.config_file = self.path / "ckpt", self.path / "config.yaml"
        self.task = task
        self.steps_taken = self._first_step = 0
        self.summaries = Summaries(self.path / "tb", task.chief)
        self.listeners = Listeners([MetricsFile(), self.summaries, TrainingLog(note), *listeners])
        LOG.setLevel(logging.INFO)
        LOG.propagate = False
        self._log: logging.Handler = logging.NullHandler()
        if reading:
            self.start: Source | None = Source("run_name", self.path)
            return
        self.start = find_start(dataclasses.replace(config, run_name=name))
        self.path.mkdir(parents=True, exist_ok=True)
        log = "train.log" if task.chief else f"worker-{task.index}.log"
        self._log = handler = _Handler(self.path / log, encoding="utf-8")
        if not lock_file(handler.stream):  # type: ignore[arg-type]  # which is open
            raise SetupError(
                f"{self.shown}: another process is training this run; stop it, or choose another "
                "run_name."
            )
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        LOG.addHandler(handler)

    @property
    def shown(self) -> str:
        """The folder as messages show it: runs/NAME where it lies below the current folder."""
        return relative_path(self.path)

    def open(self, config: Config, step: int, source: bytes | None, devices: Sequence[str]) -> None:
        """Writes config.yaml, and what the run was made with; the listeners begin to hear.

        ``source`` is what is in the file with the hooks, if there is one.
        """
        write_config(config, self.config_file)
        provenance = json.dumps(find_provenance(devices), indent=2)
        (self.path / "env.json").write_text(f"{provenance}\n")
        (self.path / "requirements.txt").write_text(list_packages())
        if source is not None:
            (self.path / COPY).write_bytes(source)
        self._first_step = step
        self.listeners.start(self.path, dataclasses.asdict(config), step)

    def end(self, how: str) -> None:
        """Tells the listeners how training has ended: done, ended, stopped, diverged or failed."""
        self.listeners.tell("end", self._first_step + self.steps_taken, how)
        if how == "failed" and self.start is None and not self.steps_taken:
            self.config_file.unlink(missing_ok=True)  # the command, put right, begins the run

    def close(self) -> None:
        """Closes the summaries and the log, and lets go of the run."""
        self.summaries.close()
        LOG.removeHandler(self._log)
        with contextlib.suppress(OSError):
            self._log.close()


@contextlib.contextmanager
def open_session(run: Run, console: Console) -> Iterator[None]:
    """Opens the run's log and console, and closes them however the run ends.

    A hook may open another run meanwhile, as ``ctl.load`` does: afterwards, the console is again
    the one that was active before.
    """
    console_before = activate(console)
    step_of_summaries = tf.summary.experimental.get_step()
    try:
        yield
    except KeyboardInterrupt:  # which waits for nobody
        LOG.error("interrupted")
        raise
    except BaseException as error:
        text = str(error) if isinstance(error, CtlError) else "failed"
        LOG.error(text, exc_info=error.__cause__ or error)
        run.end("failed")
        raise
    finally:
        tf.summary.experimental.set_step(step_of_summaries)
        console.stop()
        activate(console_before)
        run.close()


def find_provenance(devices: Sequence[str]) -> dict[str, Any]:
    """Returns what env.json holds; without a Git repository, ``commit`` and ``dirty`` are None."""
    packages = {"tensorflow": tf.__version__, "keras": keras.__version__, "numpy": np.__version__}
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "host": platform.node(),
        "system": platform.platform(),
        "devices": list(devices),
        "versions": {"python": platform.python_version(), "ctl_core": __version__, **packages},
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def list_packages() -> str:
    """Returns what is installed, for ``pip install -r``; without what stands in a folder."""
    places = [Path(place) for place in sys.path if place.endswith("-packages")]
    found = [one for place in places for one in place.glob("*.dist-info")]
    names = {one.stem.replace("-", "==") for one in found if not (one / "direct_url.json").exists()}
    return "\n".join([f"# Python {platform.python_version()}", *sorted(names), ""])


def _git(*arguments: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        how: dict[str, Any] = {"text": True, "timeout": 3, "stderr": subprocess.DEVNULL}
        return str(subprocess.check_output(["git", *arguments], **how).strip())
    return None
