"""The run folder: runs/NAME/ with config.yaml, callbacks.py, train.log, metrics.jsonl, ckpt/, …"""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorflow as tf

from ctl_core.checkpoint.source import Source, find_start
from ctl_core.cluster.task import Task
from ctl_core.evaluation.summaries import Summaries
from ctl_core.hooks.callbacks_file import COPY
from ctl_core.run.console import LOG, Console, activate
from ctl_core.run.errors import CtlError, SetupError
from ctl_core.run.files import choose_run_name, lock_file, relative_path
from ctl_core.run.layers import write_config
from ctl_core.run.listeners import Listener, Listeners, MetricsFile, TrainingLog
from ctl_core.run.settings import Config
from ctl_core.session.provenance import find_provenance, list_packages


class _LogHandler(logging.FileHandler):
    """Writes the log. It does not report a full disk, because the next checkpoint does."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class Run:
    """The folder of one run, and the files that are written there during training.

    In a cluster, only the chief writes them; the other processes have a log, such as worker-1.log.
    A process that trains the run holds a lock on its log until it closes the run or ends in any
    way.

    Attributes:
        path: runs/NAME
        ckpt: its folder of checkpoints
        config_file: the file with its settings
        task: this process in its cluster
        source: the checkpoint that the run starts from, or None
        summaries: writes TensorBoard's files
        listeners: are told of each event of the run once it is opened
        steps_taken: the number of steps that this process has trained
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        note: str | None = None,
        reading: bool = False,
        listeners: Sequence[Listener | type[Listener]] = (),
    ) -> None:
        """Creates the folder of a run that is trained, and locks its log.

        Args:
            config: the settings, which name the run
            task: this process in its cluster
            note: for the run's entry in training_log.md
            reading: whether the run is only read; then nothing is created or locked
            listeners: further listeners

        Raises:
            SetupError: the run cannot start as the settings say, or another process is training it.
        """
        name = config.run_name or choose_run_name(Path(config.runs_dir))
        self.path = Path(config.runs_dir).absolute() / name  # a hook may change the current folder
        self.ckpt = self.path / "ckpt"
        self.config_file = self.path / "config.yaml"
        self.task = task
        self.steps_taken = 0
        self._first_step = 0
        self.summaries = Summaries(self.path / "tb", task.chief)
        self.listeners = Listeners([MetricsFile(), self.summaries, TrainingLog(note), *listeners])
        LOG.setLevel(logging.INFO)
        LOG.propagate = False
        self.source: Source | None
        self._log: logging.Handler
        if reading:
            self.source = Source("run_name", self.path)
            self._log = logging.NullHandler()
        else:
            self.source = find_start(dataclasses.replace(config, run_name=name))
            self.path.mkdir(parents=True, exist_ok=True)
            self._log = self._open_log()

    def _open_log(self) -> logging.Handler:
        """Opens and locks the log of this process.

        Raises:
            SetupError: another process holds the lock.
        """
        name = "train.log" if self.task.chief else f"worker-{self.task.index}.log"
        handler = _LogHandler(self.path / name, encoding="utf-8")
        if not lock_file(handler.stream):  # type: ignore[arg-type]  # the file is open
            raise SetupError(
                f"{self.shown}: another process is training this run; stop it, or choose another "
                "run_name."
            )
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
        devices: Sequence[str],
        compilation: str,
    ) -> None:
        """Writes the settings and the provenance of the run, and starts the listeners.

        Args:
            config: the settings
            step: from which this process trains
            hooks_file: the content of the file with the hooks; None if they are in no file
            devices: the devices of this process's replicas
            compilation: whether steps are compiled, or why not
        """
        write_config(config, self.config_file)
        provenance = json.dumps(find_provenance(devices, compilation), indent=2)
        (self.path / "env.json").write_text(f"{provenance}\n")
        (self.path / "requirements.txt").write_text(list_packages())
        if hooks_file is not None:
            (self.path / COPY).write_bytes(hooks_file)
        self._first_step = step
        self.listeners.start(self.path, dataclasses.asdict(config), step)

    def end(self, reason: str) -> None:
        """Tells the listeners how training ended: done, ended, stopped, diverged or failed."""
        self.listeners.tell("end", self._first_step + self.steps_taken, reason)
        has_trained = self.source is not None or self.steps_taken > 0
        if reason == "failed" and not has_trained:
            # The run has not begun, so the corrected command may begin it with other settings.
            self.config_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the summaries and the log, and releases the lock."""
        self.summaries.close()
        LOG.removeHandler(self._log)
        with contextlib.suppress(OSError):
            self._log.close()


@contextlib.contextmanager
def open_session(run: Run, console: Console) -> Iterator[None]:
    """Activates the run's console, and closes the console and the run however the run ends.

    A hook may open another run meanwhile, as ``ctl.load`` does: afterwards, the console that was
    active before is active again.
    """
    console_before = activate(console)
    step_of_summaries = tf.summary.experimental.get_step()
    try:
        yield
    except KeyboardInterrupt:  # a second Ctrl-C, after which nobody wants to wait for listeners
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
