"""What a run begins from: another's checkpoint by ``fork``, or weights by ``init_from``.

What cannot be begun from is refused before the new run has a folder.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from ctl_core.errors import SetupError, one_line
from ctl_core.files import from_here
from ctl_core.run_state.record import Damaged, Record, read_record, saved_steps
from ctl_core.settings import Config, nearest, read_file, shown

# Stands beside a checkpoint that was copied, until the run has settings of its own.
NOT_BEGUN = "forking"
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


def check_start(config: Config) -> None:
    """Refuses to begin a run from what is not there; one that has begun needs that no more.

    Raises:
        SetupError: there is no such run, checkpoint or file; or the run began otherwise.
    """
    if (run := _begun(config)) is not None:
        began = read_file(run / "config.yaml", required=False).values.get("fork")
        if config.fork is not None and began != config.fork:
            how = "by itself" if began is None else f"from {began}"
            raise SetupError(
                f"fork: {from_here(run)} has checkpoints and began {how}, not from {config.fork}; "
                "choose another run_name."
            )
        return
    if config.fork is not None:
        record_of("fork", read_source("fork", config.fork, config.runs_dir))
    if config.init_from is not None and not _is_weights(config.init_from):
        record_of("init_from", read_source("init_from", config.init_from, config.runs_dir))


def _begun(config: Config) -> Path | None:
    """Returns the folder of the run, if it has a checkpoint of its own to go on with."""
    if config.run_name is None:
        return None
    run = Path(config.runs_dir, config.run_name)
    own = saved_steps(run / "ckpt" / "engine") and not (run / "ckpt" / NOT_BEGUN).exists()
    return run if own else None


def from_anywhere(config: Config) -> Config:
    """Returns settings for another folder of runs, where a run begins from the same.

    Raises:
        SetupError: as ``check_start`` does.
    """
    check_start(config)
    if _begun(config) is not None:
        return dataclasses.replace(config, fork=None, init_from=None)
    places: dict[str, Any] = {}
    for name, text in (("fork", config.fork), ("init_from", config.init_from)):
        if text is not None and (name == "fork" or not _is_weights(text)):
            source = read_source(name, text, config.runs_dir)
            step = "" if source.step is None else f"@{source.step}"
            places[name] = f"{source.run.absolute()}{step}"
    return dataclasses.replace(config, **places)


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
    others = ", a .keras or .weights.h5 file, or a SavedModel" * (setting == "init_from")
    raise SetupError(
        f"{setting}: there is no run {shown(name)}{nearest(name, there)}{known}; name a run of "
        f"{runs_dir}, or its folder, such as a or a@300 or a@best{others}."
    )


def record_of(setting: str, source: Source) -> Record:
    """Returns the record of the checkpoint that is meant.

    Raises:
        SetupError: there is none, or it cannot be read.
    """
    engine, where = source.folder / "engine", from_here(source.run)
    steps = saved_steps(engine)
    step = source.step if isinstance(source.step, int) else next(iter(steps), None)
    if step not in steps:
        there = ", ".join(map(str, steps[:10])) or "none"
        words = {None: "any step", "best": "its best step"}.get(source.step, f"step {source.step}")  # type: ignore[arg-type]
        raise SetupError(f"{setting}: {where} has no checkpoint of {words} (there: {there}).")
    assert step is not None
    try:
        return read_record(engine, step)
    except Damaged as error:
        why = f"the checkpoint of step {step} is damaged: {error}"
        raise SetupError(f"{setting}: {where}: {why}.") from error


def _is_weights(text: str) -> bool:
    """Whether weights are named otherwise than by a run: by a file, or a SavedModel."""
    return Path(text).is_file() or saved_model(text) is not None


def saved_model(text: str) -> Path | None:
    """Returns the folder of a SavedModel; of what export writes, that of the newest version."""
    folder = Path(text)
    versions = [part.parent for part in folder.glob("*/saved_model.pb")]
    if numbers := [int(part.name) for part in versions if part.name.isdecimal()]:
        folder /= str(max(numbers))
    return folder if (folder / "saved_model.pb").is_file() else None
