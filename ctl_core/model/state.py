"""The state of a run: its components, its progress, and the time that training takes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from pydantic import ConfigDict, TypeAdapter

from ctl_core.cluster.sync import Cluster
from ctl_core.compat import flatten_layers
from ctl_core.hooks.hooks import Hooks
from ctl_core.hooks.recording import LateObject, Recording
from ctl_core.input.stream import Input
from ctl_core.model.averages import WeightAverage
from ctl_core.model.components import NOT_CHOSEN, CompilationChoice, Components
from ctl_core.numerics.learning_rate import LearningRate, Rate
from ctl_core.numerics.not_finite import NonFinite
from ctl_core.numerics.variables import unwrap, walk
from ctl_core.run.errors import RunError, quote
from ctl_core.run.listeners import FILE, read_metrics
from ctl_core.run.settings import Config
from ctl_core.types import UserObject, Variable


@dataclasses.dataclass
class Progress:
    """The progress of a run, which is saved in the record of each checkpoint.

    Attributes:
        examples: the number of training examples used so far, over all processes
        evaluated: the step of the last evaluation, or -1
        metrics: the values of the last evaluation by name
        ended: the value of ``planned_last``, under the name that it has in records
        noted: a summary of the steps whose loss was not finite
        best: the best values so far, by criterion, see ``Criterion.judge``
        hook_state: the dict that is passed to host hooks as ``state``
        steps_per_pass: the number of steps in a pass over the data; None if it is not known
        passes: the passes over the data that were made until ``passes_step``
        passes_step: the last step at which a run was resumed with another ``steps_per_pass``, or 0
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    examples: int = 0
    evaluated: int = -1
    metrics: dict[str, int | float] = dataclasses.field(default_factory=dict)
    ended: int | None = None
    noted: NonFinite = dataclasses.field(default_factory=NonFinite)
    best: dict[str, list[int | float]] = dataclasses.field(default_factory=dict)
    hook_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps_per_pass: int | None = None
    passes: float = 0.0
    passes_step: int = 0

    def change_steps_per_pass(self, step: int, steps_per_pass: int | None) -> int | None:
        """Notes that, after a step, a pass over the data has another number of steps.

        Args:
            step: the step
            steps_per_pass: the number of steps in a pass; None if it is not known

        Returns:
            The former number of steps; None if it was not known or has not changed.
        """
        before = self.steps_per_pass
        if steps_per_pass is None or steps_per_pass == before:
            return None
        if before is not None:
            self.passes = self.count_passes(step)
            self.passes_step = step
        self.steps_per_pass = steps_per_pass
        return before

    def count_passes(self, step: int) -> float:
        """Returns the number of passes over the data that are made after a step."""
        assert self.steps_per_pass is not None
        return self.passes + (step - self.passes_step) / self.steps_per_pass

    def find_step(self, passes: int) -> int:
        """Returns the step after which a number of passes over the data have been made."""
        assert self.steps_per_pass is not None
        remaining = (passes - self.passes) * self.steps_per_pass
        # The tolerance hides the rounding error of a part of a pass.
        return self.passes_step + max(0, math.ceil(remaining - 1e-6))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Progress:
        """Returns the progress that is saved in a record.

        Raises:
            ValueError: a field is unknown, or has the wrong type.
        """
        return TypeAdapter(Progress).validate_json(json.dumps(fields), strict=True)

    @property
    def planned_last(self) -> int | None:
        """The last step that was planned when a hook or ``early_stop`` ended the run, or None."""
        return self.ended

    @planned_last.setter
    def planned_last(self, step: int | None) -> None:
        self.ended = step


def check_hook_state(values: dict[str, Any], where: str) -> None:
    """Raises an error if a checkpoint could not restore ``state`` exactly.

    Args:
        values: the dict ``state``, after a hook has used it
        where: the hook, which the message names

    Raises:
        RunError: a value does not exist in JSON: it is not a number, a string, a list or a dict
            with strings as keys.
    """
    try:
        restored = json.loads(json.dumps(values))
        is_same = repr(restored) == repr(values)
    except (TypeError, ValueError, RecursionError):
        is_same = False
    if not is_same:
        raise RunError(
            f"{where}: state contains {quote(values, 120)}, which a checkpoint cannot restore "
            "unchanged; use numbers, strings, lists and dicts, such as float(x) or "
            "array.tolist()."
        )


def check_created(state: State, created: list[LateObject]) -> None:
    """Raises an error if a host hook has added a new layer or variable to the model.

    Losses, optimizers and what ``create_ckpt`` saves are searched, too. A hook may add layers that
    never have variables.

    Args:
        state: the state of the run
        created: the variables and layers that the hook has created

    Raises:
        RunError: a component contains one of them.
    """
    if not any(late.reference() is not None for late in created):
        return
    held = _list_held(state)
    added = [late for late in created if id(late.reference()) in held]
    new_variables = {id(late.reference()) for late in created if late.is_variable}
    added_layers = [late for late in added if _has_state(late.reference(), new_variables)]
    added_variables = [late for late in added if late.is_variable]
    for late in (*added_layers, *added_variables):  # a layer tells more than its variables
        raise RunError(
            f"{late.hook}: adds {late.name} during training, so no checkpoint would restore it; "
            "create it in create_model, and freeze it (trainable = False) until it is needed."
        )


