"""The components of a training step, and the context in which a step is traced.

``Components`` are fixed for a run. ``TraceContext`` has everything that varies while graphs are
traced: the step, the turn within it, whether noise is switched off, and which parts XLA compiles.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.input.batches import BatchShape
from ctl_core.numerics.learning_rate import Rate
from ctl_core.numerics.not_finite import LossScale
from ctl_core.types import Batch, Count, Loss, Model, Optimizer

# The name of the objective of a run whose ``grad_pre`` and ``create_opt`` return no dicts.
SINGLE_OBJECTIVE = ""


class Compilation(enum.Enum):
    """The parts of a training step that XLA compiles."""

    NOTHING = enum.auto()
    REPLICA = enum.auto()  # of each replica: the work before the sum over replicas, and after it
    STEP = enum.auto()  # the whole step, in one executable whose tensors have fixed shapes


@dataclasses.dataclass(frozen=True)
class CompilationChoice:
    """Whether the steps of a run are compiled.

    Attributes:
        parts: the parts of a step that XLA compiles
        reason: why it compiles nothing; "" if it compiles something
        seconds: how long it took to find out that it can compile all of a step; None if that was
            not asked
    """

    parts: Compilation
    reason: str = ""
    seconds: float | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether XLA compiles anything."""
        return self.parts is not Compilation.NOTHING

    def __str__(self) -> str:
        """Returns ``compiled by XLA (checked in 2.1 s)`` or ``not compiled: `` with the reason."""
        if not self.is_compiled:
            return f"not compiled: {self.reason}"
        if self.seconds is None:
            return "compiled by XLA"
        return f"compiled by XLA (checked in {self.seconds:.1f} s)"


NOT_CHOSEN = CompilationChoice(Compilation.NOTHING, "no step was taken")


@dataclasses.dataclass(frozen=True)
class WrittenVariable:
    """A variable that the forward pass writes.

    Attributes:
        variable: the variable
        max_stretch: for a moving statistic of each replica's own batch: how many times as far as
            usual it moves at most, which is all the way to the statistic of the batch. None for
            any other variable.
        is_shared: whether all replicas have the same value, rather than one of each of them
    """

    variable: tf.Variable
    max_stretch: float | None
    is_shared: bool


