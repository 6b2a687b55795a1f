"""Kills a run again and again, and compares it with one that was never interrupted.

    python -m scripts.kill_test [--kills 100] [--workers 1|2] [--seed 0]

A small project (shuffling by a buffer, random augmentation, Dropout, BatchNorm, a hook at each
step) is trained once undisturbed. Then it is trained again, while it is killed with SIGKILL at
random moments: during imports, tracing, steps, evaluations, and while a checkpoint is written.
With 2 workers, one of them is killed and the supervisor starts both again; now and then it is the
supervisor itself. A run that gets to its end before all kills are spent is compared and followed
by another. Exit code 0: with ``--deterministic``, all of them are the same bit for bit.

The moments come from ``--seed``; what they hit depends on the machine. A kill costs a start, some
8 seconds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.killed_project import Failed, Project


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to kill: ``delay`` seconds after something has happened ``count`` times.

    Attributes:
        after: start, step, file (a new one of a checkpoint) or evaluation
    """

    after: str
    delay: float
    count: int = 1

    def wait(self, project: Project, run: str, begun: float, ended: Callable[[], bool]) -> bool:
        """Waits for the moment; returns whether it came before the run ended."""
        limit = begun + 900
        known, seen = project.files(run), 0
        while not ended():
            if time.time() > limit:
                raise Failed(f"{run} does not get on: {project.phase()}")
            phase = project.phase()
            if self.after == "file":
                now = project.files(run)
                seen, known = seen + len(now - known), now
            elif (
                self.after == "start"
                or (self.after == "step" and phase.startswith("after step"))
                or (self.after == "evaluation" and phase == "evaluating" and project.files(run))
            ):
                seen = self.count
            if seen >= self.count:
                due = begun + self.delay if self.after == "start" else time.time() + self.delay
                while time.time() < due and not ended():
                    time.sleep(min(0.01, max(due - time.time(), 0)))
                return not ended()
            time.sleep(0.002)
        return False


def moments(
    seed: int, startup: float, shares: tuple[int, ...] = (15, 20, 20, 35, 10)
) -> Iterator[Moment]:
    """Draws moments over everything that a run does.

    Args:
        seed: of the random numbers
        startup: how long a start takes (seconds)
        shares: of the kinds of moments, as they are named below
    """
    draw = random.Random(seed)
    while True:
        kind = draw.choices(("at once", "start", "step", "file", "evaluation"), shares)[0]
        if kind == "at once":  # after another kill: twice in a row
            yield Moment("start", draw.uniform(0, 0.1 * startup))
        elif kind == "start":
            yield Moment("start", draw.uniform(0, startup))
        elif kind == "step":
            yield Moment("step", draw.uniform(0, 1))
        elif kind == "file":
            yield Moment("file", draw.uniform(0, 0.01), draw.randint(1, 14))
        else:
            yield Moment("evaluation", draw.uniform(0, 0.1))


def train_and_kill(
    project: Project,
    plan: Iterator[Moment],
    kills: int,
    seed: int,
    say: Callable[[str], None],
    supervisor: float = 0.15,
) -> list[str]:
    """Trains runs ``killed-1``, ``killed-2``, ... until ``kills`` kills are spent.

    Args:
        project: what to train
        plan: when to kill
        kills: how often, over all runs
        seed: for the choice among several processes
        say: gets a line for each kill
        supervisor: how often it is a cluster's supervisor that is killed, as a share

    Returns:
        The names of the runs, each trained to its end.
    """
    draw = random.Random(f"victims {seed}")
    hit: collections.Counter[str] = collections.Counter()
    done = 0
    runs: list[str] = []
    while done < kills:
        run = f"killed-{len(runs) + 1}"
        runs.append(run)
        code = None
        while code is None:
            process = project.start(run, "--hparams.pause=0.02")
            try:
                while process.poll() is None and done < kills:
                    struck = _strike(project, run, process, next(plan), draw, supervisor)
                    if struck:
                        done += 1
                        hit[struck.split(": ")[-1].split(" step")[0]] += 1
                        say(f"kill {done} of {kills}, {run}, {struck}")
                code = process.wait(timeout=None if done >= kills else 600)
            finally:
                process.kill()
            code = None if code == -signal.SIGKILL else code
        project.expect_done(run, code)
    say("hit: " + ", ".join(f"{what} {count} times" for what, count in hit.most_common()))
    return runs


def _strike(
    project: Project,
    run: str,
    process: subprocess.Popen[bytes],
    moment: Moment,
    draw: random.Random,
    share: float,
) -> str | None:
    """Waits for the moment and kills; returns what was hit, None if the run ended before."""
    begun, ended = time.time(), lambda: process.poll() is not None
    supervisor = project.workers > 1 and draw.random() < share
    victims = {process.pid: "the supervisor" if supervisor else "the process"}
    if project.workers > 1 and not supervisor:
        victims = _workers(process.pid)
        while len(victims) < project.workers and not ended():
            time.sleep(0.01)
            victims = _workers(process.pid)
        begun = time.time()
    if not moment.wait(project, run, begun, ended):
        return None
    pid = draw.choice(sorted(victims))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    seconds = time.time() - begun
    # Those that share its fate are gone before the next ones start.
    while _of(process, pid, victims) and not ended():
        time.sleep(0.01)
    phase = project.phase()
    if (step := project.half_saved(run, begun)) is not None:
        phase = f"saving step {step}"
    for path in project.folder.glob("phase-*"):
        path.unlink()
    return f"{victims[pid]} {seconds:.1f} s after its start: {phase}"


def _of(process: subprocess.Popen[bytes], pid: int, victims: dict[int, str]) -> bool:
    if pid == process.pid:
        return True
    return any(worker in victims for worker in _workers(process.pid))


def _workers(supervisor: int) -> dict[int, str]:
    """The workers that run under a supervisor, by process id."""
    found = {}
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        for pid in children:
            with contextlib.suppress(OSError, StopIteration, ValueError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                text = next(item for item in environ if item.startswith(b"TF_CONFIG="))
                place = json.loads(text.partition(b"=")[2])
                found[int(pid)] = f"worker {place['task']['index']}"
    return found


def train_whole(project: Project, run: str) -> float:
    """Trains undisturbed; returns how long the start took (seconds)."""
    begun, process = time.time(), project.start(run)
    Moment("step", 0).wait(project, run, begun, lambda: process.poll() is not None)
    startup = time.time() - begun
    project.expect_done(run, process.wait())
    return startup


def kill_test(project: Project, kills: int, seed: int, say: Callable[[str], None]) -> None:
    """Does what the module promises.

    Raises:
        Failed: a run is not the same as the one that was never interrupted, or failed.
    """
    begun = time.time()
    startup = train_whole(project.make(), "whole")
    say(f"the whole took {time.time() - begun:.0f} s, {startup:.1f} s of it to start")
    runs = train_and_kill(project, moments(seed, startup), kills, seed, say)
    for run in runs:
        say(f"{run} equals the whole: {project.compare(run, 'whole')}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--workers", type=int, default=1, choices=(1, 2), help="processes")
    parser.add_argument("--steps", type=int, default=300, help="of a run (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--folder", type=Path, help="keep the project here (default: nowhere)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as nowhere:
        folder = (options.folder or Path(nowhere)).resolve()
        project = Project(folder, options.steps, options.workers)
        begun = time.time()
        try:
            kill_test(
                project,
                options.kills,
                options.seed,
                lambda text: print(f"{time.time() - begun:6.0f} s  {text}", flush=True),
            )
        except Failed as error:
            print(f"NOT the same: {error}")
            return 1
    print(f"the same bit for bit after {options.kills} kills.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
