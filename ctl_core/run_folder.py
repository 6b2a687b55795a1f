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
from ctl_core.cluster.signals import before_the_end
from ctl_core.cluster.supervisor import supervised
from ctl_core.cluster.task import Task
from ctl_core.compat import GraphWriter
from ctl_core.console import LOG, Console, activate
from ctl_core.errors import CtlError, RunError, SettingError, SetupError, brief, reason
from ctl_core.files import from_here, refuse_links, written_whole
from ctl_core.hparams_page import write_hparams
from ctl_core.layers import write_config
from ctl_core.metric_values import PROGRESS, read_metrics, storable
from ctl_core.provenance import provenance
from ctl_core.refused import Before
from ctl_core.settings import Config, free_name
from ctl_core.sources import NOT_BEGUN, check_start


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
        seconds: for how long it was trained before, over all its starts
        at_the_end: writes the last line of progress.jsonl, and returns for how long it was trained
    """

    def __init__(self, config: Config, task: Task, reading: bool = False) -> None:
        """Creates the folder and its log, nothing else; only to read, not even these.

        Raises:
            SetupError: it cannot begin as ``fork`` or ``init_from`` say; the folder cannot be
                written, or links of it lead elsewhere.
        """
        name = config.run_name or free_name(Path(config.runs_dir))
        self.path = Path(config.runs_dir).absolute() / name  # also after a hook's os.chdir
        self.task, self.reading = task, reading
        self.steps_taken: Callable[[], int] = lambda: 0
        self.note: str | None = None
        self.seconds = 0.0
        self.at_the_end: Callable[[], float | None] = lambda: None
        self._config, self._trains, self._over = config, False, False
        self._noted = False
        log = self.path / ("train.log" if task.chief else f"worker-{task.index}.log")
        self._metrics: Any = None
        self._progress: Any = None
        self._writers: dict[str, Any] = {}
        self._flushes: list[Any] = []
        self._flushed_at = 0.0
        logger = logging.getLogger("ctl_core")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        if reading:
            return
        check_start(config)
        self._before = Before(self.path, [log])
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
            SetupError: another process is training it, or it has another note.
        """
        self._lock()
        try:
            run_process.begin(self.path, os.getppid() if supervised() else os.getpid())
            self._trains = True
            if self.note is not None:
                self._noted = training_log.begin(self.path, self.note, self._config)
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
                raise run_process.taken(self.path) from None
            except OSError as error:  # a file system without locks
                logging.getLogger("ctl_core").warning("%s cannot be locked: %s", self.shown, error)
                process = run_process.read_process(self.path)
                own = (os.getpid(), os.getppid())  # a supervisor, or who started this one
                if process and process.ended is None and process.alive() and process.pid not in own:
                    raise run_process.taken(self.path) from None
                return

    def is_held(self) -> bool | None:
        """Whether a process is training the run; None where there are no locks to tell.

        Looking takes the lock for an instant, which ``lock`` waits out.
        """
        return run_process.locked(self.path / "train.log")

    def ended(self, how: str, line: str = "", **more: Any) -> None:
        """Writes down how training ended, where ``runs`` and training_log.md have it.

        Args:
            how: in a word, see ``run_process.Process``
            line: what a failure said, or what stopped the run
            more: what else ``run_process.end`` takes
        """
        self._over = True
        if not self._trains:
            return
        self._trains = False
        config = self._config
        seconds = None
        try:
            seconds = self.at_the_end()
        except (RunError, tf.errors.OpError) as error:  # the run has ended as it has
            LOG.warning("%s: the last line of %s is missing: %s", self.shown, PROGRESS, error)
        try:
            process = run_process.end(self.path, how, line, seconds=seconds, **more)
            if process is not None:
                training_log.complete(self.path, process)
            if self.task.chief and how != "failed":
                write_hparams(self.path / "tb", self.path.name, config)
        except (OSError, tf.errors.OpError) as error:
            LOG.warning("%s: how it ended cannot be written: %s", self.shown, reason(error))

    def refused(self, line: str) -> None:
        """Gives the folder back as it was, since a setting cannot be: the run has not begun.

        In the background, where nobody has seen why, it stays to say so.

        Args:
            line: what the setting's refusal says
        """
        process = run_process.read_process(self.path) if self._trains else None
        if self.reading or self.steps_taken() or (process is not None and process.background):
            self.ended("failed", line)
            return
        with contextlib.suppress(OSError, SetupError):
            if self._noted:
                training_log.take_back(self.path)
        self._before.give_back(self._trains)
        self._over, self._trains = True, False

    def interrupted(self, looks: bool = True) -> None:
        """Writes down that Ctrl-C has ended training there and then, unless it had ended before.

        Args:
            looks: whether the graph still answers, for the last line of progress.jsonl
        """
        if not self._over:
            LOG.error("interrupted")
            if not looks:
                self.at_the_end = lambda: None
            self.ended("stopped", run_process.AT_ONCE)

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
        return self.ckpt / NOT_BEGUN

    @property
    def written(self) -> list[Path]:
        """What training writes here, but the log."""
        names = ("ckpt", "tb", "config.yaml", "env.json", "metrics.jsonl", PROGRESS, COPY)
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
        """Writes config.yaml, and opens metrics.jsonl and progress.jsonl, to end at ``step``.

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
            SetupError: one of the files cannot be written.
        """
        try:
            if new:
                training_log.note_changes(self.path, config)
            if new or not self.config_file.exists():
                write_config(config, self.config_file)
                self.not_begun.unlink(missing_ok=True)
            if new:
                with written_whole(self.path / "env.json") as beside:
                    beside.write_text(json.dumps(provenance(devices), indent=2) + "\n")
            if new and source is not None:
                with written_whole(self.path / COPY) as beside:
                    beside.write_bytes(source)
            lines = read_metrics(self.path, PROGRESS)
            self.seconds = run_process.seconds_trained(self.path, lines) or 0.0
            self._progress = _opened(self.path / PROGRESS, step, buffering=1)
            self._metrics = _opened(self.metrics_file, step)
        except OSError as error:
            raise self._unwritable(error) from error

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

    def write_progress(self, step: int, values: dict[str, float]) -> None:
        """Appends a line to progress.jsonl, and scalar summaries to tb/train.

        It is on the disk before the line of metrics.jsonl that is written next.
        """
        with self._writing():
            self._progress.write(json.dumps({"step": step, **storable(values)}) + "\n")
            with self.writer("train").as_default(step=step):
                for name, value in values.items():
                    if name != "seconds":
                        tf.summary.scalar(f"progress/{name}", value)

    def writer(self, split: str) -> tf.summary.SummaryWriter:
        """Returns the summary writer of ``train`` or ``eval``, created on first use.

        Raises:
            RunError: its file cannot be written.
        """
        if split not in self._writers:
            with self._writing():
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
        for file in filter(None, (self._metrics, self._progress)):
            with contextlib.suppress(OSError):
                file.close()
        self._metrics = self._progress = None
        for writer, flush in zip(self._writers.values(), self._flushes, strict=True):
            with contextlib.suppress(tf.errors.OpError):
                flush()
                writer.close()
        self._writers, self._flushes = {}, []
        if self.reading:
            return
        logging.getLogger("ctl_core").removeHandler(self._log)
        with contextlib.suppress(OSError):
            self._log.close()
        self._held.close()


def _opened(path: Path, step: int, buffering: int = -1) -> Any:
    """Opens a file of lines to append to, once those of later steps are taken out.

    Raises:
        OSError: it cannot be written.
    """
    kept = [line for line in read_metrics(path.parent, path.name) if line["step"] <= step]
    with written_whole(path) as beside:
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    return path.open("a", encoding="utf-8", buffering=buffering)


@contextlib.contextmanager
def session(run: Run, console: Console) -> Iterator[None]:
    """Opens the run's log and console, and closes them however the run ends."""
    activate(console)
    step_of_summaries = tf.summary.experimental.get_step()
    try:
        with before_the_end(lambda: run.interrupted(looks=False)):
            yield
    except KeyboardInterrupt:
        run.interrupted()
        raise
    except CtlError as error:
        LOG.error(str(error), exc_info=error.__cause__ or error)
        if isinstance(error, SettingError):
            run.refused(str(error))
        else:
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
