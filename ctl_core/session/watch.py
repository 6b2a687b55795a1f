"""Watches training from a separate thread: reports when training hangs, and obeys signals.

Python runs a signal handler only between two instructions of the main thread. During a graph call,
no handler runs, and a graph call that waits for data or for another process may never end.
Therefore, the thread receives signals through ``signal.set_wakeup_fd``, and ends the process if the
main thread cannot do so.

To find out which operation is running, the thread reads the stack of the main thread. This does not
make steps and hooks slower.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import tensorflow as tf

from ctl_core.checkpoint import checkpoints
from ctl_core.checkpoint.writer import is_writing
from ctl_core.cluster import background
from ctl_core.cluster.signals import SAME_SIGNAL, Signals
from ctl_core.cluster.sync import Cluster
from ctl_core.cluster.task import Task
from ctl_core.compat import publish, read_published
from ctl_core.evaluation.evaluate import Evaluation, add_all_batches
from ctl_core.graph import StepFunctions
from ctl_core.hooks.hooks import Hook
from ctl_core.input import stream
from ctl_core.run.console import LOG, Console
from ctl_core.run.errors import NOT_THE_USERS, format_file_name
from ctl_core.session.run import Run

# The maximum time that the main thread may take to end after a second SIGINT (seconds).
INTERRUPT_SECONDS = 5.0
# The interval at which the thread checks the progress of training (seconds).
_POLL = 1.0
# The time to wait for the other processes of a cluster to report their operations (seconds).
_ANSWER_SECONDS = 10.0
# The maximum time that a process may take to report why it ends (seconds).
_LAST_WORDS_SECONDS = 3.0

# Values of ``Place.kind``.
_GRAPH_CALL = "graph call"
_EVALUATION = "evaluation"
# The functions that trace or compile a graph.
_TRACING = (Hook.trace, StepFunctions.trace, Evaluation.trace)
_INPUT_FOLDER = str(Path(stream.__file__).parent)
_CHECKPOINT_FOLDER = str(Path(checkpoints.__file__).parent)


class Place(NamedTuple):
    """The operation that the training thread is running.

    Attributes:
        kind: the kind of operation. Durations are compared between operations of the same kind
        text: a description for messages; for a hook, it includes the source line
        is_checkpoint: whether the operation writes or reads a checkpoint, and must therefore not be
            interrupted
    """

    kind: str
    text: str
    is_checkpoint: bool = False


class OperationTimer:
    """Measures the current operation, and compares it with earlier operations of the same kind.

    Attributes:
        place: the current operation; None if it is unknown
        is_reported: whether the current operation has been reported, because it takes too long
    """

    def __init__(self, stall_seconds: float) -> None:
        """Creates the timer; ``restart`` starts it.

        Args:
            stall_seconds: the shortest time after which an operation takes too long
        """
        self.place: Place | None = None
        self.is_reported = False
        self._stall_seconds = stall_seconds
        self._since = 0.0  # the time at which the current operation started
        self._longest: dict[str, float] = {}  # the longest duration by ``Place.kind`` (seconds)

    def follow(self, place: Place | None, now: float) -> None:
        """Records the operation that is running now.

        If it is of another kind than the last one, or if one of them is unknown, it is a new
        operation.
        """
        if place is None or self.place is None or place.kind != self.place.kind:
            self.restart(place, now)
        self.place = place

    def restart(self, place: Place | None, now: float) -> None:
        """Records the duration of the last operation, and the start of the next one.

        Args:
            place: the next operation; None if it is unknown
            now: the current time
        """
        if self.place is not None:
            longest = self._longest.get(self.place.kind, 0.0)
            self._longest[self.place.kind] = max(longest, self.measure(now))
        self.place = place
        self.is_reported = False
        self._since = now

    def measure(self, now: float) -> float:
        """Returns how long the current operation has been running (seconds)."""
        return now - self._since

    @property
    def limit(self) -> float:
        """How long the current operation may take (seconds)."""
        if self.place is None:
            return self._stall_seconds
        return max(self._stall_seconds, 2 * self._longest.get(self.place.kind, 0.0))


class Watch:
    """Watches the thread that enters this context, until it leaves the context.

    Another thread, the watching thread, checks the progress. If no step, evaluation batch or
    checkpoint ends for ``stall_seconds``, the watching thread prints a line that names the current
    operation. In a cluster, the line also names the operations of the other processes. The time
    limit does not apply to tracing and compiling. For other operations, the limit is at least twice
    the duration of the longest earlier operation of the same kind.

    After a second SIGINT, the process ends even if a graph call blocks the main thread. After a
    SIGTERM, the process ends if the current operation exceeds the same time limit. Checkpoints are
    never interrupted by a SIGTERM.

    Attributes:
        step: the last step of the last graph call, which is the same on all processes
    """

    def __init__(
        self, run: Run, console: Console, signals: Signals, task: Task, stall_seconds: float
    ) -> None:
        """Prepares the thread, which starts when the context is entered.

        Args:
            run: the run that is trained
            console: the console that prints the reports
            signals: the object that records signals. Its context must have been entered
            task: this process in its cluster
            stall_seconds: the time after which training is reported as hanging; 0 means no limit
        """
        self.step = 0
        self._run = run
        self._console = console
        self._signals = signals
        self._task = task
        self._stall_seconds = stall_seconds
        self._ends = 0  # how many times steps, batches or a checkpoint have ended
        self._ends_seen = 0  # the value of ``_ends`` at the last check
        self._last_end = 0.0  # the time of the check that last found a change of ``_ends``
        self._timer = OperationTimer(stall_seconds)
        self._thread = threading.Thread(target=self._watch, name="ctl_core watch", daemon=True)
        self._sender: socket.socket
        self._receiver: socket.socket
        self._receives_signals = False
        self._watched = 0  # the identifier of the thread that trains
        self._arrivals: dict[int, float] = {}  # the time of the first signal of each number
        self._end_at = float("inf")  # the time at which a second SIGINT ends the process

    def __enter__(self) -> Watch:
        self._watched = threading.get_ident()
        self._last_end = time.monotonic()
        self._timer.restart(None, self._last_end)
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.settimeout(self._poll)
        if threading.current_thread() is threading.main_thread():
            descriptor = self._sender.fileno()
            before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
            self._receives_signals = before == -1
            if not self._receives_signals:  # a notebook's event loop already receives the signals
                signal.set_wakeup_fd(before)
        self._tell_limit()
        if self._receives_signals or self._stall_seconds:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        if self._receives_signals:
            signal.set_wakeup_fd(-1)
        self._sender.close()  # the thread ends when this socket is closed
        if self._thread.is_alive():
            self._thread.join(self._poll)
        else:
            self._receiver.close()

    def note_end(self) -> None:
        """Records that steps, batches of an evaluation or a checkpoint have ended."""
        self._ends += 1

    @property
    def _poll(self) -> float:
        """The interval between two checks of the training (seconds)."""
        if not self._stall_seconds:
            return _POLL
        return min(_POLL, self._stall_seconds / 4)

    def _watch(self) -> None:
        """Receives signals and checks the progress of training, until the sender is closed."""
        while True:
            with contextlib.suppress(TimeoutError):
                numbers = self._receiver.recv(64)
                if not numbers:
                    self._receiver.close()
                    return
                for number in numbers:
                    self._receive(number)
            self._look(time.monotonic())

    # ---- Signals ---------------------------------------------------------------------------------

    def _receive(self, number: int) -> None:
        """Records a signal and announces its effect."""
        if number not in self._signals.handled:
            return
        now = time.monotonic()
        first = self._arrivals.setdefault(self._signals.translate(number), now)
        self._signals.announce(number)
        if number == signal.SIGINT and now > first + SAME_SIGNAL:
            self._end_at = min(self._end_at, now + INTERRUPT_SECONDS)

    def _tell_limit(self) -> None:
        """Sets the waiting time after a SIGTERM, which the announcement of the signal mentions."""
        if self._receives_signals:
            self._signals.patience = self._timer.limit

    def _obey(self, now: float) -> None:
        """Ends the process if the main thread does not react to a signal in time."""
        if now > self._end_at:
            self._end_process(signal.SIGINT, "interrupted")
        terminated_at = self._arrivals.get(signal.SIGTERM)
        if terminated_at is None or not self._stall_seconds:
            return
        limit = self._timer.limit
        waited = now - max(terminated_at, self._last_end)
        place = self._find_place()
        is_saving = place is not None and place.is_checkpoint
        if waited > limit and not is_saving and not is_writing():
            where = ""
            if place is not None:
                where = f"; this process was {place.text}"
            self._end_process(
                signal.SIGTERM,
                f"SIGTERM: nothing ended within {limit:.0f} s{where}; this process ends "
                "without saving, and the run resumes from its last checkpoint.",
            )

    def _end_process(self, number: int, text: str) -> None:
        """Reports why this process ends, and ends it without saving."""
        last_words = threading.Thread(target=self._say_last_words, args=(text,), daemon=True)
        last_words.start()
        last_words.join(_LAST_WORDS_SECONDS)  # does not wait longer, because the report may block
        os._exit(128 + number)

    def _say_last_words(self, text: str) -> None:
        """Reports why this process ends, and releases the lock of its run."""
        LOG.error(text)
        print(f"error: {text}", file=sys.stderr, flush=True)
        background.tell_failure(f"error: {text}")
        self._run.abandon()

    # ---- Places ----------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Checks whether training has advanced since the last check; reports it if it hangs."""
        if self._ends != self._ends_seen:
            self._ends_seen = self._ends
            self._last_end = now
            self._timer.restart(None, now)
        else:
            self._timer.follow(self._find_place(), now)
        self._tell_limit()
        self._report_stall(now)
        self._obey(now)

    def _find_place(self) -> Place | None:
        """Returns the operation that the training thread is running; see ``find_place``."""
        frame = sys._current_frames().get(self._watched)
        return find_place(frame, has_peers=self._task.processes > 1)

    def _report_stall(self, now: float) -> None:
        """Reports the current operation, once, if it takes too long.

        Prints the operation and, in a cluster, the operations of the other processes.
        """
        timer = self._timer
        place = timer.place
        if not self._stall_seconds or place is None or timer.is_reported:
            return
        seconds = timer.measure(now)
        if seconds <= timer.limit:
            return
        timer.is_reported = True
        step = self.step
        where = place.text
        if place.kind in (_GRAPH_CALL, _EVALUATION):
            where += self._describe_threads()
        others = self._ask_others(step, place.text)
        self._console.warn(
            f"step {step}: nothing has ended for {seconds:.0f} s (no step, evaluation batch or "
            f"checkpoint); this process is {where}{others}."
        )

    def _describe_threads(self) -> str:
        """Returns the lines of the user's code that other threads run, for example a generator."""
        lines = []
        for thread, frame in sys._current_frames().items():
            if thread not in (self._watched, threading.get_ident()):
                lines.append(_find_users_line(frame))
        shown = ", ".join(sorted({line for line in lines if line})[:3])
        if not shown:
            return ""
        return f"; other threads are in {shown}"

    def _ask_others(self, step: int, text: str) -> str:
        """Publishes the operation of this process, and returns those of the other processes.

        Args:
            step: the number of the last step
            text: the description of this process's operation
        """
        task = self._task
        if task.processes == 1:
            return ""
        answers = []
        # An error means that a process is gone, or that this process has already published the key.
        with contextlib.suppress(tf.errors.OpError):
            publish(f"ctl_core/stall/{step}/{task.index}", json.dumps(text))
            until = time.monotonic() + _ANSWER_SECONDS
            for index in range(task.processes):
                if index == task.index:
                    continue
                left = max(until - time.monotonic(), 0.1)
                answer = read_published(f"ctl_core/stall/{step}/{index}", left)
                where = "at an unknown place"
                if answer is not None:
                    where = f"is {json.loads(answer)}"
                answers.append(f"; {task.describe(index)} {where}")
        return "".join(answers)


