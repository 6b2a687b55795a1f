"""What a run begins from: another's checkpoint by ``fork``, or weights by ``init_from``.

What cannot be begun from is refused before the new run has a folder.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from ctl_core.checkpoint.record import saved_steps
from ctl_core.run.errors import SetupError, one_line
from ctl_core.run.files import from_here
from ctl_core.run.settings import Config
from ctl_core.run.sources import read_file

_FORM = re.compile(r"(.+?)(?:@(\d{1,18}|best))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Source:
    """A run, and one of its checkpoints.

    Attributes:
        setting: that names it, for messages
        run: its folder
        wanted: the step of the checkpoint, or best for the one of ``keep_best``; None for the
            newest
    """

    setting: str
    run: Path
    wanted: int | str | None = None

    @property
    def folder(self) -> Path:
        """Where the checkpoint is kept."""
        return self.run / "ckpt" / "best" if self.wanted == "best" else self.run / "ckpt"

    def find_step(self) -> int:
        """Returns the step of the checkpoint.

        Raises:
            SetupError: there is none.
        """
        steps = saved_steps(self.folder)
        if isinstance(self.wanted, int):
            kind, found = f"checkpoint of step {self.wanted}", self.wanted
        else:
            kind = "checkpoint that keep_best keeps" if self.wanted else "checkpoint"
            found = next(iter(steps), -1)
        if found not in steps:
            there = ", ".join(map(str, steps[:10])) or "none"
            raise SetupError(
                f"{self.setting}: {from_here(self.run)} has no {kind} (there: {there})."
            )
        return found


def read_source(setting: str, text: str, runs_dir: str) -> Source:
    """Reads RUN, RUN@STEP or RUN@best, where RUN is the name of a run in ``runs_dir``, or a folder.

    Raises:
        SetupError: there is no such run.
    """
    name, step = _FORM.fullmatch(text).groups()  # type: ignore[union-attr]
    for folder in (Path(runs_dir) / name, Path(name)):
        if (folder / "ckpt").is_dir():
            return Source(setting, folder, int(step) if step and step != "best" else step)
    there = sorted(path.parent.name for path in Path(runs_dir).glob("*/ckpt"))
    names = one_line(", ".join(there) or "none", 100)
    others = ", or a .keras or .weights.h5 file" * (setting == "init_from")
    raise SetupError(
        f"{setting}: there is no run {name!r} (there: {names}); "
        f"name a run of {runs_dir}, or its folder, such as a or a@300 or a@best{others}."
    )


def find_sources(config: Config) -> dict[str, Source]:
    """Returns the runs that a new run begins from, by setting.

    Raises:
        SetupError: there is no such run or checkpoint.
    """
    texts = {"fork": config.fork, "init_from": config.init_from}
    found = {
        name: read_source(name, text, config.runs_dir)
        for name, text in texts.items()
        if text is not None and not (name == "init_from" and Path(text).is_file())
    }
    for source in found.values():
        source.find_step()
    return found


def has_begun(run: Path) -> bool:
    """Returns whether a run has checkpoints and settings of its own to go on with."""
    return bool(saved_steps(run / "ckpt")) and (run / "config.yaml").exists()


def check_start(config: Config) -> bool:
    """Refuses to begin a run from what is not there; one that has begun needs that no more.

    Returns:
        Whether it has begun.

    Raises:
        SetupError: there is no such run, checkpoint or file; or the run began otherwise.
    """
    run = Path(config.runs_dir, config.run_name) if config.run_name is not None else None
    if run is None or not has_begun(run):
        find_sources(config)
        return False
    began = read_file(run / "config.yaml").values.get("fork")
    if config.fork is not None and began != config.fork:
        how = "by itself" if began is None else f"from {began}"
        raise SetupError(
            f"fork: {from_here(run)} has checkpoints and began {how}, not from {config.fork}; "
            "choose another run_name."
        )
    return True


def from_anywhere(config: Config) -> Config:
    """Returns settings for another folder of runs, where a run begins from the same.

    Raises:
        SetupError: as ``check_start`` does.
    """
    if check_start(config):
        return dataclasses.replace(config, fork=None, init_from=None)
    places = {
        name: f"{source.run.absolute()}@{'best' if source.wanted == 'best' else source.find_step()}"
        for name, source in find_sources(config).items()
    }
    return dataclasses.replace(config, **places)  # type: ignore[arg-type]
