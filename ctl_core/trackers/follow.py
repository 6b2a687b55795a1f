"""The process that logs a run to one tracker, while it is trained or afterwards.

It reads what training writes, metrics.jsonl and the summaries, and how training ended: one that is
killed is logged to its last line, and the tracker finished. ``sender.py`` starts it, as ``python -m
ctl_core.trackers.follow``, says where the run begins, and closes its standard input when no more
comes. What the tracker itself prints goes to trackers/NAME.log in the run folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ctl_core.errors import CtlError, brief
from ctl_core.layers import load_config
from ctl_core.metric_values import PROGRESS, parse_metrics
from ctl_core.run_process import read_process
from ctl_core.trackers.base import Refused, Status, Tracked, Tracker, find_tracker, line_in
from ctl_core.trackers.events import Picture, Pictures
from ctl_core.trackers.sent import Left, Mark, Sent, fingerprint
from ctl_core.training_log import note_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# How often the files are looked at (seconds).
POLL = 0.5
# After a failure, how long until the next try (seconds).
RETRY = 30.0
# How long the process of an earlier start may take to end (seconds).
EARLIER = 20.0
# Lines and pictures between two times that it is written down how far the tracker has come.
MANY = 500

# Says something to whoever has started the process: (ready, refused, warning or said; text).
Tell = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of metrics.jsonl, or of progress.jsonl, whose split is ``progress``.

    Attributes:
        step, split, values: as it has them; NaN for a value that was not finite
        order: the highest step up to here, by which pictures come in between
        mark: the place behind it, in metrics.jsonl
    """

    step: int
    split: str
    values: dict[str, float]
    order: int
    mark: Mark | None = None


