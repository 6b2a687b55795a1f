"""Which checkpoint of which run another begins from: the settings ``fork`` and ``init_from``."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from ctl_core.errors import SetupError, one_line
from ctl_core.settings import nearest, shown

_FORM = re.compile(r"(.+?)(?:@(\d{1,18}|best))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Source:
    """A run, and one of its checkpoints.

    Attributes:
        run: its folder
        step: of the checkpoint, or best for the one of ``keep_best``; None for the newest
    """

    run: Path
    step: int | str | None

    @property
    def folder(self) -> Path:
        """Where the checkpoint is kept."""
        return self.run / "ckpt" / "best" if self.step == "best" else self.run / "ckpt"


def read_source(setting: str, text: str, runs_dir: str) -> Source:
    """Reads RUN, RUN@STEP or RUN@best, where RUN is the name of a run or its folder.

    Args:
        setting: that says so, for messages
        text: what it says
        runs_dir: the folder of the runs

    Raises:
        SetupError: there is no such run.
    """
    name, step = _FORM.fullmatch(text).groups()  # type: ignore[union-attr]
    for folder in (Path(runs_dir) / name, Path(name)):
        if (folder / "ckpt").is_dir():
            return Source(folder, int(step) if step and step != "best" else step)
    there = sorted(path.parent.name for path in Path(runs_dir).glob("*/ckpt"))
    known = f" (there: {one_line(', '.join(there), 100)})" if there else ""
    raise SetupError(
        f"{setting}: there is no run {shown(name)}{nearest(name, there)}{known}; name a run of "
        f"{runs_dir}, or its folder, such as a or a@300 or a@best."
    )
