"""The components of a training step, and the context in which a step is traced.

``Components`` do not change during a run. ``TraceContext`` contains everything that varies while
graphs are traced: the step, the turn within the step, whether noise is switched off, and which
parts XLA compiles.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.input.batches import BatchShape
from ctl_core.model.shards import Shards
from ctl_core.numerics.learning_rate import Rate
from ctl_core.numerics.not_finite import LossScale
from ctl_core.types import Batch, Count, Loss, Model, Optimizer

# The name of the only objective if ``grad_pre`` and ``create_opt`` do not return dicts.
SINGLE_OBJECTIVE = ""


class Compilation(enum.Enum):
    """The parts of a training step that XLA compiles."""

    NOTHING = enum.auto()
    REPLICA = enum.auto()  # the work of each replica, both before and after the sum over replicas
    STEP = enum.auto()  # the whole step, in one executable whose tensors have fixed shapes


class Division(enum.Enum):
    """When the loss is divided by the weight of the batch, which ``batch_weight`` returns.

    Only a backward pass that is not linear depends on this choice.
    """

    AFTER_BACKWARD = enum.auto()  # the sums of the gradients over the replicas are divided
    BEFORE_FORWARD = enum.auto()  # the weights of all shares are added up before the forward pass
    BEFORE_BACKWARD = enum.auto()  # the weights are added up after the forward pass of all replicas


@dataclasses.dataclass(frozen=True)
class CompilationChoice:
    """The decision whether XLA compiles the steps of a run.

    Attributes:
        parts: the parts of a step that XLA compiles
        reason: the reason why nothing is compiled; an empty string if something is compiled
        seconds: the seconds that it took to check that XLA can compile the whole step; None without
            such a check
    """

    parts: Compilation
    reason: str = ""
    seconds: float | None = None

    @property
    def is_compiled(self) -> bool:
        """True if XLA compiles any part of a step."""
        return self.parts is not Compilation.NOTHING

    def __str__(self) -> str:
        """Returns ``compiled by XLA (checked in 2.1 s)``, or ``not compiled: `` and the reason."""
        if not self.is_compiled:
            return f"not compiled: {self.reason}"
        if self.seconds is None:
            return "compiled by XLA"
        return f"compiled by XLA (checked in {self.seconds:.1f} s)"


NOT_CHOSEN = CompilationChoice(Compilation.NOTHING, "no step was taken")


class Combination(enum.Enum):
    """How the changes that all leaves make to a variable are combined into its change in a step."""

    MEAN = enum.auto()  # the mean over the rows of the batch
    SUM = enum.auto()
    PART = enum.auto()  # each leaf begins with 0, and the values that all leaves end with are added
    FIRST = enum.auto()  # the value that leaf 0 writes
    EQUAL = enum.auto()  # all leaves have to write the same value


@dataclasses.dataclass(frozen=True)
class WrittenVariable:
    """A variable that the forward pass or the backward pass writes.

    Random generators, and the parts of training metrics, are not among these variables.

    Attributes:
        variable: the variable
        combination: how the changes of all leaves are combined
    """

    variable: tf.Variable
    combination: Combination


@dataclasses.dataclass
class Generators:
    """The random generators of a run.

    Attributes:
        variables: the variables that contain the states of the generators
        initial_states: the values of the states at the beginning of the run; empty until the run
            has been built
        drawn: the ids of the variables from which the forward pass or ``update_pre`` draws
    """

    variables: list[tf.Variable] = dataclasses.field(default_factory=list)
    initial_states: list[np.ndarray] = dataclasses.field(default_factory=list)
    drawn: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class ForwardComponents:
    """The components of a forward pass: enough to compute losses, but not to train.

    Attributes:
        hooks: the hooks of the run
        strategy: the strategy whose replicas train
        shape: the division of a global batch into shares
        train_model: the model that ``create_model`` returned
        train_loss: the loss that ``create_loss`` returned
        lr: the learning rate that is passed to hooks
        step_variable: the number of steps taken so far, an int64 scalar variable
        train_metrics: the metrics that ``create_train_metrics`` returned, by name
        eval_model: the model that ``create_eval_model`` returned; None without that hook
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
        """Returns ``create_model`` or ``create_eval_model``, and the model that it returned."""
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
        optimizer: the optimizer, or the dict of optimizers, that ``create_opt`` returned
        optimizers: the optimizers by objective; the key of a single optimizer is
            ``SINGLE_OBJECTIVE``
        written: the variables that the forward pass or the backward pass writes
        drawing_layers: the class names of the layers that draw random numbers in training
        scalar_losses: the objectives whose loss is a single number for the whole batch
        unchanged_losses: the objectives whose loss ``grad_pre`` returned unchanged
        loss_metrics: a mean for each logged part of the loss, by name
        loss_scale: the factor that multiplies objectives in float16; None in any other precision
        assign_rate: a function that assigns ``lr`` for a step; None without a schedule
        update_average: a function that updates the moving average of the weights, given the index
            of the device; None without ``ema``
        shards: the owners of the variables; None if each device keeps the whole state of optimizers
        generators: the random generators, whose states are set for each leaf
        own_gradients: the lines that compute with gradient functions of the user, each with its
            hook; empty if the backward pass consists of TensorFlow's own gradients, which are
            linear
        unjudged_gradients: the lines of gradient functions that draw random numbers or write
            variables
        leaf_obstacle: why leaves cannot be shared between devices, see model/shared_functions.py;
            "" if tracing the forward pass has shown no reason
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
    update_average: Callable[[int], None] | None
    shards: Shards | None
    generators: Generators = dataclasses.field(default_factory=Generators)
    own_gradients: tuple[str, ...] = ()
    unjudged_gradients: tuple[str, ...] = ()
    leaf_obstacle: str = ""

    def list_logged_metrics(self) -> dict[str, keras.Metric]:
        """Returns the training metrics by name, including the means of the loss's logged parts."""
        return {**self.train_metrics, **self.loss_metrics}


