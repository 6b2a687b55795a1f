"""A name whose run has not begun: its start failed before it had settings of its own.

What that start was given by flags stands in process.json. By its name alone the run begins with
them, as it would go on with its own settings later; a command that gives others is taken at its
word. Either is said in a line. A start that a setting refuses leaves nothing: see refused.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctl_core import run_process
from ctl_core.errors import one_line
from ctl_core.files import from_here
from ctl_core.layers import flat
from ctl_core.settings import label

# What a command line says of a start, or of where a run is: not of what the run computes.
_OF_A_START = (
    *("run_name", "runs_dir", "debug", "cluster", "wait_for_workers"),
    *("continue", "check", "then", "background", "tensorboard", "note"),
)


def words_of(given: Mapping[str, Any], hparams: Mapping[str, Any]) -> list[str]:
    """Returns flags that say the settings of a run again.

    Args:
        given: what the flags of a command say, as text, a list of texts or a bool, by name
        hparams: what those for hparams say
    """
    words: list[str] = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if name in _OF_A_START:
            continue
        if value in (True, "true") or value in (False, "false"):
            words.append(flag if value in (True, "true") else f"--no-{flag[2:]}")
            continue
        for text in value if isinstance(value, list) else [value]:
            words += _pair(flag, str(text))
    for name, value in flat(hparams).items():
        words += _pair(f"--hparams.{name}", value if isinstance(value, str) else json.dumps(value))
    return words


def _pair(flag: str, text: str) -> list[str]:
    return [f"{flag}={text}"] if text.startswith("-") or not text else [flag, text]


def look(folder: Path, words: Sequence[str]) -> tuple[list[str], str]:
    """Looks whether a start of this run has failed before, given other settings.

    Args:
        folder: of a run that has no settings of its own
        words: the flags of this start, as ``words_of`` has them

    Returns:
        The flags to begin with beside these, and a line for the user, or an empty text.
    """
    process = run_process.read_process(folder)
    before = process.flags if process is not None else []
    if not before or _without_workers(before) == _without_workers(words):
        return [], ""
    run, said = label(from_here(folder)), one_line(shlex.join(before), 300)
    if words:
        line = f"begins with the settings of this command, not with those of its last start: {said}"
        return [], f"{run}: has not begun yet; {line}"
    return before, f"{run}: has not begun yet; begins with the settings of its last start: {said}"


def _without_workers(words: Sequence[str]) -> list[str]:
    """Leaves out how many there are, which a supervisor says to each of its own."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if "--workers" not in (before, word)
    ]