class Follower:
    """Logs one run to one tracker."""

    def __init__(
        self,
        folder: Path,
        name: str,
        step: int,
        more: bool,
        sizes: Mapping[str, int] | None,
        tell: Tell,
        over: Callable[[], bool],
    ) -> None:
        """
        Args:
            folder: of the run
            name: of the tracker
            step: where the run begins or goes on
            more: whether anything is about to be written there
            sizes: of the files of summaries when it began or went on there, if that is known
            tell: says how it goes
            over: whether nothing more will be written
        """
        self._folder, self._name, self._step, self._more = folder, name, step, more
        self._sizes = sizes
        self._tell, self._over = tell, over
        self._path = folder / "trackers" / f"{name}.json"
        self._sent = Sent.read(self._path)
        self._waiting: list[Line | Picture] = []
        self._later: list[Line] = []
        self._warned, self._has_all, self._noted = False, False, True
        self._logged = ""
        self._counts = [0, 0]
        self._look_again()

    def _look_again(self) -> None:
        """Reads the run's files from their beginnings."""
        self._left = Left(self._sent)
        self._lines = Lines(self._folder / "metrics.jsonl")
        self._progress = Lines(self._folder / PROGRESS)
        self._later = []
        self._pictures = Pictures(self._folder / "tb")
        self._damaged, self._order = 0, -1

    def follow(self, tracker: Tracker, anew: bool = False) -> bool:
        """Logs what there is and what comes, until the run is over.

        Args:
            tracker: that has not been started
            anew: whether the run begins anew there

        Returns:
            Whether everything was logged.

        Raises:
            Refused: the tracker cannot be used.
        """
        done = started = self._trying(lambda: self._start(tracker, anew))
        if started and self._has_all:
            return True
        over = not started
        while not over:
            over = self._over()  # before looking: what is there then is all
            done = self._trying(functools.partial(self._send, tracker, over), once=over)
            if not over:
                time.sleep(POLL)
        if started and self._finish(tracker) and done:
            lines, pictures = self._counts
            self._tell("sent", f"{_many(lines, 'line')} and {_many(pictures, 'picture')} sent")
            return True
        self._tell(
            "warning",
            f"{self._name} has not got everything; python -m ctl_core track --run-name "
            f"{self._folder.name} --to {self._name} sends the rest.",
        )
        return False

    def _trying(self, action: Callable[[], None], once: bool = False) -> bool:
        """Does something, again and again where it fails, until the run is over.

        Returns:
            Whether it was done.
        """
        while True:
            try:
                action()
                return True
            except Refused:
                raise
            except Exception as error:
                self._warn(error)
            if once or self._over():
                return False
            until = time.monotonic() + RETRY
            while time.monotonic() < until and not self._over():
                time.sleep(POLL)

    def _warn(self, error: Exception) -> None:
        """Says the first failure; all are in the tracker's log, with a traceback if they differ."""
        where = line_in(error)
        said = f"{brief(error)}{where}"
        print(time.strftime("%F %T"), said, file=sys.stderr, flush=True)
        if said != self._logged:
            self._logged = said
            traceback.print_exception(error)
            sys.stderr.flush()
        if not self._warned:
            self._warned = True
            self._tell(
                "warning",
                f"{self._name}: {brief(error, 160).rstrip('.')}{where}; training is not affected, "
                "and what is missing is sent when that works.",
            )

    def _start(self, tracker: Tracker, anew: bool) -> None:
        """Starts the tracker where it was, or anew."""
        settings = dataclasses.asdict(load_config(self._folder / "config.yaml"))
        now = fingerprint(self._folder, settings)
        lines, sent = self._lines.new(), self._sent
        again = self._left.begin(lines)
        if anew or (again and sent.fingerprint != now):
            if not anew:
                self._tell(
                    "said",
                    f"{self._name}: what it has of later steps was made with other settings or "
                    f"hooks; the run begins anew there, and {sent.id} stays as it is.",
                )
            sent = Sent(project=sent.project)
            self._left = Left(sent)
        waiting: list[Line | Picture] = [
            *self._read(lines[self._left.number :]),
            *self._first_pictures(sent),
        ]
        if sent.closed and not self._more and not waiting:
            self._has_all = True
            self._tell("ready", "has everything already")
            return
        sent.project = sent.project or Path.cwd().name or "training"
        run = Tracked(
            name=self._folder.name,
            folder=self._folder,
            project=sent.project,
            id=sent.id,
            finished=sent.closed,
            step=self._step,
            note=note_of(self._folder),
            env=_env(self._folder),
        )
        try:
            sent.id = tracker.start(settings, run)
        except BaseException:
            self._look_again()
            raise
        sent.fingerprint, sent.closed = now, False
        self._sent, self._waiting = sent, waiting
        self._sent.write(self._path)
        self._tell("ready", str(getattr(tracker, "where", "") or ""))

    def _first_pictures(self, sent: Sent) -> list[Picture]:
        """Returns the pictures that are there; of a step that was taken twice, the later one.

        Those of later steps than the run had are of steps that are taken again.
        """
        known = self._sizes is not None or not self._more
        last = {
            (picture.name, picture.step): picture
            for picture in self._pictures.new(self._sizes)
            if picture.step > sent.pictures.get(picture.name, -1)
            and (picture.step <= self._step or not known)
        }
        return list(last.values())

    def _send(self, tracker: Tracker, over: bool) -> None:
        """Sends what there is; what fails stays for the next time."""
        self._waiting += self._read(self._lines.new())
        self._waiting += self._read_progress(over)
        self._waiting += self._pictures.new()
        self._waiting.sort(key=lambda one: one.order if isinstance(one, Line) else one.step)
        flush = getattr(tracker, "flush", lambda: None)
        number = 0
        while self._waiting:
            one = self._waiting[0]
            if isinstance(one, Line):
                tracker.log(one.step, one.split, one.values)
                if one.mark is None:
                    self._sent.progress = one.step
                else:
                    self._sent.add(one.step, one.mark)
                    self._counts[0] += 1
            elif one.step > self._sent.pictures.get(one.name, -1):
                if image := getattr(tracker, "image", None):
                    image(one.step, one.name, one.png)
                    self._counts[1] += 1
                self._sent.pictures[one.name] = one.step
            self._waiting.pop(0)
            number += 1
            self._noted = False
            if number % MANY == 0:
                flush()
                self._note(tracker)
        if not self._noted:
            flush()
            self._note(tracker)

    def _read(self, lines: list[str]) -> list[Line]:
        """Returns those of the next lines that are to be sent."""
        found = []
        for line in lines:
            try:
                values = json.loads(line)
                step, split = int(values.pop("step")), str(values.pop("split"))
                numbers = {name: math.nan if x is None else float(x) for name, x in values.items()}
            except (ValueError, TypeError, KeyError, AttributeError):
                self._damaged += 1
                self._left.next(line, -1)
                continue
            self._order = max(self._order, step)
            if mark := self._left.next(line, step):
                found.append(Line(step, split, numbers, self._order, mark))
        return found

    def _read_progress(self, over: bool) -> list[Line]:
        """Returns the next lines of progress.jsonl, but those that metrics.jsonl is not as far as.

        A line is on the disk before the metrics of its step, so that all come in their order.
        """
        for line in parse_metrics("\n".join(self._progress.new())):
            step = line.pop("step")
            line.pop("seconds", None)
            values = {n: math.nan if x is None else x for n, x in line.items()}
            last = self._later[-1].step if self._later else self._sent.progress
            if values and step > last:
                self._later.append(Line(step, "progress", values, step))
        now = [line for line in self._later if over or line.step <= self._order]
        self._later = self._later[len(now) :]
        return now

    def _note(self, tracker: Tracker) -> None:
        """Writes down how far the tracker has come, once that is safe there."""
        if getattr(tracker, "safe", True):
            self._sent.write(self._path)
        self._noted = True

    def _finish(self, tracker: Tracker) -> bool:
        """Finishes the tracker; returns whether that has worked."""
        process = read_process(self._folder)
        metrics = process.metrics if process else {}
        step = process.step if process else None
        status = Status(
            (process.how if process else None) or "killed",
            process.line if process else "",
            max(self._order, 0) if step is None else step,
            {name: math.nan if x is None else x for name, x in metrics.items()},
        )
        if not self._trying(lambda: tracker.finish(status), once=True):
            return False
        self._sent.closed = True
        with contextlib.suppress(OSError):
            self._sent.write(self._path)
        if missed := getattr(tracker, "missed", ""):
            self._tell("warning", f"{self._name}: {missed}")
        if self._damaged:
            lines = _many(self._damaged, "line")
            self._tell("warning", f"metrics.jsonl: {lines} cannot be read, and left out.")
        return True


