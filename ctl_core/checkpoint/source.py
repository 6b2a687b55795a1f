"""Finds the checkpoint that a run starts from.

A run resumes from its own newest checkpoint. If it has no checkpoint yet, it starts from the one
that ``fork`` names, in the form RUN, RUN@STEP or RUN@best.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

from ctl_core.checkpoint.record import (
    has_lost_checkpoints,
    is_whole,
    list_saved_steps,
    read_complete_records,
)
from ctl_core.checkpoint.run_settings import read_run_settings
from ctl_core.run.errors import SetupError
from ctl_core.run.files import refuse_patterns, relative_path
from ctl_core.run.settings import Config, Count

# The name of a checkpoint: its step, "best" for the checkpoint that ``keep_best`` keeps, or "last"
# for the newest one. None means the best checkpoint if the run keeps one, otherwise the newest.
CheckpointName = Count | Literal["best", "last"] | None
_NAME = re.compile(r"(?P<run>.+?)(?:@(?P<step>\d{1,18}|best))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Source:
    """A run, and one of its checkpoints.

    Attributes:
        setting: the setting that names the run, for messages
        run: the folder of the run
        wanted: the step of the checkpoint, ``best``, or None for the newest checkpoint
    """

    setting: str
    run: Path
    wanted: int | Literal["best"] | None = None

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        checkpoints = self.run / "ckpt"
        if self.wanted == "best":
            return checkpoints / "best"
        return checkpoints

    def find_steps(self) -> list[int]:
        """Returns the steps of the checkpoints that may be used, newest first.

        Raises:
            SetupError: there is no such checkpoint.
        """
        steps = list_saved_steps(self.folder)
        suitable = [step for step in steps if self.wanted in (None, "best", step)]
        if not suitable:
            name = relative_path(self.run)
            if self.wanted:
                name += f"@{self.wanted}"
            existing = list_saved_steps(self.run / "ckpt")[:10]
            message = f"{self.setting}: there is no checkpoint {name}"
            if existing:
                message += f", only {existing}"
            if self.wanted != "best" and has_best(self.run):
                message += f"; its best checkpoint is kept as {self.run.name}@best"
            raise SetupError(f"{message}.")
        return suitable

    def find_compiled(self) -> bool | None:
        """Returns whether XLA compiles the steps of a resumed run; None for a fork.

        The records of engines before 2.0 do not contain this information. The steps of their runs
        are compiled if the setting ``jit_compile`` is true.
        """
        if self.setting != "run_name":
            return None
        for record in read_complete_records(self.folder):
            if record.compiled is not None:
                return record.compiled
        return read_run_settings(self.run).values.get("jit_compile") is True


def choose_checkpoint(run: Path, name: CheckpointName) -> Source:
    """Chooses which checkpoint of a run a command reads.

    Args:
        run: the folder of the run
        name: the name of the checkpoint. None chooses the best checkpoint if it is kept and
            complete, otherwise the newest.
    """
    if name == "last":
        return Source("checkpoint", run)
    if name is None and has_best(run):
        name = "best"
    return Source("checkpoint", run, name)


def has_best(run: Path) -> bool:
    """Returns True if the best checkpoint of a run is kept and complete."""
    best = run / "ckpt" / "best"
    return any(is_whole(best, step) for step in list_saved_steps(best))


def read_source(setting: str, text: str, runs_dir: str) -> Source:
    """Parses RUN, RUN@STEP or RUN@best, where RUN is the name of a run in ``runs_dir``, or a path.

    Raises:
        SetupError: there is no such run or checkpoint.
    """
    match = _NAME.fullmatch(text)
    assert match is not None
    for folder in (Path(runs_dir, match["run"]), Path(match["run"])):
        if (folder / "ckpt").is_dir():
            refuse_patterns(setting, folder)
            source = Source(setting, folder.absolute(), _parse_step(match["step"]))
            source.find_steps()
            return source
    raise SetupError(
        f"{setting}: {match['run']!r} is neither a run in {runs_dir} nor an existing path."
    )


def _parse_step(text: str | None) -> int | Literal["best"] | None:
    if text is None:
        return None
    if text == "best":
        return "best"
    return int(text)


def is_model(path: str) -> bool:
    """Returns True if a path is a Keras file or a SavedModel, rather than a run."""
    return Path(path).is_file() or Path(path, "saved_model.pb").is_file()


def find_start(config: Config, start_over: bool = False) -> Source | None:
    """Returns the checkpoint that training resumes or forks from; None if it starts from scratch.

    Once a run has its own checkpoints, it resumes from them, so the sources that ``fork`` and
    ``init_from`` name may have been deleted.

    Args:
        config: the settings
        start_over: whether the run may start from scratch if its checkpoints were deleted

    Raises:
        SetupError: ``fork`` or ``init_from`` names something that does not exist; this run has
            checkpoints but was not forked from the run that ``fork`` names, or its checkpoints were
            deleted; or TensorFlow would interpret a path as a pattern.
    """
    refuse_patterns("runs_dir", config.runs_dir)
    if config.run_name is not None:
        run = Path(config.runs_dir, config.run_name).absolute()
        if list_saved_steps(run / "ckpt"):
            if config.fork is not None and config.fork != read_run_settings(run).values.get("fork"):
                raise SetupError(
                    f"fork: {relative_path(run)} already has checkpoints and was not forked "
                    f"from {config.fork}; choose another run_name."
                )
            return Source("run_name", run)
        if has_lost_checkpoints(run) and not start_over:
            raise SetupError(_explain_lost(run))
    if config.init_from is not None and Path(config.init_from, "saved_model.pb").is_file():
        refuse_patterns("init_from", config.init_from)
    elif config.init_from is not None and not is_model(config.init_from):
        read_source("init_from", config.init_from, config.runs_dir)
    if config.fork:
        return read_source("fork", config.fork, config.runs_dir)
    return None


def _explain_lost(run: Path) -> str:
    """Returns the error message for a run whose checkpoints were deleted."""
    ways = ["choose another run_name", "begin this run again, without what is left: --start-over"]
    if has_best(run):
        ways.insert(0, f"continue from its best checkpoint: --fork {run.name}@best --run-name NEW")
    return (
        f"run_name: {relative_path(run)} has trained already, but its checkpoints were deleted, so "
        f"it would begin at step 0 and replace its metrics; {'; or '.join(ways)}."
    )
