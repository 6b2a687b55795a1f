"""Computes the output, loss and gradients of one replica for its share of a batch.

The graph hooks are called here, in the order of the step. All functions run while a graph is
traced. This module rejects values that would silently train a different model than intended;
hooks/load.py checks the type of every value that a hook returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from ctl_core.cluster.collectives import find_offset_in_share, place_rows
from ctl_core.cluster.replica_contexts import weigh_by_rows
from ctl_core.compat import run_layers
from ctl_core.hooks.defaults import note_weighted, uses_weights
from ctl_core.hooks.hooks import Hook, convert, describe
from ctl_core.hooks.results import Objective
from ctl_core.input.batches import Share, ShareWeight
from ctl_core.model.components import (
    SINGLE_OBJECTIVE,
    Components,
    Division,
    ForwardComponents,
    ForwardContext,
    StepContext,
    choose_division,
)
from ctl_core.model.metrics import update_train_metrics
from ctl_core.numerics.constants import split_constants
from ctl_core.numerics.reduction import Contribution, multiply, sum_over_replicas
from ctl_core.numerics.variables import cast_to_float32, name_variable
from ctl_core.run.console import warn
from ctl_core.run.errors import CtlError, HookFailed, SetupError, make_line, read_frames
from ctl_core.types import (
    Batch,
    Count,
    Gradient,
    Gradients,
    GradientsByObjective,
    Loss,
    Model,
    ModelInput,
    ModelOutput,
    Structure,
    Variable,
    VariablesByObjective,
)


@dataclasses.dataclass(frozen=True)
class ReplicaObjective:
    """The objective of one micro-batch on one replica.

    Attributes:
        value: a scalar, (sum(loss_per_batch) + rows * extra_loss) / examples. If the batch has a
            weight w, the value is (sum(loss_per_batch) + w * extra_loss) / B, where B is the global
            batch size; this value still has to be divided by sum(w) / B. If the weights of all
            shares are known before the backward pass, B is sum(w).
        variables: the variables to train, without those of frozen layers
        logged: the parts of the loss that ``grad_pre`` returned for logging, by name
        is_scalar: whether loss_per_batch is a single number
        has_unchanged_loss: whether loss_per_batch is the same tensor that was passed to
            ``grad_pre``
    """

    value: tf.Tensor
    variables: list[Variable]
    logged: dict[str, Any]
    is_scalar: bool
    has_unchanged_loss: bool


def run_model(context: ForwardContext, batch: Batch, training: bool) -> ModelOutput:
    """Returns the model's output for a batch; float16 and bfloat16 are cast to float32."""
    hook, model = context.components.choose_model(training)
    training = training and not context.quiet
    inputs = context.hooks.input_pre.trace(batch=batch, training=training, **context.hook_values())
    try:
        output = call_made(hook, call_model, model, inputs, training)
    except HookFailed as error:
        raise _name_default(error, context.hooks.input_pre, inputs) from error.__cause__
    return cast_to_float32(output)


def _name_default(error: HookFailed, hook: Hook, element: Structure) -> HookFailed:
    """Explains in an error that a default hook passed on an element of the batch that is a tuple.

    A semi-supervised batch, for example, is a pair of a labeled batch and an unlabeled one.

    Args:
        error: the error
        hook: the hook that passed on the element
        element: the element of the batch
    """
    if not hook.is_default or not isinstance(element, tuple):
        return error
    place, _, reason = str(error).partition(": ")
    return HookFailed(
        f"{place}: the default {hook.name} passed on {describe(element)} of the batch; "
        f"write {hook.name} to choose tensors. ({make_line(reason, 60)})"
    )


def compute_loss(
    context: ForwardContext, batch: Batch, output: ModelOutput, training: bool
) -> Structure:
    """Returns the result of ``train_loss`` for the model's output, in float32."""
    # Even in a quiet step, the batch is a training batch, whose structure may differ from that of
    # an evaluation batch. So loss_pre receives the real value of ``training``.
    loss_input = context.hooks.loss_pre.trace(
        output=output, batch=batch, training=training, **context.hook_values()
    )
    train_loss = context.components.train_loss
    with_noise = training and not context.quiet
    try:
        create_loss = context.hooks.create_loss
        loss = call_made(create_loss, call_trained, train_loss, loss_input, with_noise)
    except HookFailed as error:
        target = batch[1] if isinstance(batch, tuple) and len(batch) > 1 else None
        raise _name_default(error, context.hooks.loss_pre, target) from error.__cause__
    return cast_to_float32(loss)


