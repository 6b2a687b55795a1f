"""``sweep``: searches settings by many runs, each a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ctl_core.cluster.gpus import share_gpus, visible_gpus
from ctl_core.cluster.signals import INTERRUPTED
from ctl_core.errors import RunError, SetupError
from ctl_core.files import from_here
from ctl_core.metric_values import worded
from ctl_core.settings import nearest, shown
from ctl_core.sweep.jobs import Job
from ctl_core.sweep.plan import Plan, read_plan
from ctl_core.sweep.report import report, words_of
from ctl_core.sweep.study import SAMPLERS, Sweep
from ctl_core.tools.named import parser_of, runs_dir_of

# How often runs are looked at (seconds).
_POLL = 0.5
# So many runs that fail, and none that does not, end the sweep.
_HOPELESS = 3


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    found = parser_of("sweep", "Searches settings: each trial is a run, a process of its own.")
    found.add_argument("file", metavar="SWEEP.YAML", type=Path, help="metric, space, settings")
    found.add_argument("--trials", type=int, default=20, help="how many runs (default: 20)")
    found.add_argument("--jobs", type=int, default=1, help="how many at once (default: 1)")
    found.add_argument("--sampler", choices=SAMPLERS, default="tpe", help="default: tpe")
    found.add_argument("--seed", type=int, help="of the sampler")
    found.add_argument("--name", help="of the sweep, sweeps/NAME (default: the file's name)")
    found.add_argument(
        "--no-prune", action="store_true", help="let runs that are worse than most go on"
    )
    return found


def sweep(argv: Sequence[str]) -> int:
    """Runs trials until there are enough; started again, it goes on where it was."""
    options = parser().parse_args(argv)
    for name in ("trials", "jobs"):
        if getattr(options, name) < 1:
            raise SetupError(f"{name}: expected at least 1, got {getattr(options, name)}.")
    name = options.name or options.file.stem
    if not re.fullmatch(r"\w[\w.-]{0,79}", name):
        raise SetupError(f"name: expected letters, digits, '_', '-' and '.', got {shown(name)}.")
    plan = read_plan(options.file)
    environs = _shares(options.jobs)
    found = Sweep(Path("sweeps", name), plan, options.trials, options.sampler, options.seed)
    try:
        runner = _Runner(found, plan, runs_dir_of(options.runs_dir), environs)
        with _told():
            code = runner.run(prune=not options.no_prune)
    finally:
        found.close()
    return code


def _shares(jobs: int) -> list[dict[str, str]]:
    """Returns what each of the runs at once has of the GPUs, and of the cores where there are none.

    Raises:
        SetupError: the GPUs cannot be shared out.
    """
    gpus = visible_gpus(os.environ)
    if not gpus:
        cores = str(max(1, (os.cpu_count() or 1) // jobs))
        own = {"TF_NUM_INTRAOP_THREADS": cores, "OMP_NUM_THREADS": cores} if jobs > 1 else {}
        return [own] * jobs
    if len(gpus) < jobs or len(gpus) % jobs:
        raise SetupError(
            f"jobs: {jobs} runs at once cannot share {len(gpus)} GPU{'s' * (len(gpus) > 1)} "
            "evenly; take a number that divides it, or choose GPUs with CUDA_VISIBLE_DEVICES."
        )
    return [{"CUDA_VISIBLE_DEVICES": share} for share in share_gpus(gpus, jobs)]


class _Terminated(KeyboardInterrupt):
    """SIGTERM, after which runs are saved as after Ctrl-C."""


@contextlib.contextmanager
def _told() -> Iterator[None]:
    def raise_it(*_: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Runner:
    """Keeps as many runs going as are asked for."""

    def __init__(
        self, sweep: Sweep, plan: Plan, runs_dir: Path, environs: Sequence[dict[str, str]]
    ) -> None:
        self._sweep, self._plan, self._runs_dir = sweep, plan, runs_dir
        self._environs = environs
        terminal = Console(markup=False, highlight=False, emoji=False)
        self._live = (
            Live(console=terminal, auto_refresh=False, transient=True)
            if terminal.is_terminal
            else None
        )
        self._jobs: list[Job] = []
        self._failed = 0
        self._well = any(
            trial.state.name in ("COMPLETE", "PRUNED") for trial in sweep.last_of().values()
        )

    def run(self, prune: bool) -> int:
        """Returns the exit code: 0, 1 if no run came through, 130 after Ctrl-C."""
        try:
            with self._live or contextlib.nullcontext():
                more = True
                while more or self._jobs:
                    while more and len(self._jobs) < len(self._environs):
                        more = self._start()
                    for job in list(self._jobs):
                        self._watch(job, prune)
                    if self._live is not None:
                        self._live.update(self._table(), refresh=True)
                    if self._failed >= _HOPELESS and not self._well:
                        raise RunError(
                            f"sweep: {self._failed} runs failed, and none came through; the output "
                            f"of each is in {from_here(self._runs_dir)}/NAME/output.log."
                        )
                    if self._jobs:
                        time.sleep(_POLL)
        except KeyboardInterrupt as told:
            self._stop()
            print("stopped; the same command goes on with it.")
            return 143 if isinstance(told, _Terminated) else INTERRUPTED
        except BaseException:
            self._stop()
            raise
        report(self._sweep, self._plan)
        return 0 if self._well else 1

    def _table(self) -> Table:
        """Returns what runs now."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("running", "step", f"best {self._plan.metric}"):
            table.add_column(name, no_wrap=True)
        for job in self._jobs:
            step = "" if job.step is None else str(job.step)
            best = "" if job.best is None else worded({"": job.best}).strip()
            table.add_row(job.name, step, best)
        return table

    def _start(self) -> bool:
        """Starts one more run; returns whether there was one to start."""
        if (asked := self._sweep.ask()) is None:
            return False
        trial, name, settings = asked
        slot = min({*range(len(self._environs))} - {job.slot for job in self._jobs})
        job = Job(trial, self._runs_dir / name, settings, slot, self._plan)
        job.start(self._sweep.folder / "settings", self._environs[slot])
        self._jobs.append(job)
        print(f"{name}: {words_of(settings)}", flush=True)
        return True

    def _watch(self, job: Job, prune: bool) -> None:
        going = job.runs()
        names = job.look()
        if names and self._plan.metric not in names:
            raise SetupError(
                f"metric: no evaluation of {job.name} has {shown(self._plan.metric)}"
                f"{nearest(self._plan.metric, names)} (there: {', '.join(names)})"
            )
        if going:
            if prune and not job.pruned and job.best is not None and job.trial.should_prune():
                job.pruned = True
                job.stop()
            return
        self._jobs.remove(job)
        how, why = job.ended()
        value = job.best
        self._sweep.tell(job.trial, value, "fail" if how == "stopped" else how)
        self._well |= how in ("complete", "pruned")
        self._failed += how == "fail"
        measured = "" if value is None else f"  {self._plan.metric} {worded({'': value}).strip()}"
        at = "" if job.step is None else f" at step {job.step}"
        print(f"{job.name}: {how}{at}{measured}{f'  {why}' * bool(why)}", flush=True)

    def _stop(self) -> None:
        """Has all runs saved; their trials stay as they are, to go on."""
        for job in self._jobs:
            job.stop()
        if self._jobs and sys.stdout.isatty():
            print("waiting for the runs to be saved ...", flush=True)
        while any(job.runs() for job in self._jobs):
            time.sleep(_POLL)