ComponentsT = TypeVar("ComponentsT", bound=ForwardComponents, covariant=True)


@dataclasses.dataclass(frozen=True)
class TraceContext(Generic[ComponentsT]):
    """The context in which a forward pass, or a whole step, is traced.

    Attributes:
        components: the components of the forward pass, or of the step
        step: the number of the step that is being traced, an int64 scalar; for host hooks, an int;
            None outside of steps
        turn: the index in ``turns`` of the update that is being traced; None without turns
        quiet: whether the model runs without noise, as in an evaluation, so that results can be
            compared
        compilation: the parts of a step that XLA compiles
        shares: whether functions are traced once for all devices, see model/shared_functions.py
        functions: the functions that all graphs share, see ``Replicas.share``
    """

    components: ComponentsT
    step: Count | None = None
    turn: int | None = None
    quiet: bool = False
    compilation: Compilation = Compilation.NOTHING
    shares: bool = True
    functions: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    @property
    def hooks(self) -> Hooks:
        """The hooks of the run."""
        return self.components.hooks

    @property
    def objective(self) -> str | None:
        """The objective of the current turn; None without turns."""
        if self.turn is None:
            return None
        return self.hooks.turns[self.turn]

    @property
    def is_last_turn(self) -> bool:
        """True if the update that is being traced is the last update of its step."""
        return self.turn is None or self.turn == len(self.hooks.turns) - 1

    def begin_step(self, step: tf.Tensor) -> TraceContext[ComponentsT]:
        """Returns the context of a step.

        Args:
            step: the number of the step, an int64 scalar; the first step has the number 1
        """
        return dataclasses.replace(self, step=step)

    def list_turns(self) -> Iterator[TraceContext[ComponentsT]]:
        """Yields the context of each turn of a step; without turns, yields only this context."""
        if not self.hooks.turns:
            yield self
        for turn in range(len(self.hooks.turns)):
            yield dataclasses.replace(self, turn=turn)

    def hook_values(self) -> dict[str, Any]:
        """Returns the arguments that are available to every hook of a step.

        ``step`` is the number of the step that is being traced. Outside of steps, ``step`` is the
        number of steps taken so far.
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


def choose_division(context: TraceContext[Components]) -> Division:
    """Returns when the loss is divided by the weight of the batch.

    The division after the backward pass needs no additional exchange, and is right if the backward
    pass is linear. If it may not be, the loss is divided first, unless the weight depends on the
    output and the shares of a replica are computed one after another, or in an executable of the
    replica, which cannot exchange values.
    """
    components = context.components
    hook = context.hooks.batch_weight
    if hook is None or not components.own_gradients:
        return Division.AFTER_BACKWARD
    if "output" not in hook.arguments:
        return Division.BEFORE_FORWARD
    shape = components.shape
    has_one_share = shape.accumulate_steps == 1 and shape.logical_replicas is None
    if has_one_share and context.compilation is not Compilation.REPLICA:
        return Division.BEFORE_BACKWARD
    return Division.AFTER_BACKWARD


ForwardContext: TypeAlias = TraceContext[ForwardComponents]
StepContext: TypeAlias = TraceContext[Components]
