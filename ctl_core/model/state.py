"""What a run is made of, how far it has come, and what it says of that."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.cluster.sync import Cluster
from ctl_core.hooks.hooks import Hooks
from ctl_core.hooks.recording import Recording
from ctl_core.input.stream import Input
from ctl_core.model.averages import WeightAverage
from ctl_core.model.components import Components
from ctl_core.numerics.learning_rate import LearningRate
from ctl_core.numerics.not_finite import NonFinite
from ctl_core.run.errors import RunError, quote
from ctl_core.run.listeners import FILE, read_metrics
from ctl_core.run.settings import Config


@dataclasses.dataclass
class Progress:
    """What a record saves besides the variables and the position in the data.

    Attributes:
        examples: training examples used so far, over all processes
        evaluated, metrics: the step of the last evaluation, or -1, and its values by name
        ended: the step to which the run was to go when it was ended early, or None
        noted: of which steps the loss was not finite
        best: what ``keep_best`` and ``early_stop`` know, see ``Criterion.judge``
        hook_state: what host hooks keep, their argument ``state``
    """

    examples: int = 0
    evaluated: int = -1
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    ended: int | None = None
    noted: NonFinite = dataclasses.field(default_factory=NonFinite)
    best: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    hook_state: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Progress:
        """Returns what a record has."""
        return cls(**{**fields, "noted": NonFinite(**fields["noted"])})


def check_hook_state(values: dict[str, Any], where: str) -> None:
    """Refuses a ``state`` that a hook has changed and that would not come back from a record.

    Raises:
        RunError: something in it is no number, text, list or dict by text, as JSON has them.
    """
    try:
        same = repr(json.loads(json.dumps(values))) == repr(values)
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise RunError(
            f"{where}: state holds {quote(values, 120)}, which no checkpoint brings back as it is; "
            "use numbers, texts, lists and dicts: float(x), array.tolist()."
        )


class Clock:
    """The seconds that training takes."""

    def __init__(self) -> None:
        self._start, self._paused = time.monotonic(), 0.0

    def measure_all(self) -> float:
        """Returns the seconds since the clock was made."""
        return time.monotonic() - self._start

    def measure_training(self) -> float:
        """Returns the same without evaluations and checkpoints."""
        return self.measure_all() - self._paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves out of ``training`` what happens within."""
        start = time.monotonic()
        yield
        self._paused += time.monotonic() - start


@dataclasses.dataclass(repr=False)
class State:
    """The trained state: what ``ctl_core.train`` returns.

    Attributes:
        learning_rate: what ``create_opt`` was given
        average: the moving average of the weights, or None
        recording: the variables, layers and generators of the run
        evaluation: what is evaluated, or None
        ckpt, manager: what ``create_ckpt`` returned
        computed_in: the dtypes lower than float32 in which layers compute
        stopped_by: the number of the signal that ended training early, or None
        clock: what measures the time of training
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
    progress: Progress = dataclasses.field(default_factory=Progress)
    stopped_by: int | None = None
    clock: Clock = dataclasses.field(default_factory=Clock)

    def __repr__(self) -> str:
        """One line, as a notebook shows what a cell ends with."""
        values = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        return f"State(run_dir={str(self.run_dir)!r}, step={self.step}, metrics=({values}))"

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return int(self.components.step_variable.numpy())

    @property
    def hooks(self) -> Hooks:
        """The hooks of the run."""
        return self.components.hooks

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """Whose replicas train."""
        return self.components.strategy

    @property
    def train_model(self) -> Any:
        """What ``create_model`` returned."""
        return self.components.train_model

    @property
    def train_loss(self) -> Any:
        """What ``create_loss`` returned."""
        return self.components.train_loss

    @property
    def optimizer(self) -> Any:
        """What ``create_opt`` returned."""
        return self.components.optimizer

    @property
    def lr(self) -> Any:
        """The learning rate that hooks are given."""
        return self.components.lr

    @property
    def metrics(self) -> dict[str, float]:
        """Values of the last evaluation by name, or {}."""
        return self.progress.metrics

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: step, split and values by name, from the first on."""
        return read_metrics(self.run_dir / FILE)

    @property
    def hook_state(self) -> dict[str, Any]:
        """What host hooks keep, their argument ``state``."""
        return self.progress.hook_state

    @property
    def ended(self) -> bool:
        """Whether a hook has ended training (StopTraining), or ``early_stop``, now or earlier."""
        return self.progress.ended is not None

    @property
    def diverged(self) -> bool:
        """Whether the loss of the last step was not finite, unless ``on_nan`` is ignore."""
        return self.step > 0 and self.progress.noted.latest == self.step