@functools.cache
def _list_tracing() -> frozenset[object]:
    """Returns the code objects of the functions that trace or compile a graph."""
    return frozenset(function.__code__ for function in _TRACING)


def find_place(frame: FrameType | None, has_peers: bool) -> Place | None:
    """Returns the operation that the training thread is running, or None if it is unknown.

    The operation is unknown while a graph is traced or compiled, and if the stack contains no
    function that ``_recognize`` supports.

    Args:
        frame: the innermost frame of the thread that trains
        has_peers: whether there are other processes, for which a graph call may wait
    """
    waits = "computes or waits for data"
    if has_peers:
        waits = "computes, or waits for data or for another process"
    lines: list[tuple[str, int]] = []  # the lines of all frames so far, outermost first
    while frame is not None:
        lines.insert(0, (frame.f_code.co_filename, frame.f_lineno))
        if _is_tracing(frame):
            return None
        place = _recognize(frame, lines, waits)
        if place is not None:
            return place
        frame = frame.f_back
    return None


def _is_tracing(frame: FrameType) -> bool:
    """Returns whether a frame traces a graph, or calls a graph that may have to be compiled."""
    if frame.f_code is StepFunctions.take_steps.__code__:
        functions: StepFunctions = frame.f_locals["self"]
        return functions.may_compile
    return frame.f_code in _list_tracing()


