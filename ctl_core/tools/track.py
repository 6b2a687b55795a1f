"""``track``: logs runs to trackers afterwards, or goes on where that was cut short."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ctl_core.cli import find_run
from ctl_core.errors import SetupError, reason
from ctl_core.files import from_here
from ctl_core.layers import load_config
from ctl_core.run_process import held
from ctl_core.settings import tracker_names
from ctl_core.tools.named import parser_of, runs_dir_of
from ctl_core.tools.runs import look_at
from ctl_core.trackers.base import check_installed
from ctl_core.trackers.sender import Sender

# How often it is looked whether a run is still trained (seconds).
_POLL = 1.0


def track(argv: Sequence[str]) -> int:
    """Logs runs to trackers; what they have of one already is not sent again.

    A run that is being trained is followed until it has ended, after the others.

    Raises:
        SetupError: there is no such run, or a tracker cannot be used.
    """
    parser = parser_of("track", "Logs runs to trackers, afterwards or while they are trained.")
    parser.add_argument(
        "names", nargs="*", metavar="RUN", help="the runs, by their names; default: the newest"
    )
    parser.add_argument("--run-name", metavar="NAME", help="the same for one run")
    parser.add_argument("--to", metavar="NAMES", help="trackers; default: those of each run")
    parser.add_argument(
        "--anew", action="store_true", help="as a new run there, not where it was logged before"
    )
    options = parser.parse_args(argv)
    asked = dict.fromkeys([*options.names, *filter(None, [options.run_name])]) or [None]
    runs = [find_run(runs_dir_of(options.runs_dir), name).absolute() for name in asked]
    runs = sorted(runs, key=lambda folder: held(folder) is True)
    trackers = [_trackers_of(folder, options.to) for folder in runs]
    return max(
        _send(folder, names, options.anew) for folder, names in zip(runs, trackers, strict=True)
    )


def _trackers_of(folder: Path, to: str | None) -> list[str]:
    """Returns the trackers to log a run to: those of ``to``, or its own.

    Raises:
        SetupError: there are none, or one cannot be used.
    """
    try:
        names = load_config(folder / "config.yaml").trackers if to is None else tracker_names(to)
    except ValueError as error:
        raise SetupError(f"to: {error}" if str(error) else "to: name each tracker once.") from error
    if not names:
        raise SetupError(f"to: {from_here(folder)} was trained without trackers; name one.")
    for name in names:
        check_installed(name)
    return list(names)


def _send(folder: Path, names: list[str], anew: bool) -> int:
    """Logs one run; returns the exit code.

    Raises:
        SetupError: what was sent cannot be kept there, or a tracker cannot be used.
    """
    try:
        sender = Sender(folder, names, anew)
    except OSError as error:
        raise SetupError(
            f"{from_here(folder / 'trackers')}: cannot be written: {reason(error)}; log a copy of "
            "the run (--runs-dir)."
        ) from error
    try:
        trained = held(folder) is True
        sender.send(look_at(folder).step or 0, trained, _say, _warn)
        if trained:
            _say(f"{from_here(folder)}: is being trained; it is followed to its end.")
        while held(folder):
            time.sleep(_POLL)
        codes = sender.end(_warn, patience=None)
    except BaseException:
        sender.kill()
        raise
    for name, what in sender.sent.items():
        _say(f"{name}: {what}.")
    return max(codes)


def _say(text: str) -> None:
    print(text, flush=True)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
