"""``runs``, ``stop`` and ``logs``: what the runs of a project do, without TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from ctl_core import run_process, training_log
from ctl_core.errors import RunError, SetupError, one_line, reason
from ctl_core.files import from_here
from ctl_core.layers import read_value
from ctl_core.metric_values import numbers_of, parse_metrics, worded
from ctl_core.run_process import OUTPUT, WATCHED, Process, held, read_process
from ctl_core.run_state.record import Damaged, Record, read_record, saved_steps
from ctl_core.selection import is_highest, metric_in
from ctl_core.settings import nearest, shown
from ctl_core.tools.columns import Column, chosen, print_table
from ctl_core.tools.following import cut_short
from ctl_core.tools.named import find_folder, folders_in, parser_of, runs_dir_of

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
# What else than a metric runs are put in order by.
_ORDERS = ("age", "name", "step", "state")
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
        said: what stopped it or made it fail, or what it does after its training
        fork: the checkpoint of another run that it began from, as the setting has it, or None
        watched: whether a process evaluates its checkpoints as they come
    """

    name: str
    state: str
    step: int | None
    metrics: dict[str, float | None]
    started: float
    said: str
    fork: str | None = None
    watched: bool = False


def look_at(folder: Path) -> Found:
    """Finds out what a run does, by its lock, its process.json and its files."""
    process, record = read_process(folder), _record(folder)
    lines = parse_metrics(_tail(folder / "metrics.jsonl"))
    steps = [line["step"] for line in lines] + ([record.step] if record else [])
    values = next((line for line in reversed(lines) if line.get("split") == "eval"), None)
    values = values or (lines[-1] if lines else {})
    metrics = numbers_of(values)
    state, said = _state(folder, process, record)
    started = process.started if process else _changed(folder)
    step = max(steps, default=None)
    if process is not None and process.step is not None and state not in ("running", "starting"):
        step, metrics = process.step, process.metrics or metrics
    watched = run_process.locked(folder / WATCHED) is True
    return Found(folder.name, state, step, metrics, started, one_line(said), _fork(folder), watched)


def _state(folder: Path, process: Process | None, record: Record | None) -> tuple[str, str]:
    locked = held(folder)
    if locked:
        return "running", ""
    if process is None:
        if locked is None:
            return "unknown", "there are no locks here to tell"
        if record is not None and record.ended is not None:
            return "ended", ""
        last = _setting(folder, "steps")
        if record is not None and isinstance(last, int) and record.step >= last:
            return "done", ""
        damaged = (folder / run_process.FILE).exists()
        return ("unknown", f"its {run_process.FILE} is damaged") if damaged else ("stopped", "")
    if process.how is not None and process.following is None:
        return process.how, process.line
    if process.alive():
        if process.following is not None:
            return "running", f"{process.how}; {process.following} follows"
        return ("starting" if locked is False else "running"), ""
    if locked is None and not process.here:
        return "unknown", f"on {process.host}, and there are no locks here to tell"
    if not process.here and not (folder / "train.log").exists():
        return "unknown", f"on {process.host}"
    if process.following is not None:
        return "killed", f"in {process.following}, after the training"
    if not process.here:
        return "killed", f"on {process.host}"
    if process.background and (error := _error(folder / OUTPUT, process.started)):
        return "failed", error
    return "killed", ""


def _fork(folder: Path) -> str | None:
    value = _setting(folder, "fork")
    return value if isinstance(value, str) else None


