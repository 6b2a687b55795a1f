"""Manages the folder of a run, runs/NAME/.

The folder contains config.yaml, callbacks.py, train.log, metrics.jsonl, ckpt/ and other files.
"""

import contextlib
import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import tensorflow as tf

from ctl_core.checkpoint.record import forget_checkpoints, has_lost_checkpoints
from ctl_core.checkpoint.source import Source, find_start
from ctl_core.cluster.task import Task
from ctl_core.evaluation.summaries import Summaries
from ctl_core.hooks.callbacks_file import COPY, MODULE_COPIES
from ctl_core.run.console import LOG, Console, activate
from ctl_core.run.errors import CtlError, SetupError
from ctl_core.run.files import (
    LOCK,
    atomic_write,
    choose_run_name,
    explain_failure,
    lock_run,
    refuse_patterns,
    relative_path,
    release_run,
    remove,
)
from ctl_core.run.layers import write_config
from ctl_core.run.listeners import Listener, Listeners, MetricsFile, TrainingLog
from ctl_core.run.settings import Config
from ctl_core.session.provenance import find_provenance, list_packages


class _LogHandler(logging.FileHandler):
    """Writes the log. It does not report a full disk, because the next checkpoint reports it."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class Run:
    """The folder of one run, and the files that are written there during training.

    In a cluster, only the chief writes these files. Each other process writes only its own log,
    such as worker-1.log. The process that trains the run (in a cluster, the chief) keeps a lock
    until it closes the run or exits.

    Attributes:
        path: the absolute path of the folder runs/NAME
        ckpt: the folder of the run's checkpoints
        config_file: the file with the run's settings
        task: this process in its cluster
        reading: whether the run is only read
        source: the checkpoint from which the run starts, or None
        summaries: the writer of TensorBoard's files
        listeners: the listeners, which are notified of each event after the run is opened
        steps_taken: the number of steps that this process has trained
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        note: str | None = None,
        reading: bool = False,
        listeners: Sequence[Listener | type[Listener]] = (),
        start_over: bool = False,
    ) -> None:
        """Creates and locks the folder of the run, unless the run is only read.

        Args:
            config: the settings, which name the run
            task: this process in its cluster
            note: a note for the run's entry in training_log.md
            reading: whether the run is only read. In this case, nothing is created or locked
            listeners: additional listeners
            start_over: whether to remove what is left of the run if its checkpoints were deleted

        Raises:
            SetupError: the run cannot start with these settings, or another process is training it.
        """
        refuse_patterns("runs_dir", config.runs_dir)
        name = config.run_name or choose_run_name(Path(config.runs_dir))
        # The path is absolute, because a hook may change the current folder.
        self.path = Path(config.runs_dir).absolute() / name
        self.ckpt = self.path / "ckpt"
        self.config_file = self.path / "config.yaml"
        self.task = task
        self.reading = reading
        self.steps_taken = 0
        self._has_given_name = config.run_name is not None
        self._first_step = 0
        self.summaries = Summaries(self.path / "tb", task.chief)
        self.listeners = Listeners([MetricsFile(), self.summaries, TrainingLog(note), *listeners])
        LOG.setLevel(logging.INFO)
        LOG.propagate = False
        self.source: Source | None
        self._log: logging.Handler
        self._lock: IO[str] | None = None
        if reading:
            self.source = Source("run_name", self.path)
            self._log = logging.NullHandler()
        else:
            self.source = find_start(dataclasses.replace(config, run_name=name), start_over)
            with explain_failure("runs_dir", self.path):
                self.path.mkdir(parents=True, exist_ok=True)
            if task.chief:
                self._lock = self._take_lock()
                if start_over and has_lost_checkpoints(self.path):
                    forget_checkpoints(self.path)
            try:
                with explain_failure("runs_dir", self.path):
                    self._log = self._open_log()
            except BaseException:
                self._release_lock()
                raise

    def _take_lock(self) -> IO[str]:
        """Locks the run.

        Raises:
            SetupError: another process has locked the run, or the lock file cannot be written.
        """
        try:
            lock = lock_run(self.path)
        except OSError as error:
            raise SetupError(
                f"{self.shown}/{LOCK}: cannot be written: {error.strerror}."
            ) from error
        if lock is None:
            raise SetupError(
                f"{self.shown}: another process is training this run; stop it, or choose another "
                "run_name."
            )
        return lock

    def _open_log(self) -> logging.Handler:
        """Opens the log of this process.

        Raises:
            SetupError: the log is a symbolic link, so another file would be written instead.
        """
        name = "train.log" if self.task.chief else f"worker-{self.task.index}.log"
        path = self.path / name
        if path.is_symlink():
            raise SetupError(
                f"{relative_path(path)}: is a link; remove it, or choose another run_name."
            )
        handler = _LogHandler(path, encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        LOG.addHandler(handler)
        return handler

    @property
    def shown(self) -> str:
        """The folder as messages show it: runs/NAME if it is inside the current folder."""
        return relative_path(self.path)

    def open(
        self,
        config: Config,
        step: int,
        hooks_file: bytes | None,
        modules: Mapping[str, bytes],
        devices: Sequence[str],
        compilation: str,
    ) -> None:
        """Writes the settings and the provenance of the run, and starts the listeners.

        Args:
            config: the settings
            step: the step at which this process starts
            hooks_file: the content of the file with the hooks; None if the hooks are not in a file
            modules: the content of the project's modules that the hooks import, by path
            devices: the devices of this process's replicas
            compilation: a phrase that says whether steps are compiled, or why they are not
        """
        write_config(config, self.config_file)
        provenance = json.dumps(find_provenance(devices, compilation), indent=2)
        files = {"env.json": f"{provenance}\n".encode()}
        files["requirements.txt"] = list_packages().encode()
        if hooks_file is not None:
            files[COPY] = hooks_file
        self._copy_modules(modules)
        for name, content in files.items():
            with atomic_write(self.path / name) as temporary:
                temporary.write_bytes(content)
        self._first_step = step
        self.listeners.start(self.path, dataclasses.asdict(config), step)

    def _copy_modules(self, modules: Mapping[str, bytes]) -> None:
        """Replaces the copies of the project's modules."""
        remove(self.path / MODULE_COPIES)
        if not modules:
            return
        with atomic_write(self.path / MODULE_COPIES) as folder:
            for name, content in modules.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

    def end(self, reason: str) -> None:
        """Notifies the listeners that training has ended.

        Args:
            reason: how training ended: done, ended, stopped, diverged or failed
        """
        self.listeners.tell("end", self._first_step + self.steps_taken, reason)
        has_trained = self.source is not None or self.steps_taken > 0
        if reason == "failed" and not has_trained:
            # No step has been trained. Therefore, after the user has corrected the error, the run
            # may start with other settings.
            self.config_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the summaries and the log, and releases the lock.

        If the name of the run was generated and the folder contains nothing but a log, the folder
        is removed.
        """
        self.summaries.close()
        LOG.removeHandler(self._log)
        with contextlib.suppress(OSError):
            self._log.close()
        has_lock = self._lock is not None
        self._release_lock()
        if has_lock and not self._has_given_name and self._is_unused():
            shutil.rmtree(self.path)

    def _is_unused(self) -> bool:
        """Returns True if the folder exists, and is empty or contains only the log."""
        return self.path.is_dir() and {path.name for path in self.path.iterdir()} <= {"train.log"}

    def abandon(self) -> None:
        """Releases the lock without closing the log, for a process that ends immediately."""
        self._release_lock()

    def _release_lock(self) -> None:
        """Releases the lock, so that other processes can train the run."""
        if self._lock is not None:
            release_run(self.path, self._lock)
            self._lock = None


@contextlib.contextmanager
def open_session(run: Run, console: Console) -> Iterator[None]:
    """Activates the console of a run, and closes the console and the run when the context ends.

    A hook may open another run inside the context, for example with ``ctl.load``. Therefore, the
    console that was active before is activated again at the end.
    """
    console_before = activate(console)
    step_of_summaries = tf.summary.experimental.get_step()
    try:
        yield
    except KeyboardInterrupt:  # after a second Ctrl-C, the user does not want to wait for listeners
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
