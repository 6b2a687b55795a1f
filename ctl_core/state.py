"""What a run is made of, and how far it has come."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.checks.writes import Write
from ctl_core.cluster.sync import Cluster
from ctl_core.compat import global_seed_generator_kept
from ctl_core.context import StepContext
from ctl_core.evaluate import Evaluation
from ctl_core.hooks import Hooks
from ctl_core.inputs import Input, create_input
from ctl_core.metric_values import read_metrics
from ctl_core.numerics.batch_norm import MovingStatistics
from ctl_core.numerics.freezing import Freezing
from ctl_core.numerics.learning_rate import LearningRate
from ctl_core.numerics.not_finite import Noted
from ctl_core.profile import Clock
from ctl_core.run_state.record import Record
from ctl_core.run_state.tracking import Found
from ctl_core.settings import Config


@dataclasses.dataclass
class Progress:
    """How far a run has come, beside its step and its variables; a checkpoint's record has it.

    Attributes:
        examples: training examples used so far, over all processes
        done: the keys of ``at_step`` that have run
        evaluated: the step of the last evaluation, or -1
        metrics: values of the last evaluation by name, or {}
        ended: the step to which the run was to go when it was ended early, or None
        noted: of which steps the loss was not finite
        best: what ``keep_best`` and ``early_stop`` know, see ``Selection.judge``
        scheduled: whether no hook has assigned lr, which ends ``lr_schedule``
        hook_state: what host hooks keep, their argument ``state``
    """

    examples: int = 0
    done: set[int] = dataclasses.field(default_factory=set)
    evaluated: int = -1
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    ended: int | None = None
    noted: Noted = dataclasses.field(default_factory=Noted)
    best: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    scheduled: bool = True
    hook_state: dict[str, Any] = dataclasses.field(default_factory=dict)

    def fields_of_record(self) -> dict[str, Any]:
        """Returns the same as a record has it: copies, since hooks go on while it is written."""
        return {
            "examples": self.examples,
            "done": sorted(self.done),
            "evaluated": self.evaluated,
            "metrics": dict(self.metrics),
            "ended": self.ended,
            "noted": dataclasses.asdict(self.noted),
            "scheduled": self.scheduled,
            "best": copy.deepcopy(self.best),
            "state": copy.deepcopy(self.hook_state),
        }

    @classmethod
    def of_record(cls, record: Record) -> Progress:
        """Returns what a record has."""
        return cls(
            record.examples,
            set(record.done),
            record.evaluated,
            record.metrics,
            record.ended,
            Noted(**record.noted),
            record.best,
            record.scheduled,
            record.state,
        )


@dataclasses.dataclass(repr=False)
class State:
    """The trained state: what ``ctl_core.train`` returns.

    Attributes:
        config: the settings
        run_dir: the run's folder
        whole: checkpoints that are on the disk, until its listeners have heard of them
        step: how many steps were taken
        step_variable: the same, as checkpoints hold it; a scalar int64 variable
        train_model, train_loss, optimizer: as the hooks made them
        lr: the learning rate that create_opt was given
        ckpt, manager: as ``create_ckpt`` returned them
        progress: how far the run has come
        stopped_by: the number of the signal that ended training early, or None
        functions: the graph functions, while training (graph.StepFunctions)
        clock: where the time goes, while training
        context: what a step is made of
        cluster: the processes that train together
        statistics: of batch normalisations, averaged over the replicas before they are read
        roots: the objects and hooks that the run is made of, by name
        found: the variables, layers and generators that they reach
        freezing: what of it is frozen
        computed_in: the dtypes lower than float32 in which layers compute
        timed_out: whether that was because of ``max_time``
        ended: whether a hook has ended training (StopTraining), now or earlier
        writes: what the forward pass writes to, with several replicas or micro-batches
    """

    config: Config
    run_dir: Any
    whole: list[tuple[int, Path]]
    step_variable: tf.Variable
    train_model: Any
    train_loss: Any
    optimizer: Any
    lr: LearningRate
    ckpt: tf.train.Checkpoint
    manager: tf.train.CheckpointManager
    hooks: Hooks
    strategy: tf.distribute.Strategy
    cluster: Cluster
    statistics: MovingStatistics
    context: StepContext
    data: Input
    evaluation: Evaluation | None
    roots: dict[str, Any]
    found: Found
    freezing: Freezing
    writes: list[Write]
    computed_in: list[str]
    progress: Progress = dataclasses.field(default_factory=Progress)
    ended: bool = False
    stopped_by: int | None = None
    timed_out: bool = False
    functions: Any = None
    clock: Clock = dataclasses.field(default_factory=Clock)

    def __repr__(self) -> str:
        """One line, as a notebook shows what a cell ends with."""
        values = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        return f"State(run_dir={str(self.run_dir)!r}, step={self.step}, metrics=({values}))"

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return int(self.step_variable.numpy())

    @property
    def eval_model(self) -> Any:
        """What is evaluated: what ``create_eval_model`` returned, or ``train_model``."""
        return self.context.model_for(training=False)[-1]

    @property
    def metrics(self) -> dict[str, float]:
        """Values of the last evaluation by name, or {}."""
        return self.progress.metrics

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: step, split and values by name, from the first on."""
        return read_metrics(self.run_dir)

    @property
    def hook_state(self) -> dict[str, Any]:
        """What host hooks keep, their argument ``state``."""
        return self.progress.hook_state

    @property
    def diverged(self) -> bool:
        """Whether the loss of the last step was not finite, unless ``on_nan`` is ignore."""
        return self.step > 0 and self.progress.noted.latest == self.step

    def renew_input(self) -> None:
        """Makes the training data anew, as it was before anything was read from it."""
        with global_seed_generator_kept():
            self.data = create_input(
                self.hooks, self.strategy, self.cluster, self.config, before=self.data
            )