def _recognize(frame: FrameType, lines: list[tuple[str, int]], waits: str) -> Place | None:
    """Returns the operation that the function of a frame performs, or None if it is unknown.

    Args:
        frame: the frame of a function
        lines: the files and lines of this frame and of all frames that it called, outermost first
        waits: the phrase that describes a graph call in messages
    """
    code = frame.f_code
    if code is Hook.__call__.__code__:
        hook: Hook = frame.f_locals["self"]
        return Place(str(hook), f"in {hook.locate(lines)}")
    if code is StepFunctions.take_steps.__code__:
        return Place(_GRAPH_CALL, f"in a graph call, which {waits}")
    if code is add_all_batches.__code__:
        return Place(_EVALUATION, f"in an evaluation, which {waits}")
    if code is Cluster.gather.__code__:
        return Place("exchange", "waiting for the other processes")
    if code.co_filename.startswith(_CHECKPOINT_FOLDER):
        return Place("checkpoint", "in a checkpoint", is_checkpoint=True)
    if code.co_filename.startswith(_INPUT_FOLDER):
        return Place("data", "reading the training data")
    return None


def _find_users_line(frame: FrameType | None) -> str | None:
    """Returns the innermost line of the user's code in a stack, such as ``callbacks.py:14``."""
    while frame is not None:
        file = frame.f_code.co_filename
        is_source = os.path.isabs(file)
        if is_source and not any(place in file for place in NOT_THE_USERS):
            return f"{format_file_name(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _forget_wakeup() -> None:
    """Prevents a forked process from passing the signals that it receives on to its parent."""
    with contextlib.suppress(ValueError):  # ``set_wakeup_fd`` fails outside of the main thread
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_wakeup)
