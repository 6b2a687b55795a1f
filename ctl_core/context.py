"""What a step is made of: what the functions of step.py and the hooks in the graph are given."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checks.returned import assert_weights
from ctl_core.compiled import Stack
from ctl_core.hooks import Hook, Hooks
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
        eval_model: what ``create_eval_model`` returned, or train_model
        lr: the learning rate that the optimizer uses
        optimizers: the optimizer by objective; a single one under ""
        batch_size: global batch size B
        replicas: N, over all processes
        step_variable: how many steps were taken
        accumulate_steps: A, micro-batches in an update
        jit_compile: whether forward and backward pass are compiled with XLA
        stack: how elements are stacked where whole steps are compiled, or None
        loss_scale: what objectives are multiplied by; only in float16
        rate_schedule: what assigns lr at each step, or None
        train_metrics: by name
        average: the moving average of the weights, or None
        shares: what a step does with shares that may be smaller (``last_batch``), or None
        notes_losses: whether losses that are not finite are noted
        without_gradient: names of variables that the loss does not depend on, found in tracing
        scalar_losses: the objectives whose loss is one number, found in tracing
        loss_spec: of the loss that a step returns, found in tracing stretches
        trained: by objective, the variables that it does depend on, found in tracing
        taking: the number of the step that is being traced, an int64 scalar, or None
        turn: the index in ``turns`` of the turn that is being traced, or None
        weights: in an executable, where nothing can be asserted, what ``watched_weight`` got
        loss_parts: what ``grad_pre`` returns of them is logged by, by name
        look: is shown the tape and the scaled objectives of a step that is taken again, or None
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
    loss_spec: Any = None
    trained: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    taking: tf.Tensor | None = None
    turn: int | None = None
    stack: Stack | None = None
    weights: list[tf.Tensor] = dataclasses.field(default_factory=list)
    loss_parts: dict[str, keras.Metric] = dataclasses.field(default_factory=dict)
    eval_model: Model | None = None
    look: Callable[[tf.GradientTape, dict[str, tf.Tensor]], None] | None = None

    def model_for(self, training: bool) -> tuple[Hook, str, Model]:
        """Returns the model that is run, and, for messages, the hook that made it and its name."""
        hook = self.hooks.create_eval_model
        if training or hook is None or self.eval_model is None:
            return self.hooks.create_model, "train_model", self.train_model
        return hook, "eval_model", self.eval_model

    @property
    def micro_batch_size(self) -> int:
        """How many examples a replica takes at once: B / (N A)."""
        return self.batch_size // (self.replicas * self.accumulate_steps)

    @property
    def objective(self) -> str | None:
        """Whose turn it is, while one is traced."""
        return None if self.turn is None else self.hooks.turns[self.turn]

    @property
    def ends_step(self) -> bool:
        """Whether the update that is being traced is the last one of its step."""
        return self.turn in (None, len(self.hooks.turns) - 1)

    def each_turn(self, again: bool = True) -> Iterator[None]:
        """Goes through the turns of a step; without turns, once.

        Args:
            again: whether an objective comes as often as it has turns; False: once
        """
        turns = self.hooks.turns
        numbers = range(len(turns)) if again else map(turns.index, dict.fromkeys(turns))
        for self.turn in numbers if turns else [None]:
            yield
        self.turn = None

    def logged(self) -> dict[str, keras.Metric]:
        """Returns the train metrics, and those of the loss's parts, by name."""
        return {**self.train_metrics, **self.loss_parts}

    def hook_arguments(self) -> dict[str, Any]:
        """What every hook of the step may name: the objects, and the number of the step.

        That is the step that is being taken; outside of one, how many were taken.
        """
        values: dict[str, Any] = {"objective": self.objective, "turn": self.turn, "lr": self.lr}
        values |= {"train_model": self.train_model, "train_loss": self.train_loss}
        values["eval_model"] = self.model_for(training=False)[-1]
        if self.hooks.graph_names("step"):  # reading it is an op, which others need not pay for
            taken = self.taking
            values["step"] = self.step_variable.read_value() if taken is None else taken
        return values

    def watched_weight(self, own: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        """Returns what all batches of the step weigh; training ends if that is no number above 0.

        Args:
            own: what this replica's batch weighs
            total: the sum over the replicas, NaN if one is negative; both divided by B
        """
        weights = tf.stack([own, total]) * tf.cast(self.batch_size, own.dtype)
        if self.stack is not None:
            self.weights.append(tf.cast(weights, tf.float32))
            return total
        step = self.step_variable + 1 if self.taking is None else self.taking
        with tf.control_dependencies([assert_weights(step, weights)]):
            return tf.identity(total)

    @contextlib.contextmanager
    def taking_step(self, step: tf.Tensor) -> Iterator[None]:
        """Within, the step of this number is traced."""
        self.taking = step
        try:
            yield
        finally:
            self.taking = None
