"""``runs``, ``stop`` and ``logs``: what the runs of a project do, without TensorFlow."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from ctl_core.errors import RunError, SetupError, one_line
from ctl_core.files import from_here
from ctl_core.layers import environment, read_file
from ctl_core.metric_values import parse_metrics, worded
from ctl_core.run_process import OUTPUT, Process, held, read_process
from ctl_core.run_state.record import Damaged, Record, read_record, saved_steps
from ctl_core.settings import Config, nearest, shown

STATES = (
    "starting",
    "running",
    "done",
    "ended",
    "stopped",
    "diverged",
    "failed",
    "killed",
    "unknown",
)
# Of a file's end, how much is read for its last lines (bytes).
_TAIL = 1 << 16
# How often a log or a process is looked at (seconds).
_POLL = 0.2


@dataclasses.dataclass
class Found:
    """A run and what it does.

    Attributes:
        name: of its folder
        state: one of ``STATES``
        step: the last one known of, or None
        metrics: the values of the last evaluation, or of the last training values
        started: seconds since 1970
        said: what stopped it or made it fail
    """

    name: str
    state: str
    step: int | None
    metrics: dict[str, float | None]
    started: float
    said: str


def look_at(folder: Path) -> Found:
    """Finds out what a run does, by its lock, its process.json and its files."""
    process, record = read_process(folder), _record(folder)
    lines = parse_metrics(_tail(folder / "metrics.jsonl"))
    steps = [line["step"] for line in lines] + ([record.step] if record else [])
    values = next((line for line in reversed(lines) if line.get("split") == "eval"), None)
    values = values or (lines[-1] if lines else {})
    metrics = {name: value for name, value in values.items() if name not in ("step", "split")}
    state, said = _state(folder, process, record)
    started = process.started if process else _changed(folder)
    step = max(steps, default=None)
    if process is not None and process.step is not None and state not in ("running", "starting"):
        step, metrics = process.step, process.metrics or metrics
    return Found(folder.name, state, step, metrics, started, one_line(said))


def _state(folder: Path, process: Process | None, record: Record | None) -> tuple[str, str]:
    locked = held(folder)
    if locked:
        return "running", ""
    if process is None:
        if locked is None:
            return "unknown", "there are no locks here to tell"
        return ("ended" if record and record.ended is not None else "stopped"), ""
    if process.how is not None:
        return process.how, process.line
    if process.alive():
        return ("starting" if locked is False else "running"), ""
    if locked is None and not process.here:
        return "unknown", f"on {process.host}, and there are no locks here to tell"
    if not process.here and not (folder / "train.log").exists():
        return "unknown", f"on {process.host}"
    if process.background and (error := _error(folder / OUTPUT, process.started)):
        return "failed", error
    return "killed", ""


def _error(output: Path, since: float) -> str:
    """Returns the last line of a run's output if it says an error of this start."""
    if not output.is_file() or output.stat().st_mtime < since - 1:
        return ""
    lines = _tail(output).rstrip().splitlines()
    found = re.match(r"error: (.+)", lines[-1]) if lines else None
    return found[1] if found else ""


def _record(folder: Path) -> Record | None:
    engine = folder / "ckpt" / "engine"
    for step in saved_steps(engine)[:1]:
        try:
            return read_record(engine, step)
        except (Damaged, OSError, SetupError):
            return None
    return None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _changed(folder: Path) -> float:
    times = [
        path.stat().st_mtime
        for path in (folder / "config.yaml", folder / "train.log", folder)
        if path.exists()
    ]
    return times[0] if times else 0.0


def runs(argv: Sequence[str]) -> int:
    """Prints a table of the runs, the newest last started first."""
    parser = parser_of("runs", "Lists the runs, the last started first.")
    parser.add_argument("--state", choices=STATES, help="only those of this state")
    parser.add_argument("--sort", default="age", help="age, name, step, state, or a metric's name")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for scripts")
    options = parser.parse_args(argv)
    found = [look_at(folder) for folder in _folders(options.runs_dir)]
    if options.sort not in ("age", "name", "step", "state"):
        known = sorted({name for run in found for name in run.metrics})
        if found and options.sort not in known:
            raise SetupError(
                f"sort: no run has a metric {shown(options.sort)}{nearest(options.sort, known)} "
                f"(there: age, name, step, state, {', '.join(known)})"
            )
    found = [run for run in found if options.state in (None, run.state)]
    found.sort(key=_order(options.sort))
    if options.json:
        for run in found:
            print(json.dumps(dataclasses.asdict(run)))
    elif not found:
        what = f" in the state {options.state}" if options.state else ""
        print(f"{from_here(runs_dir_of(options.runs_dir))}: no runs there{what}.")
    else:
        _print_table(found)
    return 0


def _order(sort: str) -> Callable[[Found], Any]:
    if sort == "age":
        return lambda run: -run.started
    if sort == "step":
        return lambda run: -(run.step if run.step is not None else -1)
    if sort in ("name", "state"):
        return lambda run: (getattr(run, sort), run.name)
    return lambda run: (run.metrics.get(sort) is None, run.metrics.get(sort) or 0.0)


