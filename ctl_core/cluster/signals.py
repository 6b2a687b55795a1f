"""SIGINT and SIGTERM: answered at once, and agreed on with the other processes between graph calls.

The first of them stops a run, which is saved. A second SIGINT ends it there and then, also inside a
graph call that never returns. The supervisor of a cluster counts by the same rule.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl_core.cluster.sync import Cluster, LoopStatus
    from ctl_core.console import Console

# How long a signal may be repeated without meaning a second one (seconds).
SAME_SIGNAL = 1.0
# After a second SIGINT, how long Python may take to end by itself, and to say so (seconds).
HEED = 0.5
INTERRUPTED = 128 + signal.SIGINT


class SyncedSignal:
    """The signal that ends training on all processes; told after each graph call.

    Attributes:
        signal: the signal that ends training, or 0; on every process the same
    """

    def __init__(self, cluster: Cluster, signals: Signals) -> None:
        self.signal = 0
        self._cluster = cluster
        self._signals = signals

    def __call__(self, status: LoopStatus) -> LoopStatus:
        """Takes this process's status, adds the signal it received, and returns that of all."""
        status = self._cluster.sync(
            dataclasses.replace(status, signal=self.signal or self._signals.received or 0)
        )
        self.signal = status.signal
        return status


class Counted:
    """The signals that count: the first of each kind, and a SIGINT well after the first one.

    What comes within a second is taken for the same: a process manager may signal a whole
    cluster, of which the supervisor passes it on as well. SIGTERM is repeated by schedulers.

    Attributes:
        numbers: those that count, in their order
        ended_at: when the second SIGINT came, by time.monotonic, or None
    """

    def __init__(self, same: float = SAME_SIGNAL) -> None:
        self.numbers: list[int] = []
        self.ended_at: float | None = None
        self._same = same
        self._interrupted_at = 0.0

    def note(self, number: int) -> bool:
        """Takes a signal; returns whether it counts."""
        now = time.monotonic()
        if number not in self.numbers:
            if number == signal.SIGINT:
                self._interrupted_at = now
        elif (
            number != signal.SIGINT
            or self.ended_at is not None
            or now - self._interrupted_at < self._same
        ):
            return False
        else:
            self.ended_at = now
        self.numbers.append(number)
        return True


class Signals:
    """Notes SIGTERM and SIGINT instead of dying of them; a second SIGINT is not held back.

    It does what it did before, which as a rule raises KeyboardInterrupt. Where that does not end
    the run at once, as in a graph call or a loop that catches everything, the process is ended; not
    one that a person works in, such as a notebook's, which has more to lose than the run.

    Attributes:
        received: the number of the first one, or None
    """

    def __init__(self, console: Console, same: float = SAME_SIGNAL) -> None:
        self.received: int | None = None
        self._console = console
        self._counted = Counted(same)
        self._raised = False
        self._over = threading.Event()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # else the program there decides
            for number in (signal.SIGINT, signal.SIGTERM):
                _before[number] = signal.signal(number, self._note)
            self._open.callback(_give_back)
            self._open.enter_context(_listen(self._hear))
            self._open.callback(self._over.set)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._open.close()
        if self._raised and isinstance(error, Exception):  # what TensorFlow made of it, say
            raise KeyboardInterrupt from error

    def _note(self, number: int, frame: Any) -> None:
        """In the main thread, as soon as that runs Python: later than ``_hear``, or not at all."""
        if self._counted.ended_at is None:
            self.received = self.received or number
        elif not self._raised:
            self._raised = True
            before = _before[signal.SIGINT]
            if callable(before):
                before(number, frame)

    def _hear(self, number: int) -> None:
        """In a thread of its own, at once."""
        if number not in _before or not self._counted.note(number):
            return
        if self._counted.ended_at is None:
            _call_apart(self._answer, number)
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # out of a sleep
            if not self._over.wait(HEED) and not _is_interactive():
                _call_apart(self._close)
                _end()

    def _answer(self, number: int) -> None:
        again = "; Ctrl-C again, a second or more from now, ends it at once"
        self._console.answer(
            f"{signal.Signals(number).name}: the run stops after what is running now, and is saved"
            f"{again if number == signal.SIGINT else ''}."
        )

    def _close(self) -> None:
        logging.getLogger("ctl_core").error("interrupted")
        self._console.stop()


def _is_interactive() -> bool:
    """Whether a person works in this process: at a prompt of Python's or in a notebook."""
    return hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Around what has nothing to save: Ctrl-C ends it, also where no Python handler runs."""
    over = threading.Event()

    def hear(number: int) -> None:
        if number == signal.SIGINT and not over.wait(HEED):
            _end()

    with contextlib.ExitStack() as stack:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            stack.enter_context(_listen(hear))
            stack.callback(over.set)
        yield


@contextlib.contextmanager
def _listen(listener: Callable[[int], None]) -> Iterator[None]:
    """Calls ``listener`` in a thread, at once, with each signal that has a handler in Python.

    Such a handler waits until the main thread runs Python again; its C part writes the signal's
    number to a socket at any time. Whoever had such a socket before goes on getting the numbers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, handlers = socket.socketpair()
    handlers.setblocking(False)
    before = signal.set_wakeup_fd(handlers.fileno(), warn_on_full_buffer=False)
    _sockets.append(handlers)

    def listen() -> None:
        while numbers := ours.recv(64):
            if before != -1:
                with contextlib.suppress(OSError):
                    os.write(before, numbers)
            for number in numbers:
                listener(number)

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _sockets.remove(handlers)
        handlers.shutdown(socket.SHUT_RDWR)  # a forked process may hold it open
        thread.join()
        ours.close()
        handlers.close()


# What the signals did before, while a run has them, and what their numbers are written to.
_before: dict[int, Any] = {}
_sockets: list[socket.socket] = []


def _give_back() -> None:
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()


def _leave_to_child() -> None:
    """In a process that was forked off a run, of multiprocessing say: its signals are its own."""
    _give_back()
    if _sockets:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_to_child)


def _call_apart(function: Callable[..., object], *args: object) -> None:
    """Calls a function that may hang, in a console that is stuck say, and waits no longer."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    thread.join(HEED)


def _end() -> None:
    """Ends the process: what a second SIGINT does where the main thread does not heed it."""
    with contextlib.suppress(OSError):
        os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)
