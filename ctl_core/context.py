"""What a step is made of: what the functions of step.py and the hooks in the graph are given."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.hooks import Hooks
from ctl_core.numerics.averaging import WeightAverage
from ctl_core.numerics.learning_rate import Rate
from ctl_core.numerics.precision import LossScale
from ctl_core.numerics.rate_schedule import RateSchedule
from ctl_core.numerics.shares import Shares
from ctl_core.types import Loss, Model, Optimizer


@dataclasses.dataclass
class StepContext:
    """What the step is made of, and the hooks are given.

    Attributes:
        hooks: the hooks
        train_model, train_loss, optimizer: as the create hooks returned them
        lr: the learning rate that the optimizer uses
        optimizers: the optimizer by objective; a single one under ""
        batch_size: global batch size B
        replicas: N, over all processes
        step_variable: how many steps were taken
        accumulate_steps: A, micro-batches in an update
        jit_compile: whether forward and backward pass are compiled with XLA
        loss_scale: what objectives are multiplied by; only in float16
        rate_schedule: what assigns lr at each step, or None
        train_metrics: by name
        average: the moving average of the weights, or None
        shares: what a step does with shares that may be smaller (``last_batch``), or None
        notes_losses: whether losses that are not finite are noted
        without_gradient: names of variables that the loss does not depend on, found in tracing
        scalar_losses: the objectives whose loss is one number, found in tracing
        trained: by objective, the variables that it does depend on, found in tracing
        taking: the number of the step that is being traced, an int64 scalar, or None
    """

    hooks: Hooks
    train_model: Model
    train_loss: Loss
    lr: Rate
    optimizer: Any
    optimizers: dict[str, Optimizer]
    batch_size: int
    replicas: int
    step_variable: tf.Variable
    accumulate_steps: int = 1
    jit_compile: bool = False
    loss_scale: LossScale | None = None
    rate_schedule: RateSchedule | None = None
    train_metrics: dict[str, keras.Metric] = dataclasses.field(default_factory=dict)
    average: WeightAverage | None = None
    shares: Shares | None = None
    notes_losses: bool = False
    without_gradient: list[str] = dataclasses.field(default_factory=list)
    scalar_losses: set[str] = dataclasses.field(default_factory=set)
    trained: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    taking: tf.Tensor | None = None

    @property
    def micro_batch_size(self) -> int:
        """How many examples a replica takes at once: B / (N A)."""
        return self.batch_size // (self.replicas * self.accumulate_steps)

    def hook_arguments(self) -> dict[str, Any]:
        """What every hook of the step may name: the objects, and the number of the step.

        That is the step that is being taken; outside of one, how many were taken.
        """
        values = {"train_model": self.train_model, "train_loss": self.train_loss, "lr": self.lr}
        if self.hooks.graph_names("step"):  # reading it is an op, which others need not pay for
            taken = self.taking
            values["step"] = self.step_variable.read_value() if taken is None else taken
        return values

    @contextlib.contextmanager
    def taking_step(self, step: tf.Tensor) -> Iterator[None]:
        """Within, the step of this number is traced."""
        self.taking = step
        try:
            yield
        finally:
            self.taking = None
