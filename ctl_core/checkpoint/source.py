"""Which checkpoint is meant: of RUN, RUN@STEP or RUN@best, and by a run that goes on.

A run goes on from its own checkpoints; before it has any, from that of the run that ``fork`` names.
"""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from ctl_core.checkpoint.record import list_saved_steps
from ctl_core.run.errors import SetupError
from ctl_core.run.files import relative_path
from ctl_core.run.settings import Config, Count
from ctl_core.run.sources import read_file

CheckpointName = Count | Literal["best"] | None
_NAME = re.compile(r"(.+?)(?:@(\d{1,18}|best))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Source:
    """A run, and which of its checkpoints: the ``wanted`` step, ``best``, or None for the newest.

    ``setting`` is the one that names it, for messages.
    """

    setting: str
    run: Path
    wanted: CheckpointName = None

    @property
    def folder(self) -> Path:
        """Where the checkpoint is kept."""
        return self.run / "ckpt" / "best" if self.wanted == "best" else self.run / "ckpt"

    def find_steps(self) -> list[int]:
        """Returns the steps that will do, the newest first; a SetupError if there is none."""
        steps = list_saved_steps(self.folder)
        found = [step for step in steps if self.wanted in (None, "best", step)]
        if not found:
            there = list_saved_steps(self.run / "ckpt")[:10]
            name = relative_path(self.run) + (f"@{self.wanted}" if self.wanted else "")
            raise SetupError(f"{self.setting}: no checkpoint {name} is there, only {there}.")
        return found


def read_source(setting: str, text: str, runs_dir: str) -> Source:
    """Reads RUN, RUN@STEP or RUN@best, where RUN is the name of a run in ``runs_dir``, or a folder.

    What is not there is a SetupError.
    """
    name, step = _NAME.fullmatch(text).groups()  # type: ignore[union-attr]
    for folder in (Path(runs_dir) / name, Path(name)):
        if (folder / "ckpt").is_dir():
            wanted: CheckpointName = "best" if step == "best" else int(step) if step else None
            source = Source(setting, folder.absolute(), wanted)
            source.find_steps()
            return source
    raise SetupError(
        f"{setting}: {name!r} is neither a run in {runs_dir} nor a path that is there."
    )


def is_model(path: str) -> bool:
    """Whether ``init_from`` names a file of Keras' or a SavedModel; otherwise, it names a run."""
    return Path(path).is_file() or Path(path, "saved_model.pb").is_file()


def find_start(config: Config) -> Source | None:
    """Returns the checkpoint that training goes on from; None for a run that begins anew.

    A run that has checkpoints no more needs what ``fork`` or ``init_from`` say; otherwise, what is
    not there is a SetupError.
    """
    if config.run_name is not None:
        run = Path(config.runs_dir, config.run_name).absolute()
        if list_saved_steps(run / "ckpt"):
            if config.fork not in (None, read_file(run / "config.yaml").values.get("fork")):
                raise SetupError(
                    f"fork: {relative_path(run)} has checkpoints, and did not begin from "
                    f"{config.fork}; choose another run_name."
                )
            return Source("run_name", run)
    if config.init_from is not None and not is_model(config.init_from):
        read_source("init_from", config.init_from, config.runs_dir)
    return read_source("fork", config.fork, config.runs_dir) if config.fork else None