def _setting(folder: Path, name: str) -> Any:
    """Returns one setting of a run; its whole config.yaml would take a while to read."""
    with contextlib.suppress(OSError, SetupError):
        text = (folder / "config.yaml").read_text(errors="replace")
        line = re.search(rf"^{name}: .*$", text, re.M)
        return read_value(line[0].removeprefix(f"{name}: ")) if line else None
    return None


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
    """Returns when a run was started last, by env.json, or else by when its files were written."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        started = json.loads((folder / "env.json").read_text())["started"]
        return datetime.datetime.strptime(started, "%Y-%m-%dT%H:%M:%S%z").timestamp()
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
    parser.add_argument(
        "--sort",
        default="age",
        metavar="BY",
        help="age, name, step, state, or a metric: the best first (METRIC:max or METRIC:min where "
        "its name does not say which is better); default: age",
    )
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for scripts")
    options = parser.parse_args(argv)
    found = [look_at(folder) for folder in folders_in(options.runs_dir)]
    found = _in_order(found, options.sort, options.reverse)
    found = [run for run in found if options.state in (None, run.state)]
    if options.json:
        for run in found:
            print(json.dumps(dataclasses.asdict(run)))
    elif not found:
        what = f" in the state {options.state}" if options.state else ""
        print(f"{from_here(runs_dir_of(options.runs_dir))}: no runs there{what}.")
    else:
        _print_table(found, metric_in(options.sort)[0])
    return 0


def _in_order(found: Sequence[Found], by: str, reverse: bool) -> list[Found]:
    """Returns runs in an order; those that do not have what it is of come last either way.

    Args:
        found: the runs
        by: the last started or the highest step first; names and states by the alphabet; of a
            metric the best first
        reverse: the other way round

    Raises:
        SetupError: no run has the metric, or it is not clear which way is better.
    """
    values: list[Any] = [run.name for run in found]
    highest = by in ("age", "step")
    if by in _ORDERS:
        key = {"age": "started"}.get(by, by)
        values = [getattr(run, key) for run in found]
    elif found:
        metric, mode = metric_in(by)
        there = sorted({name for run in found for name in run.metrics})
        if metric not in there:
            raise SetupError(
                f"sort: no run has a metric {shown(metric)}{nearest(metric, [*_ORDERS, *there])} "
                f"(there: {', '.join([*_ORDERS, *there])})"
            )
        highest = is_highest("sort", metric, mode)
        values = [run.metrics.get(metric) for run in found]
    known = [pair for pair in zip(values, found, strict=True) if pair[0] is not None]
    known.sort(key=lambda pair: pair[0], reverse=highest != reverse)
    return [run for _, run in known] + [
        run for value, run in zip(values, found, strict=True) if value is None
    ]


def _print_table(found: Sequence[Found], sort: str) -> None:
    """Prints the runs; the metric that they are sorted by comes first, and has the first room."""
    by_metric = any(sort in run.metrics for run in found)

    def words(run: Found) -> str:
        rest = dict(run.metrics)
        first = worded({sort: rest.pop(sort)}) if sort in rest else ""
        marks = [f"fork of {run.fork}" if run.fork else "", "watched" if run.watched else ""]
        return "  ".join(filter(None, (first, *marks, one_line(run.said, 100), worded(rest))))

    cells = [words(run) for run in found]
    pair = max(cell_len(part) for cell in cells for part in cell.split("  "))
    now = time.time()
    columns = [
        Column("run", [run.name for run in found]),
        Column("state", [run.state for run in found]),
        Column("step", ["" if run.step is None else str(run.step) for run in found], right=True),
        Column("age", [age_of(now - run.started) for run in found], right=True),
        Column("metrics", cells, least=min(pair, 20)),
    ]
    order = (
        ("metrics", "state", "step", "age") if by_metric else ("state", "step", "metrics", "age")
    )
    print_table(chosen(columns, order))


def age_of(seconds: float) -> str:
    """Returns a time as a person says it: ``5 min``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def stop(argv: Sequence[str]) -> int:
    """Stops a run by SIGTERM, and waits until it is saved; one of a program by SIGINT."""
    parser = parser_of("stop", "Stops a run, which is saved, and waits for that.", name=True)
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait (default: 300)",
    )
    options = parser.parse_args(argv)
    if not 0 <= options.timeout < 1e9:
        raise SetupError(f"timeout: expected seconds from 0 up, got {options.timeout:g}.")
    folder = find_folder(options.runs_dir, options.name)
    name, run, process = from_here(folder), look_at(folder), read_process(folder)
    if process is None and held(folder) is False:
        raise SetupError(f"{name}: is not running; there is nothing to stop.")
    if run.state not in ("running", "starting", "unknown"):
        where = ""
        if run.state == "killed" and process is not None and not process.here:
            where = f" here; if it goes on on {process.host}, stop it there"
        raise SetupError(
            f"{name}: is not running, but {run.state}; there is nothing to stop{where}."
        )
    if process is not None and not process.here:
        raise SetupError(f"{name}: runs on {process.host}; stop it there.")
    if process is None or not process.alive():
        why = "another machine's or container's, or an earlier engine's"
        if process is None and (folder / run_process.FILE).exists():
            why = f"its {run_process.FILE} is damaged"
        raise SetupError(
            f"{name}: is trained, but not by a process that can be seen here ({why}); stop it "
            "where it was started."
        )
    if process.at_work:  # else it is about to end
        try:
            # In a program, such as a notebook's kernel, what comes too late is to end nothing.
            os.kill(process.pid, signal.SIGINT if process.program else signal.SIGTERM)
        except OSError as error:
            raise SetupError(f"{name}: process {process.pid}: {one_line(error)}.") from error
    until = time.monotonic() + options.timeout
    while _goes_on(folder, process):
        if time.monotonic() > until:
            raise RunError(
                f"{name}: has been told to stop, and has not ended after {options.timeout:g} s; it "
                f"goes on stopping (process {process.pid})."
            )
        time.sleep(_POLL)
    return _stopped(folder, name, process)