def call_made(hook: Hook, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that a hook returned, such as the model from ``create_model``.

    If the function raises an error, the message names the hook.
    """
    try:
        return function(*args)
    except CtlError:
        raise
    except Exception as error:
        raise HookFailed(hook.describe_failure(error)) from error


def call_model(model: Model, inputs: ModelInput, training: bool) -> ModelOutput:
    """Calls the model in training mode or in inference mode.

    The mode also applies to layers that a function calls without passing ``training`` to them.
    """
    with run_layers(training):
        return call_trained(model, inputs, training)


def call_trained(function: Model | Loss, inputs: Structure, training: bool) -> Structure:
    """Calls a model or a loss, and passes ``training`` only if it accepts that argument.

    As in a tf.function, AutoGraph converts functions and other callable objects, but no layers.
    """
    if isinstance(function, keras.Layer):
        return function(inputs, training=training)
    options = {}
    if "training" in inspect.signature(function).parameters:
        options["training"] = training
    return convert(_call_function)(function, inputs, options)


def _call_function(
    function: Callable[..., Structure], inputs: Structure, options: dict[str, bool]
) -> Structure:
    """Calls a function. Converting this function also converts the function that it calls."""
    return function(inputs, **options)


def sum_loss(components: ForwardComponents, loss: Structure, batch: Batch) -> tf.Tensor:
    """Returns the sum of a loss over a batch.

    The loss is either a vector of one number per example, or already the sum.

    Raises:
        SetupError: the loss has another shape or type.
    """
    create_loss = components.hooks.create_loss
    if isinstance(loss, dict):
        raise create_loss.reject("the loss is a dict; return the sum of its values.")
    loss = tf.convert_to_tensor(loss)
    examples: Count | None = components.count_examples(batch)
    if not isinstance(examples, int):
        examples = None
    has_valid_shape = loss.shape.rank == 0 or loss.shape.is_compatible_with([examples])
    if not has_valid_shape:
        _refuse_broadcast(create_loss, loss.graph)
    if not has_valid_shape or not loss.dtype.is_floating:
        raise create_loss.reject(
            f"the loss is {describe(loss)}; expected floating-point numbers, one per example "
            f"(shape [{examples or 'batch'}]) or their sum (shape []); to divide by other "
            "numbers, use batch_weight."
        )
    return tf.reduce_sum(cast_to_float32(loss))


def _refuse_broadcast(create_loss: Hook, graph: tf.Graph) -> None:
    """Raises an error if the graph of a loss broadcasts labels and predictions to [b, b]."""
    op = find_broadcast(graph)
    if op is None:
        return
    shapes = " and ".join(str(value.shape.as_list()) for value in op.inputs)
    raise SetupError(
        f"{create_loss.locate(read_frames(op))}: {op.type} of the shapes {shapes} compares "
        "each example with all others; give both the same shape, for example with "
        "tf.squeeze(output, -1)."
    )


def find_broadcast(graph: tf.Graph) -> tf.Operation | None:
    """Returns the last op that broadcasts [b, 1] and [b] to [b, b]; None if no op does."""
    for op in reversed(graph.get_operations()):
        shapes = [value.shape.as_list() for value in op.inputs if value.shape.rank is not None]
        if len(shapes) == 2:
            row, column = sorted(shapes, key=len)
            if len(row) == 1 and column == [*row, 1]:
                return op
    return None


def weigh_batch(
    context: ForwardContext, batch: Batch, output: ModelOutput, present: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns the weight that ``batch_weight`` gives a replica's batch; None without that hook.

    A negative weight would reverse the gradients. It is replaced with NaN, so that the loss becomes
    NaN.
    """
    hook = context.hooks.batch_weight
    if hook is None:
        return None
    weight = hook.trace(batch=batch, output=output, **context.hook_values())
    weight = tf.stop_gradient(tf.ensure_shape(tf.convert_to_tensor(weight), []))
    if weight.dtype not in (tf.float32, tf.float64):
        weight = tf.cast(weight, tf.float32)
    return keep_if(present, tf.where(weight < 0, tf.constant(math.nan, weight.dtype), weight))


def keep_if(present: tf.Tensor | None, value: tf.Tensor) -> tf.Tensor:
    """Returns ``value`` if ``present`` is True or None, and zeros otherwise."""
    if present is None:
        return value
    return tf.where(present, value, tf.zeros_like(value))


class ForwardPass(NamedTuple):
    """The results of the forward hooks for a replica's batch.

    Attributes:
        objectives: the objectives by name; in a turn, only the objective of that turn
        output: the output of the model
        batch: the batch itself
        loss: the value that ``train_loss`` returned
        weight: the value that ``batch_weight`` returned, a scalar; None without that hook
        is_weighted: whether ``grad_pre`` multiplied the loss by the sample weights of the batch
        total_weight: the sum of the weights of all shares, by which the objectives were divided;
            None if they still have to be divided
    """

    objectives: dict[str, ReplicaObjective]
    output: ModelOutput
    batch: Batch
    loss: Structure
    weight: tf.Tensor | None
    is_weighted: bool
    total_weight: tf.Tensor | None = None


# A function that computes the weight of a share from the output of the model.
WeighOutput: TypeAlias = Callable[[ModelOutput], ShareWeight]


def compute_objectives(
    context: ForwardContext,
    batch: Batch,
    examples: Count,
    rows: Count | None = None,
    present: tf.Tensor | None = None,
    weigh: WeighOutput | None = None,
) -> ForwardPass:
    """Runs the model and the loss on a replica's batch, then ``grad_pre`` on their results.

    Args:
        context: the context of the step, or of a turn within it
        batch: the batch of the replica
        examples: the number of examples in the global batch
        rows: the number of rows of the replica, see ``batches.Share``
        present: whether the replica has rows, see ``batches.Share``
        weigh: returns the weight of the share if the objectives are divided by the weights of all
            shares; otherwise None
    """
    shape = context.components.shape
    output = run_model(context, batch, training=True)
    loss = compute_loss(context, batch, output, training=True)
    total_weight = None
    if weigh is None:
        weight = weigh_batch(context, batch, output, present)
    else:
        weight, total_weight = weigh(output)
    total_size = examples
    share_size: Count | float
    if weight is not None:
        share_size = weight
        total_size = shape.batch
        if total_weight is not None:
            total_size = total_weight
    elif rows is not None:
        share_size = rows
    else:
        share_size = examples / shape.leaves
    with note_weighted() as sample_weights:
        returned = call_grad_pre(context, batch, output, loss)
    objectives = {}
    for name, objective in returned.items():
        total = sum_loss(context.components, objective.loss_per_batch, batch)
        extra = tf.cast(share_size, total.dtype) * tf.cast(objective.extra_loss, total.dtype)
        value = _divide(total + extra, tf.cast(total_size, total.dtype), total_weight)
        loss_shape = getattr(objective.loss_per_batch, "shape", tf.TensorShape([]))
        objectives[name] = ReplicaObjective(
            keep_if(present, value),
            list(objective.variables),
            dict(objective.logged),
            is_scalar=loss_shape.rank == 0,
            has_unchanged_loss=objective.loss_per_batch is loss,
        )
    return ForwardPass(
        objectives,
        output,
        batch,
        loss,
        weight,
        is_weighted=uses_weights(batch, sample_weights),
        total_weight=total_weight,
    )


def _divide(value: tf.Tensor, total_size: tf.Tensor, total_weight: tf.Tensor | None) -> tf.Tensor:
    """Divides an objective; returns 0 if it is divided by weights that are all 0."""
    if total_weight is None:
        return value / total_size
    return tf.math.divide_no_nan(value, total_size)


def call_grad_pre(
    context: ForwardContext, batch: Batch, output: ModelOutput, loss: Structure
) -> dict[str, Objective]:
    """Calls ``grad_pre``.

    Returns:
        The objectives by name; in a turn, only the objective of that turn.
    """
    hook = context.hooks.grad_pre
    returned = hook.trace(loss=loss, output=output, batch=batch, **context.hook_values())
    turn_objective = context.objective
    if not isinstance(returned, dict):
        name = SINGLE_OBJECTIVE if turn_objective is None else turn_objective
        return {name: Objective(*returned)}
    if turn_objective is None:
        return {name: Objective(*objective) for name, objective in returned.items()}
    if turn_objective not in returned:
        raise hook.reject(f"returned {list(returned)} in the turn of '{turn_objective}'.")
    return {turn_objective: Objective(*returned[turn_objective])}


def forward_backward(
    context: StepContext, examples: Count, kept: frozenset[str], share: Share
) -> tuple[Contribution, VariablesByObjective]:
    """Computes the objectives of one leaf and their gradients, and updates the training metrics.

    This function does not sum over leaves. It writes no variables other than those of metrics, and
    those that the forward pass and the backward pass write.

    Args:
        context: the context of the step, or of a turn within it
        examples: the number of examples in the global batch
        kept: the values to return besides the gradients: any of ``output`` and ``batch``
        share: the replica's share of a micro-batch

    Returns:
        The contribution of the share, and the variables of the gradients by objective.
    """
    components = context.components
    weigh = _choose_weigh(context, share)
    with enter_share(context, share):
        is_persistent = len(components.optimizers) > 1
        with tf.GradientTape(persistent=is_persistent) as tape:
            forward = compute_objectives(
                context, share.batch, examples, share.rows, share.present, weigh
            )
            scaled = {
                name: _scale_loss(components, objective.value)
                for name, objective in forward.objectives.items()
            }
        gradients: GradientsByObjective = {}
        variables: VariablesByObjective = {}
        for name, objective in forward.objectives.items():
            all_gradients = tape.gradient(scaled[name], objective.variables)
            gradients[name], variables[name] = _leave_out_unused(
                context, all_gradients, objective.variables
            )
        update_train_metrics(context, forward, share.present)
    weight = []
    if forward.total_weight is not None:
        gradients = _check_total_weight(gradients, forward.total_weight)
    elif forward.weight is not None:
        weight.append(forward.weight / components.shape.batch)
    contribution = Contribution(
        loss={name: objective.value for name, objective in forward.objectives.items()},
        gradients=gradients,
        weight=weight,
        output=[split_constants(forward.output)] if "output" in kept else [],
        batch=[forward.batch] if "batch" in kept else [],
        changes=[],
        differences=[],
    )
    return contribution, variables


@contextlib.contextmanager
def enter_share(context: ForwardContext, share: Share) -> Iterator[None]:
    """Enters the contexts in which hooks compute a share.

    In them, means over the replicas are weighted by rows, and ``row_offset`` is the position of the
    share.
    """

    def find_offset() -> tf.Tensor:
        rows: Count | None = share.rows
        if rows is None:
            rows = context.components.count_examples(share.batch)
        return find_offset_in_share(rows, share.together)

    with weigh_by_rows(share.rows, share.present, share.together), place_rows(find_offset):
        yield


def weigh_share(context: ForwardContext, share: Share) -> tf.Tensor:
    """Returns the weight of a share before the forward pass; the hook takes no ``output``."""
    with enter_share(context, share):
        weight = weigh_batch(context, share.batch, None, share.present)
    assert weight is not None
    return weight


def _choose_weigh(context: StepContext, share: Share) -> WeighOutput | None:
    """Returns the function that weighs a share; None if the division follows the backward pass."""
    if share.weight is not None:
        known_weight = share.weight
        return lambda _: known_weight
    if choose_division(context) is not Division.BEFORE_BACKWARD:
        return None

    def weigh(output: ModelOutput) -> ShareWeight:
        weight = weigh_batch(context, share.batch, output, share.present)
        assert weight is not None  # there is a ``batch_weight``
        return ShareWeight(weight, sum_over_replicas(weight, context.components.shape.replicas))

    return weigh


def _check_total_weight(
    gradients: GradientsByObjective, total_weight: tf.Tensor
) -> GradientsByObjective:
    """Returns zeros if the weights of all shares are 0, and NaN if one of them is negative.

    A gradient function of the user might return other numbers if it receives 0 or NaN.
    """
    nothing = tf.zeros_like(total_weight)
    no_change = tf.ones_like(total_weight)
    factor = tf.where(total_weight == 0, nothing, tf.where(total_weight > 0, no_change, math.nan))
    return multiply(gradients, factor)  # type: ignore[no-any-return]


def _scale_loss(components: Components, loss: tf.Tensor) -> tf.Tensor:
    """Multiplies a loss by the loss scale, if there is one."""
    if components.loss_scale is None:
        return loss
    return tf.math.scalar_mul(tf.cast(components.loss_scale.value, loss.dtype), loss)


def _leave_out_unused(
    context: ForwardContext, gradients: list[Gradient | None], variables: list[Variable]
) -> tuple[Gradients, list[Variable]]:
    """Returns the gradients that are not None, and their variables.

    Warns about the other variables, because the loss does not depend on them.
    """
    kept_gradients = []
    kept_variables = []
    unused = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None:
            unused.append(name_variable(variable))
        else:
            kept_gradients.append(fix_sparse_shape(gradient, variable))
            kept_variables.append(variable)
    # In a quiet step, the model may take a different branch than in training, so do not warn about
    # unused variables.
    if unused and not context.quiet:
        names = ", ".join(unused[:5])
        if len(unused) > 5:
            names += " and others"
        message = f"the loss does not depend on {names}, so they are not updated."
        if not kept_gradients:
            raise context.hooks.grad_pre.reject(message)
        warn(message)
    return kept_gradients, kept_variables


def fix_sparse_shape(gradient: Gradient, variable: Variable) -> Gradient:
    """Returns a gradient; if it is sparse, it gets the static shape of its variable.

    XLA requires a static shape.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.constant(tuple(variable.shape), gradient.indices.dtype)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def fix_shape(gradient: Gradient, variable: Variable) -> Gradient:
    """Returns a gradient, sparse or not, with the static shape of its variable."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.ensure_shape(gradient.values, [None, *variable.shape[1:]])
        return fix_sparse_shape(tf.IndexedSlices(values, gradient.indices), variable)
    if gradient.shape.is_fully_defined():
        return gradient
    return tf.ensure_shape(gradient, variable.shape)
