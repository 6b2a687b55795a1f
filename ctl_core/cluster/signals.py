"""Handles signals: SIGINT and SIGTERM stop and save a run; a second SIGINT ends it immediately.

SIGUSR1, with which batch systems announce the end of a job, is handled like SIGTERM, and so is
SIGHUP, which the end of a terminal or of an SSH connection sends.

Outside of the context ``Signals``, there is nothing to save, so these signals end the process with
exit code 143, see ``end_on_signals``.

A signal that only one process receives is passed to the others between two graph calls: see
sync.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeAlias

# A SIGINT that arrives within this time of the first one does not count as a second SIGINT
# (seconds).
SAME_SIGNAL = 1.0
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

# The signals that are handled like SIGTERM, unless they are ignored, as nohup ignores SIGHUP, or
# the user handles them. Windows has neither.
_LIKE_SIGTERM = [
    signal.Signals[name] for name in ("SIGUSR1", "SIGHUP") if name in signal.Signals.__members__
]
# What asks a process to end.
_ENDING = [signal.SIGTERM, *_LIKE_SIGTERM]

# A handler that signal.signal accepts or returns; None if it was not installed from Python.
Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class Terminated(KeyboardInterrupt):
    """SIGTERM or a similar signal ends the process while there is nothing to save."""


# The process that has called ``end_on_signals``. Processes that it forks have the same handlers.
_process = 0
# The exceptions that these handlers have raised.
_raised: list[KeyboardInterrupt] = []


def end_quietly() -> None:
    """Makes signals end the process with one line, until ``end_on_signals`` is called.

    This is for the imports at the beginning of the command line, where an exception would print a
    traceback. A signal that is ignored, or that already has a handler, stays as it is.
    """
    for number in (signal.SIGINT, *_ENDING):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end_quietly)


def end_on_signals() -> None:
    """Makes SIGTERM and similar signals raise ``Terminated``, and Ctrl-C KeyboardInterrupt.

    Without a handler, the exit code of the process would depend on the signal, and process 1 of a
    container would ignore the signals.
    """
    global _process
    _process = os.getpid()
    _raised.clear()
    for number in _ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, _end_quietly):
            signal.signal(number, _terminate)
    if signal.getsignal(signal.SIGINT) is _end_quietly:
        signal.signal(signal.SIGINT, _interrupt)


def find_end(error: BaseException) -> BaseException:
    """Returns the exception of a signal that ends the process, or else the given error.

    A library that was called when the signal arrived may have raised another error in place of the
    exception, as pydantic does.
    """
    if _raised:
        return _raised.pop()
    return error


def leave_to_system() -> None:
    """Lets SIGTERM end the process immediately, even in a long graph call.

    A command that does not train has nothing to save. Process 1 of a container keeps its handler.
    """
    if os.getpid() != 1 and signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_quietly(number: int, _: FrameType | None) -> None:
    """Ends the process with a line; it writes directly, because a stream may be in use."""
    text, code = describe_end(signal.Signals(number).name), TERMINATED
    if number == signal.SIGINT:
        text, code = "interrupted", INTERRUPTED
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"error: {text}\n".encode())
    os._exit(code)


def describe_end(name: str) -> str:
    """Returns the message about a signal that ends the process while there is nothing to save."""
    return f"{name}: the process ends; it was not training."


def _terminate(number: int, _: FrameType | None) -> None:
    if os.getpid() != _process:
        _signal_again(number)
        return
    _raised.append(Terminated(signal.Signals(number).name))
    raise _raised[-1]


def _interrupt(_: int, __: FrameType | None) -> None:
    _raised.append(KeyboardInterrupt())
    raise _raised[-1]


def _signal_again(number: int) -> None:
    """Ends a forked process, for example of multiprocessing, as if it had no handler."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Restores the handlers of all signals at the end of the context.

    When a process joins a cluster, TensorFlow installs a handler for SIGTERM, which ignores it.
    """
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:
                    signal.signal(number, handler)


@contextlib.contextmanager
def postpone_end(say: Callable[[str], None], work: str) -> Iterator[None]:
    """Finishes work before SIGTERM or a similar signal ends the process.

    Args:
        say: prints a line; it is called in a separate thread
        work: what is finished, for the line
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def note(number: int, _: FrameType | None) -> None:
        if os.getpid() != process:
            _signal_again(number)
            return
        line = f"{signal.Signals(number).name}: the process ends as soon as {work}."
        threading.Thread(target=say, args=(line,), daemon=True).start()

    with keep_handlers():
        for number in _ENDING:
            if signal.getsignal(number) in (signal.SIG_DFL, _terminate):
                signal.signal(number, note)
        yield


