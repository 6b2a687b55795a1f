"""What a step is made of: what the hooks returned, and what the settings add to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.input.batches import BatchShape
from ctl_core.numerics.not_finite import LossScale


@dataclasses.dataclass(frozen=True)
class Written:
    """A variable that the forward pass writes.

    Attributes:
        variable: the variable
        furthest: of a moving statistic of each replica's own batch, how many times as far as usual
            it moves at most, which is to the statistics of the batch; otherwise None
        is_shared: whether all replicas have the same value, rather than one of each of them
    """

    variable: tf.Variable
    furthest: float | None
    is_shared: bool


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a step is made of.

    Attributes:
        strategy: whose replicas take it
        shape: of a global batch
        train_model, train_loss, eval_model, optimizer: as the create hooks returned them
        lr: the learning rate that the optimizer uses
        step_variable: how many steps were taken
        optimizers: the optimizer by objective; a single one under ""
        jit_compile: whether forward and backward pass are compiled with XLA
        in_executable: whether the whole step is, whose tensors have fixed sizes then
        loss_scale: what objectives are multiplied by; only in float16
        assign_rate: assigns ``lr`` for a step; None without a schedule
        train_metrics, loss_parts: Keras metrics by name
        update_average: takes the weights into their moving average; None without one
        scalar_losses: the objectives whose loss is one number for a batch
        written: what the forward pass writes
        quiet: whether steps run the model as an evaluation does, without noise, for a check
        step: the number of the step that is traced, an int64 scalar; None where nobody takes it
        turn: whose turn in it is traced, the index in ``turns``, or None
    """

    hooks: Hooks
    strategy: tf.distribute.Strategy
    shape: BatchShape
    train_model: Any
    train_loss: Any
    lr: Any
    step_variable: tf.Variable
    optimizer: Any = None
    optimizers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_model: Any = None
    jit_compile: bool = False
    in_executable: bool = False
    loss_scale: LossScale | None = None
    assign_rate: Callable[[tf.Tensor], None] | None = None
    train_metrics: Mapping[str, keras.Metric] = dataclasses.field(default_factory=dict)
    loss_parts: Mapping[str, keras.Metric] = dataclasses.field(default_factory=dict)
    update_average: Callable[[], None] | None = None
    scalar_losses: frozenset[str] = frozenset()
    written: tuple[Written, ...] = ()
    quiet: bool = False
    step: tf.Tensor | None = None
    turn: int | None = None

    def choose_model(self, training: bool) -> tuple[Hook, Any]:
        """Returns the model that is run, and, for messages, the hook that made it."""
        hook = self.hooks.create_eval_model
        if training or hook is None or self.eval_model is None:
            return self.hooks.create_model, self.train_model
        return hook, self.eval_model

    def list_turns(self, step: tf.Tensor | None = None) -> Iterator[Parts]:
        """Yields what each turn of a step is made of; without turns, the step is one."""
        for turn in range(len(self.hooks.turns)) if self.hooks.turns else [None]:
            yield dataclasses.replace(self, step=step, turn=turn)

    @property
    def objective(self) -> str | None:
        """Whose turn it is, or None."""
        return None if self.turn is None else self.hooks.turns[self.turn]

    def count_examples(self, batch: Any) -> Any:
        """Returns how many examples a batch holds, an int64 tensor; where it is fixed, a number."""
        number = self.hooks.count_examples.trace(batch=batch)
        static = tf.get_static_value(tf.convert_to_tensor(number))
        return tf.cast(number, tf.int64) if static is None else int(static)

    def list_logged(self) -> dict[str, keras.Metric]:
        """Returns the train metrics, and those of the loss's parts, by name."""
        return {**self.train_metrics, **self.loss_parts}

    def values(self, step: int | None = None) -> dict[str, Any]:
        """Returns what every hook of the step may name: the objects, and the number of the step.

        That is the step that is being taken; outside of one ``step``, or how many were taken.
        """
        values = {"objective": self.objective, "turn": self.turn, "lr": self.lr}
        values |= {"train_model": self.train_model, "train_loss": self.train_loss}
        values["eval_model"] = self.choose_model(training=False)[1]
        values["step"] = self.step if step is None else step
        if values["step"] is None:
            values["step"] = self.step_variable.read_value()
        return values