class Lines:
    """The lines of a file that grows, as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0

    def new(self) -> list[str]:
        """Returns the lines that were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        return whole.decode(errors="replace").splitlines()


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _env(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / "env.json").read_text(encoding="utf-8")))
    return {}


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Within, no other process logs this run to this tracker.

    Raises:
        Refused: one does, and goes on.
    """
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        until = time.monotonic() + EARLIER
        while fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Refused("another process logs this run there") from None
                time.sleep(POLL)
            except OSError:  # a file system without locks
                break
        yield


def main(folder: str, name: str, anew: str = "") -> int:
    """Follows a run as a process of its own: the folder of the run, the tracker, perhaps anew."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends when the training has ended
        signal.signal(number, signal.SIG_IGN)
    parent, run = os.getppid(), Path(folder)
    answers = _own_output(run / "trackers" / f"{name}.log")
    closed = threading.Event()

    def tell(kind: str, text: str) -> None:
        with contextlib.suppress(OSError):
            print(json.dumps([kind, text]), file=answers, flush=True)

    def over() -> bool:
        return closed.is_set() or os.getppid() != parent

    try:
        tracker = find_tracker(name)  # imports what it needs while the run is being made
        begin = sys.stdin.readline()
        if not begin:
            return 0

        def wait_for_end() -> None:
            sys.stdin.read()
            closed.set()

        threading.Thread(target=wait_for_end, daemon=True).start()
        with _alone(run / "trackers" / f"{name}.lock"):
            step, more, sizes = json.loads(begin)
            follower = Follower(run, name, step, more, sizes, tell, over)
            done = follower.follow(tracker, bool(anew))
    except (Refused, CtlError) as error:
        tell("refused", str(error))
        return 2
    return 0 if done else 1


def _own_output(log: Path) -> Any:
    """Leaves standard output to answers, and sends what trackers print into their log."""
    log.parent.mkdir(exist_ok=True)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return answers


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
