"""The run folder: runs/NAME/ with config.yaml, callbacks.py, train.log, metrics.jsonl, ckpt/, …"""

from __future__ import annotations

import contextlib
import json
import logging
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

from ctl_core import training_log
from ctl_core.callbacks_file import COPY
from ctl_core.cluster.task import Task
from ctl_core.compat import GraphWriter
from ctl_core.console import LOG, Console, activate
from ctl_core.errors import CtlError, RunError, SetupError, brief, reason
from ctl_core.files import from_here, is_stdout, refuse_links, written_whole
from ctl_core.hparams_page import write_hparams
from ctl_core.layers import write_config
from ctl_core.listeners import Listeners
from ctl_core.metric_values import read_metrics, storable
from ctl_core.provenance import provenance
from ctl_core.run_lock import locked, taken
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
        whole: steps of checkpoints that are on the disk, and what their files begin with, which
            listeners have not heard of yet
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        note: str | None = None,
        reading: bool = False,
        listeners: Listeners | None = None,
    ) -> None:
        """Creates the folder and its log, nothing else; only to read, not even these.

        Args:
            config: the settings
            task: this process's place in the cluster
            note: what is expected of the run, for training_log.md
            reading: whether it is only used
            listeners: hear what is written there

        Raises:
            SetupError: it cannot begin as ``fork`` or ``init_from`` say; the folder cannot be
                written, or links of it lead elsewhere.
        """
        name = config.run_name or free_name(Path(config.runs_dir))
        self.path = Path(config.runs_dir).absolute() / name  # also after a hook's os.chdir
        self.task, self.reading = task, reading
        self.steps_taken: Callable[[], int] = lambda: 0
        self.whole: list[tuple[int, Path]] = []
        self._config, self._note = config, note
        self._listeners, self._start = listeners or Listeners(), 0
        self._log_of_runs = Path(training_log.FILE).absolute()
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
        check_start(config)
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
            SetupError: another process is training it.
        """
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
                raise taken(self.path) from None
            except OSError as error:  # a file system without locks
                logging.getLogger("ctl_core").warning("%s cannot be locked: %s", self.shown, error)
                return

    def is_held(self) -> bool | None:
        """Whether a process is training the run; None where there are no locks to tell.

        Looking takes the lock for an instant, which ``lock`` waits out.
        """
        return locked(self.path / "train.log")

    def ended(self, how: str, result: str) -> None:
        """Writes down how training ended, if it has begun.

        That is a line in training_log.md, if the run has an entry there; and unless it has failed,
        what TensorBoard's HParams page shows. Listeners hear of it unless it was interrupted, which
        waits for nobody.

        Args:
            how: done, ended, stopped, diverged, failed or interrupted
            result: the line
        """
        if self._metrics is None:
            return
        try:
            training_log.end(self._log_of_runs, self.shown, result)
            if how != "failed":
                write_hparams(self.path / "tb", self.path.name, self._config)
        except (OSError, tf.errors.OpError) as error:
            LOG.warning("%s: how it ended cannot be written: %s", self.shown, reason(error))
        if how != "interrupted":
            self._tell_saved()
            self._listeners.tell("end", self._start + self.steps_taken(), how)

    @property
    def is_shown(self) -> bool:
        """Whether what it says is printed: by the chief, and not into the log, which has it."""
        return self.task.chief and not is_stdout(self.path / "train.log")

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
        """Writes config.yaml, and opens metrics.jsonl, to end at ``step``.

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
            if new or not self.config_file.exists():
                write_config(config, self.config_file)
                self.not_begun.unlink(missing_ok=True)
            if new:
                with written_whole(self.path / "env.json") as beside:
                    beside.write_text(json.dumps(provenance(devices), indent=2) + "\n")
            if new and source is not None:
                with written_whole(self.path / COPY) as beside:
                    beside.write_bytes(source)
            self._metrics = _opened(self.metrics_file, step)
            if new and self._note:
                training_log.begin(self._log_of_runs, self.shown, self._note, config)
        except OSError as error:
            raise self._unwritable(error) from error
        self._start = step
        if new:
            self._listeners.start(self.path, config, step)

    def _unwritable(self, error: OSError) -> SetupError:
        file = f"{from_here(error.filename)}: " if error.filename else ""
        return SetupError(
            f"{self.shown}: the run folder cannot be written ({file}{error.strerror}); choose "
            "another runs_dir or run_name."
        )

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Appends a line to metrics.jsonl and a scalar summary per value to tb/<split>."""
        with self._writing():
            line = {"step": step, "split": split, **storable(values)}
            self._metrics.write(json.dumps(line) + "\n")
        self.write_scalars(step, split, values)
        self._listeners.tell("values", step, split, values)

    def _tell_saved(self) -> None:
        while self.whole:
            self._listeners.tell("saved", *self.whole.pop(0))

    def write_scalars(self, step: int, split: str, values: dict[str, float]) -> None:
        """Writes a scalar summary per value to tb/<split>."""
        with self._writing(), self.writer(split).as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(name, value)

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

        Listeners hear of the checkpoints that were.

        Args:
            pause: not if that was done less than so many seconds ago
        """
        self._tell_saved()
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
        logging.getLogger("ctl_core").removeHandler(self._log)
        with contextlib.suppress(OSError):
            self._log.close()
        self._held.close()


def _opened(path: Path, step: int) -> Any:
    """Opens a file of lines to append to, once those of later steps are taken out.

    Raises:
        OSError: it cannot be written.
    """
    kept = [line for line in read_metrics(path.parent, path.name) if line["step"] <= step]
    with written_whole(path) as beside:
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    return path.open("a", encoding="utf-8")


@contextlib.contextmanager
def session(run: Run, console: Console) -> Iterator[None]:
    """Opens the run's log and console, and closes them however the run ends."""
    activate(console)
    step_of_summaries = tf.summary.experimental.get_step()
    try:
        yield
    except KeyboardInterrupt:
        LOG.error("interrupted")
        run.ended("interrupted", "interrupted, not saved")
        raise
    except CtlError as error:
        LOG.error(str(error), exc_info=error.__cause__ or error)
        run.ended("failed", f"failed: {error}")
        raise
    except BaseException as error:
        LOG.error("failed", exc_info=error)
        run.ended("failed", f"failed: {brief(error)}")
        raise
    finally:
        tf.summary.experimental.set_step(step_of_summaries)
        console.stop()
        activate(None)
        run.close()