def _print_table(found: Sequence[Found]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state")
    table.add_column("step", justify="right")
    table.add_column("age", justify="right")
    table.add_column("metrics", overflow="fold")
    for run in found:
        step = "" if run.step is None else str(run.step)
        text = "  ".join(filter(None, (run.said, worded(run.metrics))))
        table.add_row(run.name, run.state, step, _age(time.time() - run.started), text)
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000  # a pipe has no width: one line a run
    console.print(table, soft_wrap=False)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def stop(argv: Sequence[str]) -> int:
    """Stops a run as Ctrl-C does, and waits until it is saved."""
    parser = parser_of("stop", "Stops a run, which is saved, and waits for that.", name=True)
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="how long to wait (seconds; default: 300)"
    )
    options = parser.parse_args(argv)
    if not 0 <= options.timeout < 1e9:
        raise SetupError(f"timeout: expected seconds from 0 up, got {options.timeout:g}.")
    folder = _folder(options.runs_dir, options.name)
    name, run, process = from_here(folder), look_at(folder), read_process(folder)
    if run.state not in ("running", "starting", "unknown"):
        raise SetupError(f"{name}: is not running, but {run.state}; there is nothing to stop.")
    if process is not None and not process.here:
        raise SetupError(f"{name}: runs on {process.host}; stop it there.")
    if process is None or process.ended is not None or not process.alive():
        raise SetupError(
            f"{name}: is trained, but not by a process that can be seen here (another machine's or "
            "container's, or an earlier engine's); stop it where it was started."
        )
    try:
        os.kill(process.pid, signal.SIGTERM)
    except OSError as error:
        raise SetupError(f"{name}: process {process.pid}: {one_line(error)}.") from error
    until = time.monotonic() + options.timeout
    while process.alive() or held(folder):  # its threads let go of the lock a moment later
        if time.monotonic() > until:
            raise RunError(
                f"{name}: has been told to stop, and has not ended after {options.timeout:g} s; it "
                f"goes on stopping (process {process.pid})."
            )
        time.sleep(_POLL)
    run = look_at(folder)
    at = f" at step {run.step}" if run.step is not None else ""
    if run.state in ("failed", "diverged"):
        raise RunError(f"{name}: {run.state}{at} while it was to stop. {run.said}".rstrip())
    if run.state == "stopped":
        print(f"{name}: stopped{at}, saved; goes on with --run-name {folder.name}")
    elif run.state == "killed":  # by the signal, before there was anything to save
        print(f"{name}: stopped before its first step.")
    else:
        print(f"{name}: {run.state}{at}.")
    return 0


def logs(argv: Sequence[str]) -> int:
    """Prints what a run has printed, or its log; with ``-f``, goes on until it has ended."""
    parser = parser_of("logs", "Prints what a run has said.", name=True)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    parser.add_argument("-n", "--lines", type=int, help="only so many of the last lines")
    options = parser.parse_args(argv)
    if options.lines is not None and options.lines < 0:
        raise SetupError(f"lines: expected a whole number from 0 up, got {options.lines}.")
    folder = _folder(options.runs_dir, options.name)
    there = [path for path in (folder / OUTPUT, folder / "train.log") if path.is_file()]
    process = read_process(folder)
    background = process is not None and process.background
    if not there:
        raise SetupError(f"{from_here(folder)}: has no log yet.")
    with (there[0] if background else there[-1]).open("rb") as file:
        text = file.read()
        if options.lines is not None:
            text = b"".join(text.splitlines(keepends=True)[-options.lines or len(text) :])
        _put(text)
        while options.follow:
            going = look_at(folder).state in ("running", "starting")
            _put(file.read())
            if not going:
                break
            time.sleep(_POLL)
    return 0


def _put(text: bytes) -> None:
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SetupError(f"{self.prog.split()[-1]}: {one_line(message)}.")


def parser_of(command: str, text: str, name: bool = False) -> argparse.ArgumentParser:
    """Returns the parser of a command about runs; its errors are ours."""
    parser = _Parser(prog=f"ctl_core {command}", description=text, allow_abbrev=False)
    if name:
        parser.add_argument("name", metavar="NAME", help="of the run")
    help_ = "folder that holds the runs (default: that of config.yaml)"
    parser.add_argument("--runs-dir", type=Path, default=None, metavar="FOLDER", help=help_)
    parser.add_argument("--debug", action="store_true", help="full tracebacks")
    return parser


def runs_dir_of(given: Path | None) -> Path:
    """Returns the folder of the runs: as given, or as variable or config.yaml say."""
    if given is not None:
        return given
    env, named = environment(os.environ)
    value = Config().runs_dir
    for path in named or ["config.yaml"]:
        value = read_file(Path(path), required=bool(named)).get("runs_dir", ("", value))[1]
    return Path(str(env.get("runs_dir", ("", value))[1]))


def _folders(given: Path | None) -> list[Path]:
    folder = runs_dir_of(given)
    if given is not None and not folder.is_dir():
        raise SetupError(f"runs_dir: {shown(str(folder))} is no folder.")
    marks = ("config.yaml", "process.json", "train.log")
    return sorted({path.parent for mark in marks for path in folder.glob(f"[!.]*/{mark}")})


def _folder(given: Path | None, name: str) -> Path:
    folders = {folder.name: folder for folder in _folders(given)}
    if name not in folders:
        there = f" (there: {one_line(', '.join(sorted(folders)), 100)})" if folders else ""
        raise SetupError(
            f"no run {shown(name)} in {from_here(runs_dir_of(given))}"
            f"{nearest(name, folders)}{there}"
        )
    return folders[name]
