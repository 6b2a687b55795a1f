"""The run folder: runs/NAME/ with config.yaml, train.log, metrics.jsonl, ckpt/, tb/, export/."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ctl_core.cluster.strategy import Task
from ctl_core.compat import GraphWriter
from ctl_core.errors import RunError, SetupError, reason
from ctl_core.layers import write_config
from ctl_core.run_state.record import saved_steps
from ctl_core.settings import Config, free_name


class _Log(logging.FileHandler):
    """A log that a full disk does not fill the console with tracebacks of."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            print(f"warning: {self.baseFilename} cannot be written any more.", file=sys.stderr)

    _told = False


class Run:
    """The folder of one run, and what is written there while training.

    In a cluster, only the chief writes; the others have a log, worker-1.log and so on.

    Attributes:
        path: runs/NAME
        task: this process's place in the cluster
    """

    def __init__(self, config: Config, task: Task) -> None:
        """Creates the folder and its log, nothing else.

        Raises:
            SetupError: the folder cannot be written.
        """
        name = config.run_name or free_name(Path(config.runs_dir))
        self.path = Path(config.runs_dir).absolute() / name  # also after a hook's os.chdir
        self.task = task
        log = self.path / ("train.log" if task.chief else f"worker-{task.index}.log")
        self._metrics: Any = None
        self._writers: dict[str, Any] = {}
        self._flushes: list[Any] = []
        self._flushed_at = 0.0
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._log = _Log(log, encoding="utf-8")
            self._held = log.open("a")
        except OSError as error:
            raise self._unwritable(error) from error
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger("ctl_core")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self._log)

    def lock(self) -> None:
        """Holds the run, by its log, until it is closed or the process ends in any way.

        Raises:
            SetupError: another process is training it.
        """
        if fcntl is None:
            return
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(
                f"{self.path}: another process is training this run; stop it, or choose another "
                "run_name."
            ) from None
        except OSError as error:  # a file system without locks
            logging.getLogger("ctl_core").warning("%s cannot be locked: %s", self.path, error)

    @property
    def ckpt(self) -> Path:
        """Where checkpoints are kept."""
        return self.path / "ckpt"

    @property
    def config_file(self) -> Path:
        """The settings as resolved."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line: step, split and values."""
        return self.path / "metrics.jsonl"

    def open(self, config: Config, step: int, new: bool = True) -> None:
        """Writes config.yaml and opens metrics.jsonl, which ends at ``step`` afterwards.

        What an interrupted process had written beyond its last checkpoint is taken out, since
        the steps are about to run again.

        Raises:
            SetupError: one of the files cannot be written.
        """
        try:
            if new:  # the settings are those of the steps that were trained
                write_config(config, self.config_file)
            kept = [line for line in self.read_metrics() if line["step"] <= step]
            beside = self.metrics_file.with_name("metrics.jsonl.tmp")
            beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            beside.replace(self.metrics_file)
            self._metrics = self.metrics_file.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> SetupError:
        return SetupError(
            f"{self.path}: the run folder cannot be written ({error.filename}: {error.strerror}); "
            "choose another runs_dir or run_name."
        )

    def read_metrics(self) -> list[dict[str, Any]]:
        """Reads metrics.jsonl; a last line that was cut short by a kill is left out."""
        if not self.metrics_file.exists():
            return []
        lines = []
        for text in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
        return lines

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Appends a line to metrics.jsonl and a scalar summary per value to tb/<split>."""
        with self._writing():
            self._write(step, split, values)

    def _write(self, step: int, split: str, values: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._metrics.write(json.dumps({"step": step, "split": split, **finite}) + "\n")
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
                f"{self.path}: the run folder cannot be written: {reason(error)}; the checkpoints "
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
        logging.getLogger("ctl_core").removeHandler(self._log)
        with contextlib.suppress(OSError):
            self._log.close()
        self._held.close()


def repair_list(folder: Path) -> None:
    """Makes the manager's own list of checkpoints anew if it is damaged or gone.

    A CheckpointManager refuses to start with a damaged list, and would never delete what a
    missing one does not name.
    """
    file = folder / "checkpoint"
    try:
        if file.exists() and not file.is_file():  # a named pipe would keep us waiting
            file.unlink()
        listed = tf.train.get_checkpoint_state(str(folder)) is not None
    except OSError as error:
        raise SetupError(f"{file}: expected a file, not a folder; remove it.") from error
    except ValueError:  # empty, or no text any more
        listed = False
    steps = sorted(saved_steps(folder / "engine"))
    if listed or not (steps or file.exists()):
        return
    file.unlink(missing_ok=True)
    if steps:  # TensorFlow's function for it is deprecated, and says so
        lines = [f'all_model_checkpoint_paths: "ckpt-{step}"\n' for step in steps]
        file.write_text(f'model_checkpoint_path: "ckpt-{steps[-1]}"\n' + "".join(lines))
