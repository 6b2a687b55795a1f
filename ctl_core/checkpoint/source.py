"""The checkpoint to start from: RUN, RUN@STEP or RUN@best, or the newest one of a resumed run.

A run resumes from its own checkpoints. As long as it has none, it starts from the checkpoint of the
run that ``fork`` names.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

from ctl_core.checkpoint.record import is_whole, list_saved_steps, read_complete_records
from ctl_core.checkpoint.run_settings import read_run_settings
from ctl_core.run.errors import SetupError
from ctl_core.run.files import relative_path
from ctl_core.run.settings import Config, Count

# A step; "best": the checkpoint that ``keep_best`` keeps; "last": the newest one; or None: the best
# one if the run keeps it, otherwise the newest one.
CheckpointName = Count | Literal["best", "last"] | None
_NAME = re.compile(r"(?P<run>.+?)(?:@(?P<step>\d{1,18}|best))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Source:
    """A run, and one of its checkpoints.

    Attributes:
        setting: the setting that names it, for messages
        run: the folder of the run
        wanted: a step, ``best``, or None for the newest
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
            SetupError: there is none.
        """
        steps = list_saved_steps(self.folder)
        suitable = [step for step in steps if self.wanted in (None, "best", step)]
        if not suitable:
            name = relative_path(self.run)
            if self.wanted:
                name += f"@{self.wanted}"
            existing = list_saved_steps(self.run / "ckpt")[:10]
            raise SetupError(f"{self.setting}: there is no checkpoint {name}, only {existing}.")
        return suitable

    def find_compiled(self) -> bool | None:
        """Returns whether XLA compiles the run that is resumed; None for a fork of it.

        Records of engines before 2.0 do not say so. Their runs are as the setting says.
        """
        if self.setting != "run_name":
            return None
        for record in read_complete_records(self.folder):
            if record.compiled is not None:
                return record.compiled
        return read_run_settings(self.run).values.get("jit_compile") is True


def choose_checkpoint(run: Path, name: CheckpointName) -> Source:
    """Returns the checkpoint of a run that a command reads.

    Args:
        run: the folder of the run
        name: the name of the checkpoint; None: the best one if it is kept and complete, otherwise
            the newest one
    """
    if name == "last":
        return Source("checkpoint", run)
    best = run / "ckpt" / "best"
    if name is None and any(is_whole(best, step) for step in list_saved_steps(best)):
        name = "best"
    return Source("checkpoint", run, name)


def read_source(setting: str, text: str, runs_dir: str) -> Source:
    """Parses RUN, RUN@STEP or RUN@best, where RUN is the name of a run in ``runs_dir``, or a path.

    Raises:
        SetupError: there is no such run or checkpoint.
    """
    match = _NAME.fullmatch(text)
    assert match is not None
    for folder in (Path(runs_dir, match["run"]), Path(match["run"])):
        if (folder / "ckpt").is_dir():
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
    """Returns whether ``init_from`` names a Keras file or a SavedModel, not a run."""
    return Path(path).is_file() or Path(path, "saved_model.pb").is_file()


def find_start(config: Config) -> Source | None:
    """Returns the checkpoint that training resumes or forks from; None for a run from scratch.

    ``fork`` and ``init_from`` are not needed any more once a run has checkpoints of its own.

    Raises:
        SetupError: ``fork`` or ``init_from`` names something that does not exist, or ``fork``
            names another run than the one that this run was forked from.
    """
    if config.run_name is not None:
        run = Path(config.runs_dir, config.run_name).absolute()
        if list_saved_steps(run / "ckpt"):
            if config.fork is not None and config.fork != read_run_settings(run).values.get("fork"):
                raise SetupError(
                    f"fork: {relative_path(run)} already has checkpoints and was not forked "
                    f"from {config.fork}; choose another run_name."
                )
            return Source("run_name", run)
    if config.init_from is not None and not is_model(config.init_from):
        read_source("init_from", config.init_from, config.runs_dir)
    if config.fork:
        return read_source("fork", config.fork, config.runs_dir)
    return None
