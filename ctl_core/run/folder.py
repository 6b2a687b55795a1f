"""The run folder: runs/NAME/ with config.yaml, callbacks.py, train.log, metrics.jsonl, ckpt/, …"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tensorflow as tf

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ctl_core.callbacks_file import COPY
from ctl_core.cluster.task import Task
from ctl_core.console import LOG, Console, activate
from ctl_core.errors import CtlError, SetupError
from ctl_core.files import from_here, is_stdout, refuse_links, written_whole
from ctl_core.run.listeners import Listener, Listeners
from ctl_core.run.lock import is_locked, refuse_second
from ctl_core.run.metrics import FILE, MetricsFile
from ctl_core.run.provenance import find_provenance
from ctl_core.run.summaries import Summaries
from ctl_core.run.training_log import TrainingLog
from ctl_core.settings import Config, free_name, write_config
from ctl_core.sources import check_start


class _Log(logging.FileHandler):
    """A log that a full disk does not fill the console with tracebacks of."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            name = from_here(self.baseFilename)
            print(f"warning: {name} cannot be written any more.", file=sys.stderr)


class Run:
    """The folder of one run, and what is written there while training.

    In a cluster, only the chief writes; the others have a log, worker-1.log and so on.

    Attributes:
        path: runs/NAME
        task: this process's place in the cluster
        reading: whether the run is only used, and nothing is written to its folder
        summaries: what TensorBoard shows of it
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
        listeners: Sequence[Listener | type[Listener]] = (),
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
        self.summaries = Summaries(self.path / "tb", task.chief)
        self._metrics = MetricsFile(self.path / FILE)
        own = (self._metrics, self.summaries, TrainingLog(note))
        self._listeners, self._start = Listeners([*own, *listeners]), 0
        log = self.path / ("train.log" if task.chief else f"worker-{task.index}.log")
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
            raise self._refuse(error) from error
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(self._log)

    def lock(self) -> None:
        """Holds the run, by its log, until it is closed or the process ends in any way.

        Raises:
            SetupError: another process is training it.
        """
        if fcntl is None:
            return
        for again_after in (0.1, 0.2, 0.0):  # looking whether it is held holds it for an instant
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not again_after:
                    raise refuse_second(self.path) from None
                time.sleep(again_after)
            except OSError as error:  # a file system without locks
                LOG.warning("%s cannot be locked: %s", self.shown, error)
                return

    def is_held(self) -> bool | None:
        """Whether a process is training the run; None where there are no locks to tell."""
        return is_locked(self.path / "train.log")

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
    def written(self) -> list[Path]:
        """What training writes here, but the log."""
        return [self.path / name for name in ("ckpt", "tb", "config.yaml", "env.json", FILE, COPY)]

    @property
    def config_file(self) -> Path:
        """The settings as resolved."""
        return self.path / "config.yaml"

    def open(
        self,
        config: Config,
        step: int,
        new: bool = True,
        source: bytes | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        """Writes config.yaml, and what the run was made with; the listeners begin to hear.

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
            begins = new or not self.config_file.exists()
            if begins:
                write_config(config, self.config_file)
            if new:
                with written_whole(self.path / "env.json") as beside:
                    beside.write_text(json.dumps(find_provenance(devices), indent=2) + "\n")
            if new and source is not None:
                with written_whole(self.path / COPY) as beside:
                    beside.write_bytes(source)
        except OSError as error:
            raise self._refuse(error) from error
        self._start = step
        if begins:
            self._listeners.start(self.path, dataclasses.asdict(config), step)

    def _refuse(self, error: OSError) -> SetupError:
        file = f"{from_here(error.filename)}: " if error.filename else ""
        return SetupError(
            f"{self.shown}: the run folder cannot be written ({file}{error.strerror}); choose "
            "another runs_dir or run_name."
        )

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Tells the listeners of values: metrics.jsonl and TensorBoard are two of them."""
        self._listeners.tell("values", step, split, values)

    def tell_saved(self) -> None:
        """Tells the listeners of checkpoints that have become whole."""
        while self.whole:
            self._listeners.tell("saved", *self.whole.pop(0))

    def end(self, how: str) -> None:
        """Tells the listeners how training has ended: done, ended, stopped, diverged or failed."""
        self.tell_saved()
        self._listeners.tell("end", self._start + self.steps_taken(), how)

    def close(self) -> None:
        """Closes every file."""
        with contextlib.suppress(OSError):
            self._metrics.close()
        self.summaries.close()
        if not self.reading:
            LOG.removeHandler(self._log)
            with contextlib.suppress(OSError):
                self._log.close()
            self._held.close()


@contextlib.contextmanager
def open_session(run: Run, console: Console) -> Iterator[None]:
    """Opens the run's log and console, and closes them however the run ends."""
    activate(console)
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
        activate(None)
        run.close()