def _goes_on(folder: Path, process: Process) -> bool:
    """Whether a process that was told to stop has not done so; a program has when its run has."""
    if held(folder):  # its threads let go of the lock a moment later
        return True
    if not process.alive():
        return False
    now = read_process(folder)
    return not process.program or now is None or now.at_work


def _stopped(folder: Path, name: str, process: Process) -> int:
    """Says what has become of a run that was stopped."""
    run, now = look_at(folder), read_process(folder)
    at = f" at step {run.step}" if run.step is not None else ""
    if run.state == "killed" and now is not None and now.following is not None:
        print(f"{name}: {now.how}{at}; {now.following}, which followed, was stopped.")
        cut_short(folder, "SIGTERM")
        return 0
    if run.state == "killed":  # by the signal, before there was anything to save or to say
        if (ended := run_process.end(folder, "stopped")) is not None:
            training_log.complete(folder, ended)
        print(f"{name}: stopped before its first step.")
        return 0
    if run.state in ("failed", "diverged"):
        raise RunError(f"{name}: {run.state}{at} while it was to stop. {run.said}".rstrip())
    if run.state == "stopped":
        print(f"{name}: stopped{at}, saved; goes on with --run-name {folder.name}")
        if process.program and process.alive():
            print(f"The program that trained it, or notebook, goes on (process {process.pid}).")
    else:
        print(f"{name}: {run.state}{at}.")
    return 0


def logs(argv: Sequence[str]) -> int:
    """Prints what a run has printed, or its log; with ``-f``, goes on until it has ended."""
    parser = parser_of("logs", "Prints what a run has said.", name=True)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    parser.add_argument(
        "-n", "--lines", type=int, metavar="N", help="only so many of the last lines"
    )
    options = parser.parse_args(argv)
    if options.lines is not None and options.lines < 0:
        raise SetupError(f"lines: expected a whole number from 0 up, got {options.lines}.")
    folder = find_folder(options.runs_dir, options.name)
    there = [path for path in (folder / OUTPUT, folder / "train.log") if path.is_file()]
    process = read_process(folder)
    background = process is not None and process.background
    if not there:
        raise SetupError(f"{from_here(folder)}: has no log yet.")
    path = there[0] if background else there[-1]
    try:
        file = path.open("rb")
    except OSError as error:
        raise SetupError(f"{from_here(path)}: cannot be read: {reason(error)}.") from error
    with file:
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
