"""Starts the processes that log a run to trackers, hears them, and lets them end.

Training asks nothing of them after its first step: they read the run's files (follow.py).
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctl_core.apart import start_apart
from ctl_core.errors import SetupError
from ctl_core.files import from_here
from ctl_core.trackers.events import sizes_in

# How long a run waits for trackers before its first step, and at its end (seconds).
START, END = 10.0, 20.0
# The same at the end for one that has not begun, and so has nothing in hand (seconds).
NOT_BEGUN = 2.0

Say = Callable[[str], None]


class Sender:
    """The processes of one run, one for each tracker.

    Attributes:
        sent: by tracker, what it has got, once it has ended
    """

    def __init__(self, folder: Path, names: Sequence[str], anew: bool = False) -> None:
        """Starts the processes, which wait to be told where the run begins.

        Raises:
            OSError: they cannot be started.
        """
        self._folder = folder
        self.sent: dict[str, str] = {}
        self._begun = False
        self._shown: Callable[[str, str], None] = lambda kind, text: None
        (folder / "trackers").mkdir(parents=True, exist_ok=True)
        self._children = [_Child(folder, name, anew, self._heard) for name in names]

    def begin(self, step: int, fresh: bool, say: Say, warn: Say) -> None:
        """Lets them start the trackers of a run that is about to be trained.

        Args:
            step: where the run begins or goes on
            fresh: whether it has taken no step yet: it waits for the trackers then, though not for
                ever, and one that cannot be used is an error; otherwise it is a warning
            say: shows a line to the user; may be called in any thread
            warn: shows a warning; may be, too

        Raises:
            SetupError: a tracker cannot be used.
        """
        self._tell([step, True, sizes_in(self._folder / "tb")], say, warn)
        if fresh:
            self._hear(say, START)
        else:
            threading.Thread(target=self._hear, args=(say, None, warn), daemon=True).start()

    def send(self, step: int, more: bool, say: Say, warn: Say) -> None:
        """The same for a run that another process trains, or has trained.

        Args:
            step: to which it was trained
            more: whether it still is
            say: shows a line to the user
            warn: shows a warning

        Raises:
            SetupError: a tracker cannot be used.
        """
        self._tell([step, more, None], say, warn)
        self._hear(say, None)

    def _tell(self, begin: list[Any], say: Say, warn: Say) -> None:
        self._begun = True
        self._shown = lambda kind, text: (warn if kind == "warning" else say)(text)
        for child in self._children:
            child.write(json.dumps(begin) + "\n")

    def _hear(self, say: Say, patience: float | None, warn: Say | None = None) -> None:
        """Waits for what they answer; with ``warn``, one that cannot be used is a warning."""
        until = time.monotonic() + (patience or 0)
        for child in self._children:
            left = None if patience is None else max(0.0, until - time.monotonic())
            kind, text = child.answer(left)
            if kind == "ready":
                say(f"{child.name}: {text or 'the run is logged there'}")
            elif kind == "refused" and warn is not None:
                warn(f"trackers: {text}; the run goes on without it.")
            elif kind == "refused":
                self.kill()
                raise SetupError(f"trackers: {text}")
            elif kind == "late":
                self._shown(
                    "warning",
                    f"{child.name} has not answered in {patience:g} s; training goes on, and what "
                    "is missing is sent when it does.",
                )

    def _heard(self, kind: str, name: str, text: str) -> None:
        if kind == "sent":
            self.sent[name] = text
        else:
            self._shown(kind, text)

    def end(self, say: Say, patience: float | None = END) -> list[int]:
        """Tells them that the run is over, and waits for their end.

        Args:
            say: shows a line to the user
            patience: how long to wait (seconds); one that takes longer goes on by itself

        Returns:
            The exit codes of those that have ended.
        """
        if not self._begun:
            self.kill()
        for child in self._children:
            child.close()
        since = time.monotonic()
        codes = []
        for child in self._children:
            try:
                most = patience if child.answered else patience and min(patience, NOT_BEGUN)
                left = None if most is None else max(0.0, since + most - time.monotonic())
                codes.append(child.wait(left))
            except subprocess.TimeoutExpired:
                say(
                    f"{child.name} is still being sent to, by process {child.pid}; where that is "
                    f"ended, python -m ctl_core track --run-name {self._folder.name} --to "
                    f"{child.name} sends the rest."
                )
        return codes

    def kill(self) -> None:
        """Ends the processes here and now."""
        for child in self._children:
            child.kill()


class _Child:
    """One process."""

    def __init__(
        self, folder: Path, name: str, anew: bool, heard: Callable[[str, str, str], None]
    ) -> None:
        self.name, self.answered, self._killed = name, False, False
        self._log = folder / "trackers" / f"{name}.log"
        self._heard, self._first = heard, queue.SimpleQueue[tuple[str, str]]()
        words = (str(folder), name, "anew" * anew)
        self._process = start_apart(
            "ctl_core.trackers.follow", *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                kind, text = json.loads(line)
            except ValueError:
                continue
            if not self.answered and kind in ("ready", "refused", "warning"):
                self.answered = True
                self._first.put((kind, text))
                if kind != "warning":
                    continue
            if kind == "refused":
                self._heard("warning", self.name, f"trackers: {text}")
            else:
                self._heard(kind, self.name, text)
        code = self._process.wait()
        if not self.answered:
            self._first.put(("ended", ""))
        if code not in (0, 1, 2) and not self._killed:
            self._heard(
                "warning",
                self.name,
                f"{self.name}: its process has ended with {code}; {from_here(self._log)} says why. "
                "Training is not affected.",
            )

    def answer(self, seconds: float | None) -> tuple[str, str]:
        """Waits for the first answer: ready, refused, ended or late; and its text."""
        try:
            return self._first.get(timeout=seconds)
        except queue.Empty:
            return "late", ""

    def write(self, text: str) -> None:
        """Writes to the process, if it is still there."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
        except OSError:
            return

    def close(self) -> None:
        """Says that no more comes."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            return

    def wait(self, seconds: float | None) -> int:
        """Waits for its end; returns its exit code."""
        code = self._process.wait(seconds)
        self._reader.join(1.0)
        return code

    def kill(self) -> None:
        """Ends it."""
        self._killed = True
        self._process.kill()
        self._process.wait()