def _list_held(state: State) -> dict[int, UserObject]:
    """Returns the layers and variables in the components of a run, by id."""
    components = state.components
    models = (components.train_model, components.train_loss, components.eval_model)
    objects = [
        *itertools.chain(*(walk(model) for model in models)),
        *tf.train.TrackableView(state.ckpt).descendants(),
    ]
    layers = itertools.chain(*map(flatten_layers, objects))
    return {id(unwrap(held)): unwrap(held) for held in (*objects, *layers)}


def _has_state(layer: UserObject, new_variables: set[int]) -> bool:
    """Returns True for a single layer that has new variables, or will have when it is called."""
    if len(flatten_layers(layer)) != 1:
        return False
    return not layer.built or any(id(unwrap(v)) in new_variables for v in layer.variables)


class Clock:
    """Measures the time that training takes."""

    def __init__(self) -> None:
        """Starts the clock."""
        self._start = time.monotonic()
        self._paused = 0.0

    def measure_all(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self._start

    def measure_training(self) -> float:
        """Returns the seconds since the start, without evaluations and checkpoints."""
        return self.measure_all() - self._paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time spent inside the context from ``measure_training``."""
        start = time.monotonic()
        yield
        self._paused += time.monotonic() - start


@dataclasses.dataclass(repr=False)
class State:
    """The state of a run, which ``ctl_core.train`` returns.

    Attributes:
        config: the settings of the run
        run_dir: the run folder
        components: the components of a step
        learning_rate: the rate that is passed to ``create_opt``
        average: the moving average of the weights, or None
        recording: the variables, layers and generators of the run
        data: the training data
        evaluation: the evaluation datasets and their metrics, or None
        cluster: the processes that train
        ckpt: the checkpoint that ``create_ckpt`` returned
        manager: the checkpoint manager that ``create_ckpt`` returned
        computed_in: the dtypes out of float16 and bfloat16 in which layers compute
        trained: the variables that the first step trains
        left_out: the names of the trainable variables of the loss that ``grad_pre`` does not return
        untracked: the names of the trainable tf.Variables of Keras layers that ``grad_pre`` does
            not return, although the loss depends on them
        is_weighted: whether ``grad_pre`` multiplies the loss by the sample weights of the batch
        compilation: the decision whether steps are compiled, which is made before the first step
        progress: the progress of the run
        stopped_by: the number of the signal that ended training early, or None
        has_finite_weights: whether the weights were finite when they were last checked; they are
            checked before each checkpoint
        clock: the clock that measures the training time
    """

    config: Config
    run_dir: Path
    components: Components
    learning_rate: LearningRate
    average: WeightAverage | None
    recording: Recording
    data: Input
    evaluation: Any
    cluster: Cluster
    ckpt: tf.train.Checkpoint
    manager: tf.train.CheckpointManager
    computed_in: list[str]
    trained: list[Variable]
    left_out: list[str]
    untracked: list[str]
    is_weighted: bool
    compilation: CompilationChoice = NOT_CHOSEN
    progress: Progress = dataclasses.field(default_factory=Progress)
    stopped_by: int | None = None
    has_finite_weights: bool = True
    clock: Clock = dataclasses.field(default_factory=Clock)

    def __repr__(self) -> str:
        """Returns one line, which a notebook shows if the state is the last value of a cell."""
        values = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        return f"State(run_dir={str(self.run_dir)!r}, step={self.step}, metrics=({values}))"

    @property
    def step(self) -> int:
        """The number of steps taken so far."""
        return int(self.components.step_variable.numpy())

    @property
    def hooks(self) -> Hooks:
        """The hooks of the run."""
        return self.components.hooks

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy whose replicas train."""
        return self.components.strategy

    @property
    def train_model(self) -> UserObject:
        """The model that ``create_model`` returned."""
        return self.components.train_model

    @property
    def train_loss(self) -> UserObject:
        """The loss that ``create_loss`` returned."""
        return self.components.train_loss

    @property
    def optimizer(self) -> UserObject:
        """The optimizer, or the dict of optimizers, that ``create_opt`` returned."""
        return self.components.optimizer

    @property
    def lr(self) -> Rate:
        """The learning rate that is passed to hooks."""
        return self.components.lr

    @property
    def metrics(self) -> dict[str, float]:
        """The values of the last evaluation by name, or {}."""
        return self.progress.metrics

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, in the order in which they were written.

        Each line has the step, the split and the values by name.
        """
        return read_metrics(self.run_dir / FILE)

    @property
    def hook_state(self) -> dict[str, Any]:
        """The dict that is passed to host hooks as ``state``."""
        return self.progress.hook_state

    @property
    def ended(self) -> bool:
        """True if a hook ended training early by raising StopTraining, or if ``early_stop`` did.

        This may have happened before the run was resumed.
        """
        return self.progress.planned_last is not None

    @property
    def diverged(self) -> bool:
        """True if the weights, or the loss of the last step, are not finite.

        Always False if ``on_nan`` is ignore.
        """
        if not self.has_finite_weights:
            return True
        return self.step > 0 and self.progress.noted.latest == self.step
