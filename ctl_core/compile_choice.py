"""``--jit-compile auto``: whether compiled stretches are faster here, tried before the first step.

The run keeps what was chosen in its config.yaml, so that it never changes: compiled steps round
otherwise. Nothing is trained by trying: all that a step writes to is put back.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.compat import GraphWriter, iterator_handle, with_called
from ctl_core.console import Console
from ctl_core.errors import SetupError, not_compiled
from ctl_core.graph import StepFunctions
from ctl_core.inputs import Input
from ctl_core.layers import read_file
from ctl_core.numerics.staging import ReplicaCopies
from ctl_core.run_state.remainder import own_variables
from ctl_core.run_state.tracking import written_variables
from ctl_core.settings import Config
from ctl_core.state import State
from ctl_core.stretches import stack_for

# What is timed takes about so long (seconds), three times each.
_LONG = 0.3
_CONVOLUTIONS = ("Conv", "Depthwise")


def as_chosen(config: Config, run_dir: Path, console: Console) -> Config:
    """Returns the settings with what the run has chosen before, if it has; and says so."""
    if config.jit_compile != "auto":
        return config
    value = read_file(run_dir / "config.yaml", required=False).get("jit_compile", ("", None))[1]
    if not isinstance(value, bool):
        return config
    _say(console, value, "as the run was trained before")
    return dataclasses.replace(config, jit_compile=value)


def choose(state: State, functions: StepFunctions, console: Console) -> None:
    """Decides whether steps are compiled, and says so; then ``state.config`` has the answer.

    Not where gradients are summed over replicas, elements differ in shape, XLA does not know an
    op, or a convolution would run on a CPU; with ``deterministic`` else yes; without, if a clock
    says so.

    Args:
        state: of the run
        functions: which take its steps; nothing is traced yet
        console: where to say so
    """
    if state.config.jit_compile != "auto":
        return
    if state.step:
        compiled, why = False, "as the run began without"
    else:
        with _Trial(state) as trial:
            compiled, why = trial.decide(functions)
            trial.take(compiled)
        if not compiled or trial.renews:
            functions.forget()
        functions.noted = None
    state.config = dataclasses.replace(state.config, jit_compile=compiled)
    _say(console, compiled, why)


def _say(console: Console, compiled: bool, why: str) -> None:
    console.say(f"jit_compile auto: {'compiled stretches' if compiled else 'plain graphs'}, {why}.")


class _Trial:
    """Steps that are taken and undone.

    Attributes:
        renews: whether the data are made anew after it, since their position cannot be saved; such
            are read element by element either way, and making them anew ends those before
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._folder = tempfile.TemporaryDirectory(prefix="ctl_core-")
        self._inputs: dict[bool, Input] = {}
        data = state.data
        self.renews = data.why_not_checkpointable is not None or data.pipeline.stream is not None

    def __enter__(self) -> _Trial:
        self._begun(False)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.renews:
            self._state.renew_input()
        else:
            tf.train.Checkpoint(iterator=self._state.data.iterator).read(self._position())
        self._folder.cleanup()

    def take(self, compiled: bool) -> None:
        """Takes the data and the stack of one of the two ways from here on."""
        state = self._state
        if self.renews:
            self._inputs[compiled] = state.data
        elif compiled not in self._inputs:  # compiled steps may read their elements otherwise
            config = state.config
            state.config = dataclasses.replace(config, jit_compile=True)
            state.renew_input()
            state.config = config
            self._begun(compiled)
        state.data = self._inputs[compiled]
        state.context.stack = stack_for(state.context, state.data) if compiled else None

    def _begun(self, compiled: bool) -> None:
        """Keeps where the data of a way begin."""
        self._inputs[compiled] = data = self._state.data
        if not self.renews:
            tf.train.Checkpoint(iterator=data.iterator).write(self._position())

    def _position(self) -> str:
        return str(Path(self._folder.name) / f"position-{self._state.data.unit}")

    def decide(self, functions: StepFunctions) -> tuple[bool, str]:
        """Returns whether to compile, and why."""
        state = self._state
        if state.context.replicas > 1:
            return False, f"since gradients are summed over {state.context.replicas} replicas"
        if stack_for(state.context, state.data) is None:
            return False, "since not all elements are dense and of one shape"
        plain = StepFunctions(state, Console(shown=False), GraphWriter(lambda: None))
        graph = plain.graph(None).graph
        on_cpu = "GPU" not in plain.devices[0]
        types = (op.type for op in with_called(graph.get_operations()))
        if on_cpu and (name := next((t for t in types if t.startswith(_CONVOLUTIONS)), None)):
            return False, f"since {name} is slow in an executable on a CPU"
        written, others = written_variables(
            state.strategy,
            [*state.found.variables.values(), *own_variables(state)],
            graph,
            but=iterator_handle(state.data.iterator),
        )
        if others:
            return False, "since what a step writes to cannot be put back"
        with ReplicaCopies(state.strategy, written).put_back_after():
            return self._time(plain, functions)

    def _time(self, plain: StepFunctions, functions: StepFunctions) -> tuple[bool, str]:
        state, seconds = self._state, {}
        self.take(True)
        try:
            functions.train_steps(1)
        except tf.errors.OpError as error:
            if why := not_compiled(error):
                return False, f"since {why}"
            raise
        except SetupError as error:
            return False, f"since {error}"
        if state.config.deterministic:
            return True, "with deterministic, which no clock may decide"
        for name, one in (("plain", plain), ("compiled", functions)):
            self.take(one is functions)
            seconds[name] = _seconds_per_step(one)
        plainly, compiled = seconds["plain"], seconds["compiled"]
        took = f"{in_microseconds(compiled)} µs a step against {in_microseconds(plainly)}"
        if compiled < plainly:
            return True, f"{took} of plain graphs"
        return False, f"compiled {took}"


def in_microseconds(seconds: float) -> str:
    """Returns seconds as microseconds with three digits that count: 0.00213 is ``2,130``."""
    return f"{float(f'{1e6 * seconds:.3g}'):,.10g}"


def _seconds_per_step(functions: StepFunctions) -> float:
    """Returns the quickest of three rounds, after one that finds out how many steps to take."""
    steps = 1

    def round_() -> float:
        start = time.perf_counter()
        functions.train_steps(steps)
        return time.perf_counter() - start

    for _ in range(20):
        if (seconds := round_()) > _LONG / 2:
            break
        steps *= 4 if seconds < _LONG / 8 else 2
    return min(seconds, round_(), round_()) / steps