@dataclasses.dataclass
class Generators:
    """The random generators of a run with logical replicas.

    Attributes:
        variables: their states; empty without logical replicas
        initial_states: the values of the states when the run began, once that is known
    """

    variables: list[tf.Variable] = dataclasses.field(default_factory=list)
    initial_states: list[np.ndarray] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class ForwardComponents:
    """The components of a forward pass: enough to compute losses, but not to train.

    Attributes:
        hooks: the hooks of the run
        strategy: whose replicas train
        shape: how a global batch is divided into shares
        train_model: returned by ``create_model``
        train_loss: returned by ``create_loss``
        lr: the learning rate that hooks are passed
        step_variable: counts the steps that were taken, an int64 scalar
        train_metrics: the metrics of ``create_train_metrics`` by name
        eval_model: returned by ``create_eval_model``; None without that hook
    """

    hooks: Hooks
    strategy: tf.distribute.Strategy
    shape: BatchShape
    train_model: Model
    train_loss: Loss
    lr: Rate
    step_variable: tf.Variable
    train_metrics: Mapping[str, keras.Metric]
    eval_model: Model | None = None

    def choose_model(self, training: bool) -> tuple[Hook, Model]:
        """Returns the model to run, preceded by the hook that created it, for messages."""
        hook = self.hooks.create_eval_model
        if training or hook is None or self.eval_model is None:
            return self.hooks.create_model, self.train_model
        return hook, self.eval_model

    def count_examples(self, batch: Batch) -> Count:
        """Returns the number of examples in a batch: an int if it is static, or an int64 tensor."""
        count = self.hooks.count_examples.trace(batch=batch)
        static_count = tf.get_static_value(tf.convert_to_tensor(count))
        if static_count is None:
            return tf.cast(count, tf.int64)
        return int(static_count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Components(ForwardComponents):
    """The components of a training step.

    Attributes:
        optimizer: returned by ``create_opt``
        optimizers: the optimizers by objective; a single one is under ``SINGLE_OBJECTIVE``
        written: the variables that the forward pass writes
        drawing_layers: the kinds of layers that draw random numbers in training
        scalar_losses: the objectives whose loss is one number for a batch
        unchanged_losses: the objectives whose loss ``grad_pre`` returned as it was given it
        loss_metrics: the means of the loss's logged parts by name
        loss_scale: multiplies objectives in float16; otherwise None
        assign_rate: assigns ``lr`` for a step; None without a schedule
        update_average: moves the average of the weights after an update; None without ``ema``
        generators: the random generators, which are set for each logical replica
    """

    optimizer: Optimizer | dict[str, Optimizer]
    optimizers: Mapping[str, Optimizer]
    written: tuple[WrittenVariable, ...]
    drawing_layers: list[str]
    scalar_losses: frozenset[str]
    unchanged_losses: frozenset[str]
    loss_metrics: Mapping[str, keras.Metric]
    loss_scale: LossScale | None
    assign_rate: Callable[[tf.Tensor], None] | None
    update_average: Callable[[], None] | None
    generators: Generators = dataclasses.field(default_factory=Generators)

    def list_logged_metrics(self) -> dict[str, keras.Metric]:
        """Returns the metrics of training, including the means of the loss's parts, by name."""
        return {**self.train_metrics, **self.loss_metrics}


ComponentsT = TypeVar("ComponentsT", bound=ForwardComponents, covariant=True)


@dataclasses.dataclass(frozen=True)
class TraceContext(Generic[ComponentsT]):
    """The context in which a forward pass, or a whole step, is traced.

    Attributes:
        components: of the forward pass, or of the step
        step: the number of the step that is being traced, an int64 scalar; None outside of steps
        turn: the index in ``turns`` of the update that is being traced; None without turns
        quiet: whether the model runs as in an evaluation, without noise, to be compared
        compilation: the parts of a step that XLA compiles
    """

    components: ComponentsT
    step: tf.Tensor | None = None
    turn: int | None = None
    quiet: bool = False
    compilation: Compilation = Compilation.NOTHING

    @property
    def hooks(self) -> Hooks:
        """The hooks of the run."""
        return self.components.hooks

    @property
    def objective(self) -> str | None:
        """The objective whose turn it is; None without turns."""
        if self.turn is None:
            return None
        return self.hooks.turns[self.turn]

    @property
    def is_last_turn(self) -> bool:
        """Whether the update that is being traced is the last one of its step."""
        return self.turn is None or self.turn == len(self.hooks.turns) - 1

    def begin_step(self, step: tf.Tensor) -> TraceContext[ComponentsT]:
        """Returns the context of a step, an int64 scalar from 1 up."""
        return dataclasses.replace(self, step=step)

    def list_turns(self) -> Iterator[TraceContext[ComponentsT]]:
        """Yields the context of each turn of a step; without turns, the step has one."""
        if not self.hooks.turns:
            yield self
        for turn in range(len(self.hooks.turns)):
            yield dataclasses.replace(self, turn=turn)

    def hook_values(self) -> dict[str, Any]:
        """Returns the values that every hook of the step can take.

        ``step`` is the number of the step that is being traced; outside of steps it is the number
        of steps that were taken.
        """
        components = self.components
        step = self.step
        if step is None:
            step = components.step_variable.read_value()
        return {
            "objective": self.objective,
            "turn": self.turn,
            "lr": components.lr,
            "train_model": components.train_model,
            "train_loss": components.train_loss,
            "eval_model": components.choose_model(training=False)[1],
            "step": step,
        }


ForwardContext: TypeAlias = TraceContext[ForwardComponents]
StepContext: TypeAlias = TraceContext[Components]
