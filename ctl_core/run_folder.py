"""The run folder: runs/NAME/ with config.yaml, callbacks.py, train.log, metrics.jsonl, ckpt/, …"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ctl_core import run_process, training_log
from ctl_core.callbacks_file import COPY
from ctl_core.cluster.supervisor import supervised
from ctl_core.cluster.task import Task
from ctl_core.compat import GraphWriter
from ctl_core.console import LOG, Console, activate
from ctl_core.errors import CtlError, RunError, SetupError, brief, reason
from ctl_core.files import from_here, refuse_links, written_whole
from ctl_core.hparams_page import write_hparams
from ctl_core.layers import write_config
from ctl_core.metric_values import read_metrics, storable
from ctl_core.provenance import provenance
from ctl_core.run_state.record import saved_steps
from ctl_core.settings import Config, free_name
from ctl_core.trackers.base import check_installed
from ctl_core.trackers.sender import Sender


class _Log(logging.FileHandler):
    """A log that a full disk does not fill the console with tracebacks of."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            print(
                f"warning: {from_here(self.baseFilename)} cannot be written any more.",
                file=sys.stderr,
            )

    _told = False


class Run:
    """The folder of one run, and what is written there while training.

    In a cluster, only the chief writes; the others have a log, worker-1.log and so on.

    Attributes:
        path: runs/NAME
        task: this process's place in the cluster
        reading: whether the run is only used, and nothing is written to its folder
        steps_taken: tells how many steps this process has trained
        note: what is expected of the run, for training_log.md
        console: where it says what becomes of its trackers
    """

    def __init__(self, config: Config, task: Task, reading: bool = False) -> None:
        """Creates the folder and its log, nothing else; only to read, not even these.

        Raises:
            SetupError: the folder cannot be written, or links of it lead elsewhere.
        """
        name = config.run_name or free_name(Path(config.runs_dir))
        self.path = Path(config.runs_dir).absolute() / name  # also after a hook's os.chdir
        self.task, self.reading = task, reading
        self.steps_taken: Callable[[], int] = lambda: 0
        self.note: str | None = None
        self.console: Console | None = None
        self._sender: Sender | None = None
        self._config, self._trains = config, False
        log = self.path / ("train.log" if task.chief else f"worker-{task.index}.log")
        self._metrics: Any = None
        self._writers: dict[str, Any] = {}
        self._flushes: list[Any] = []
        self._flushed_at = 0.0
        logger = logging.getLogger("ctl_core")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        if reading:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_links(self.path, [log, self.ckpt, self.path / "tb"])
            self._log = _Log(log, encoding="utf-8")
            self._held = log.open("a")
        except OSError as error:
            raise self._unwritable(error) from error
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(self._log)

    def lock(self) -> None:
        """Holds the run, by its log, until it is closed or the process ends in any way.

        Raises:
            SetupError: another process is training it; it has another note; or a tracker of a run
                without a checkpoint is not installed.
        """
        self._lock()
        if not saved_steps(self.ckpt / "engine"):
            for name in self._config.trackers:
                check_installed(name)
        try:
            run_process.begin(self.path, os.getppid() if supervised() else os.getpid())
            self._trains = True
            if self.note is not None:
                training_log.begin(self.path, self.note, self._config)
            if self._config.trackers:  # they need seconds, which the model is built in
                self._sender = Sender(self.path, self._config.trackers)
        except OSError as error:
            raise self._unwritable(error) from error

    def _lock(self) -> None:
        if fcntl is None:
            return
        for again_after in (0.1, 0.2, 0.0):
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if again_after:
                    time.sleep(again_after)
                    continue
                raise SetupError(
                    f"{self.shown}: another process is training this run; stop it, or choose "
                    "another run_name."
                ) from None
            except OSError as error:  # a file system without locks
                logging.getLogger("ctl_core").warning("%s cannot be locked: %s", self.shown, error)
                return

    def is_held(self) -> bool | None:
        """Whether a process is training the run; None where there are no locks to tell.

        Looking takes the lock for an instant, which ``lock`` waits out.
        """
        return run_process.locked(self.path / "train.log")

    def ended(self, how: str, line: str = "", step: int | None = None, metrics: Any = None) -> None:
        """Writes down how training ended, where ``runs`` and training_log.md have it."""
        if not self._trains:
            return
        self._trains = False
        try:
            process = run_process.end(self.path, how, line, step, metrics)
            if process is not None:
                training_log.complete(self.path, process)
            if self.task.chief and how != "failed":
                write_hparams(self.path / "tb", self.path.name, self._config)
        except (OSError, tf.errors.OpError) as error:
            LOG.warning("%s: how it ended cannot be written: %s", self.shown, reason(error))

    @property
    def shown(self) -> str:
        """The folder as messages show it: runs/NAME where it lies below the current folder."""
        return from_here(self.path)

    @property
    def ckpt(self) -> Path:
        """Where checkpoints are kept."""
        return self.path / "ckpt"

    @property
    def not_begun(self) -> Path:
        """Stands beside a checkpoint that was copied, until the run has settings of its own."""
        return self.ckpt / "forking"

    @property
    def written(self) -> list[Path]:
        """What training writes here, but the log."""
        names = ("ckpt", "tb", "config.yaml", "env.json", "metrics.jsonl", COPY)
        return [self.path / name for name in names]

    @property
    def config_file(self) -> Path:
        """The settings as resolved."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line: step, split and values."""
        return self.path / "metrics.jsonl"

    def open(
        self,
        config: Config,
        step: int,
        new: bool = True,
        source: bytes | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        """Writes config.yaml and opens metrics.jsonl, which ends at ``step`` afterwards.

        What an interrupted process had written beyond its last checkpoint is taken out, since
        the steps are about to run again.

        Args:
            config: the settings
            step: how many steps were taken
            new: whether more are about to be: settings and hooks are those of steps that were, or
                of a run that has none yet
            source: what is in the file with the hooks, if there is one
            devices: that this process trains on

        Raises:
            SetupError: one of the files cannot be written; or, before the first step of the run, a
                tracker cannot be used.
        """
        try:
            if new or not self.config_file.exists():
                write_config(config, self.config_file)
                self.not_begun.unlink(missing_ok=True)
            if new:
                with written_whole(self.path / "env.json") as beside:
                    beside.write_text(json.dumps(provenance(devices), indent=2) + "\n")
            if new and source is not None:
                with written_whole(self.path / COPY) as beside:
                    beside.write_bytes(source)
            kept = [line for line in read_metrics(self.path) if line["step"] <= step]
            with written_whole(self.metrics_file) as beside:
                lines = "".join(json.dumps(line) + "\n" for line in kept)
                beside.write_text(lines, encoding="utf-8")
            self._metrics = self.metrics_file.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        if self._sender is not None and new:
            console = self.console or Console()
            self._sender.begin(step, step == 0, console.say, console.warn)

    def _unwritable(self, error: OSError) -> SetupError:
        file = f"{from_here(error.filename)}: " if error.filename else ""
        return SetupError(
            f"{self.shown}: the run folder cannot be written ({file}{error.strerror}); choose "
            "another runs_dir or run_name."
        )

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Appends a line to metrics.jsonl and a scalar summary per value to tb/<split>."""
        with self._writing():
            self._write(step, split, values)

    def _write(self, step: int, split: str, values: dict[str, float]) -> None:
        line = {"step": step, "split": split, **storable(values)}
        self._metrics.write(json.dumps(line) + "\n")
        with self.writer(split).as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)

    def writer(self, split: str) -> tf.summary.SummaryWriter:
        """Returns the summary writer of ``train`` or ``eval``, created on first use."""
        if split not in self._writers:
            writer = (
                tf.summary.create_file_writer(str(self.path / "tb" / split))
                if self.task.chief
                else tf.summary.create_noop_writer()
            )
            # TensorFlow flushes whenever an ``as_default`` ends, so after each step with a hook.
            self._flushes.append(writer.flush)
            writer.flush = lambda: None
            self._writers[split] = writer
        return self._writers[split]

    def graph_writer(self, split: str) -> tf.summary.SummaryWriter:
        """Returns the same for a graph, opened only where one writes summaries.

        Every process has the summaries in its graph, so that all round alike.
        """
        return GraphWriter(lambda: self.writer(split) if self.task.chief else None)

    def flush(self, pause: float = 0.0) -> None:
        """Puts what was written so far on the disk; done before each checkpoint.

        Args:
            pause: not if that was done less than so many seconds ago
        """
        now = time.monotonic()
        if now - self._flushed_at < pause:
            return
        self._flushed_at = now
        with self._writing():
            if self._metrics is not None:
                self._metrics.flush()
            for flush in self._flushes:
                flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            raise RunError(
                f"{self.shown}: the run folder cannot be written: {reason(error)}; the checkpoints "
                "so far are kept."
            ) from error

    def close(self) -> None:
        """Closes every file; what cannot be written any more has been complained of before."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):
                self._metrics.close()
            self._metrics = None
        for writer, flush in zip(self._writers.values(), self._flushes, strict=True):
            with contextlib.suppress(tf.errors.OpError):
                flush()
                writer.close()
        self._writers, self._flushes = {}, []
        if self.reading:
            return
        if self._sender is not None:  # now that they can read everything
            self._sender.end((self.console or Console()).warn)
            self._sender = None
        logging.getLogger("ctl_core").removeHandler(self._log)
        with contextlib.suppress(OSError):
            self._log.close()
        self._held.close()


@contextlib.contextmanager
def session(run: Run, console: Console) -> Iterator[None]:
    """Opens the run's log and console, and closes them however the run ends."""
    activate(console)
    run.console = console
    step_of_summaries = tf.summary.experimental.get_step()
    try:
        yield
    except CtlError as error:
        LOG.error(str(error), exc_info=error.__cause__ or error)
        run.ended("failed", str(error))
        raise
    except BaseException as error:
        LOG.error("failed", exc_info=error)
        run.ended("failed", brief(error))
        raise
    finally:
        tf.summary.experimental.set_step(step_of_summaries)
        console.stop()
        activate(None)
        run.close()