class Signals:
    """A context that notes SIGINT and SIGTERM, each of them once.

    A second SIGINT raises KeyboardInterrupt. A SIGINT within a second of the first one does not
    count as a second one: a process manager may signal all processes of a cluster, and the
    supervisor of the cluster passes the signal on to the same processes.

    If the context is entered outside of the main thread, no signal is noted, because Python handles
    signals only in the main thread.

    Python runs a signal handler only between two instructions of the main thread, and therefore
    never during a graph call. session/watch.py handles graph calls that do not end.

    Attributes:
        numbers: the numbers of the signals that were noted, in order of arrival
        patience: the maximum time that the current operation may take after a SIGTERM (seconds); 0
            means no limit
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """Creates the context.

        Args:
            say: prints a line about the effect of a signal; it is called in a separate thread
        """
        self.numbers: list[int] = []
        self.patience = 0.0
        self._say = say
        self._announced: set[int] = set()
        self._announcing = threading.Lock()
        self._interrupted_at = 0.0
        self._previous_handlers: dict[int, Handler] = {}
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._note)
            for number in _LIKE_SIGTERM:
                if signal.getsignal(number) in (signal.SIG_DFL, _terminate):
                    self._previous_handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @property
    def received(self) -> int | None:
        """The number of the first signal that was noted, or None."""
        if not self.numbers:
            return None
        return self.numbers[0]

    @property
    def handled(self) -> frozenset[int]:
        """The numbers of the signals that this context handles."""
        return frozenset(self._previous_handlers)

    def translate(self, number: int) -> int:
        """Returns SIGTERM for signals that have the same effect, and other signals unchanged."""
        if number in _LIKE_SIGTERM:
            return signal.SIGTERM
        return number

    def announce(self, number: int) -> None:
        """Prints the effect of a signal once; must not be called from the thread that trains."""
        effect = self.translate(number)
        with self._announcing:
            if self._say is None or effect in self._announced:
                return
            self._announced.add(effect)
        name = signal.Signals(number).name
        if name == "SIGHUP":
            name = "SIGHUP (the terminal was closed; --background, tmux and nohup outlive it)"
        self._say(f"{name}: the run stops and is saved as soon as the current steps have ended.")
        if number == signal.SIGINT:
            self._say("Press Ctrl-C again, a second or more from now, to end it at once.")
        elif self.patience:
            self._say(
                f"If that takes longer than {self.patience:.0f} s, the run ends without saving."
            )

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:  # in a forked child process, as of multiprocessing
            _signal_again(number)
            return
        if self.translate(number) not in self.numbers:
            self._note_first(number)
        elif number == signal.SIGINT and time.monotonic() > self._interrupted_at + SAME_SIGNAL:
            raise KeyboardInterrupt

    def _note_first(self, number: int) -> None:
        """Notes a signal that was not received before, and prints its effect."""
        self.numbers.append(self.translate(number))
        if number == signal.SIGINT:
            self._interrupted_at = time.monotonic()
        # Another thread prints, because the main thread may hold the lock that printing needs.
        threading.Thread(target=self.announce, args=(number,), daemon=True).start()
