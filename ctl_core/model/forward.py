"""What one replica does with its share of a batch: forward, loss, gradients.

The graph hooks are called here, in the order of the step; everything runs while a graph is traced.
What they return that would train another model than it seems is refused, in one line; what is not
of the right kind is refused when a hook is called, see hooks/load.py.
"""

import dataclasses
import inspect
import math
from typing import Any

import keras
import tensorflow as tf

from ctl_core.cluster.collectives import weigh_by_rows
from ctl_core.compat import run_layers
from ctl_core.hooks.hooks import Hook, describe
from ctl_core.input.batches import keep_rows_if
from ctl_core.model.metrics import update_train_metrics
from ctl_core.model.parts import Parts
from ctl_core.numerics.reduction import PIECES, multiply
from ctl_core.numerics.variables import cast_to_float32, name_variable
from ctl_core.run.console import warn
from ctl_core.run.errors import CtlError, HookFailed, SetupError, read_frames


@dataclasses.dataclass(frozen=True)
class TracedObjective:
    """What one micro-batch contributes to one objective.

    Attributes:
        value: (sum(loss_per_batch) + rows extra_loss) / examples, a scalar; with a weight w of the
            batch (sum(loss_per_batch) + w extra_loss) / B, still to be divided by sum(w) / B
        variables: that are trained, those of frozen layers left out
        parts: of the loss, by name
        is_scalar: whether loss_per_batch is one number
    """

    value: tf.Tensor
    variables: list[Any]
    parts: dict[str, Any]
    is_scalar: bool


def run_model(parts: Parts, batch: Any, training: bool) -> Any:
    """Returns the model's output for a batch, in float32 where precision is lower."""
    hook, model = parts.choose_model(training)
    training = training and not parts.quiet
    inputs = parts.hooks.input_pre.trace(batch=batch, training=training, **parts.values())
    return cast_to_float32(call_made(hook, call_model, model, inputs, training))


def compute_loss(parts: Parts, batch: Any, output: Any, training: bool) -> Any:
    """Returns what ``train_loss`` makes of the model's output, in float32."""
    hooks, training = parts.hooks, training and not parts.quiet
    values = {"batch": batch, "training": training, **parts.values()}
    loss_input = hooks.loss_pre.trace(output=output, **values)
    return cast_to_float32(
        call_made(hooks.create_loss, call_trained, parts.train_loss, loss_input, training)
    )


def call_made(hook: Hook, function: Any, *args: Any) -> Any:
    """Calls what a create hook returned; a failure names that hook."""
    try:
        return function(*args)
    except CtlError:
        raise
    except Exception as error:
        raise HookFailed(hook.describe_failure(error)) from error


def call_model(model: Any, inputs: Any, training: bool) -> Any:
    """Calls the model; with ``training`` run also layers that it is a function around."""
    with run_layers(training):
        return call_trained(model, inputs, training)


def call_trained(function: Any, inputs: Any, training: bool) -> Any:
    """Calls a model, or a loss, with ``training`` where it takes that argument."""
    if isinstance(function, keras.Layer) or "training" in inspect.signature(function).parameters:
        return function(inputs, training=training)
    return function(inputs)


def sum_loss(parts: Parts, loss: Any, batch: Any) -> tf.Tensor:
    """Returns the sum of a loss over a batch: of one number per example, or of the sum itself.

    Raises:
        SetupError: the loss has another shape or type.
    """
    create_loss = parts.hooks.create_loss
    if isinstance(loss, dict):
        raise create_loss.reject("the loss is a dict; return the sum of its parts.")
    loss = tf.convert_to_tensor(loss)
    examples = parts.count_examples(batch)
    shape = [examples if isinstance(examples, int) else None]
    fits = loss.shape.rank == 0 or loss.shape.is_compatible_with(shape)
    if not fits and (op := find_broadcast(loss.graph)) is not None:
        shapes = " and ".join(str(value.shape.as_list()) for value in op.inputs)
        raise SetupError(
            f"{create_loss.locate(read_frames(op))}: {op.type} of the shapes {shapes} compares "
            "each example with every other; give both one shape, by tf.squeeze(output, -1), say."
        )
    if not fits or not loss.dtype.is_floating:
        raise create_loss.reject(
            f"the loss is {describe(loss)}; expected floating-point numbers, one per example "
            f"(shape [{shape[0] or 'batch'}]) or their sum (shape []); batch_weight says what "
            "divides it."
        )
    return tf.reduce_sum(cast_to_float32(loss))


def find_broadcast(graph: tf.Graph) -> Any:
    """Returns the last op that has made [b, b] of [b, 1] and [b]; None: there is none."""
    for op in reversed(graph.get_operations()):
        shapes = [value.shape.as_list() for value in op.inputs if value.shape.rank is not None]
        if len(shapes) == 2:
            row, column = sorted(shapes, key=len)
            if len(row) == 1 and column == [*row, 1]:
                return op
    return None


def weigh_batch(
    parts: Parts, batch: Any, output: Any, present: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns what ``batch_weight`` says that a replica's batch weighs; None without that hook.

    A negative weight would turn gradients round: it becomes NaN, which makes the loss NaN.
    """
    hook = parts.hooks.batch_weight
    if hook is None:
        return None
    weight = hook.trace(batch=batch, output=output, **parts.values())
    weight = tf.stop_gradient(tf.ensure_shape(tf.convert_to_tensor(weight), []))
    if weight.dtype not in (tf.float32, tf.float64):
        weight = tf.cast(weight, tf.float32)
    return keep_if(present, tf.where(weight < 0, tf.constant(math.nan, weight.dtype), weight))


def keep_if(present: tf.Tensor | None, value: tf.Tensor) -> tf.Tensor:
    """Returns a value, or zero on a replica that has no rows."""
    return value if present is None else tf.where(present, value, tf.zeros_like(value))


def compute_objectives(
    parts: Parts, batch: Any, examples: Any, rows: Any = None, present: tf.Tensor | None = None
) -> tuple[dict[str, TracedObjective], dict[str, Any]]:
    """Runs the model and the loss on a replica's batch, and ``grad_pre`` on what they give.

    Args:
        parts: of the step; in a turn, other objectives are left out
        batch, rows, present: of the replica, see ``batches.Share``
        examples: how many examples the global batch has

    Returns:
        The objectives by name; and what they were made of: output, batch, loss and weight.
    """
    hook, turn = parts.hooks.grad_pre, parts.objective
    output = run_model(parts, batch, training=True)
    loss = compute_loss(parts, batch, output, training=True)
    weight = weigh_batch(parts, batch, output, present)
    own, whole = examples / parts.shape.shares if rows is None else rows, examples
    if weight is not None:
        own, whole = weight, parts.shape.batch
    values = {"loss": loss, "output": output, "batch": batch, **parts.values()}
    returned = hook.trace(**values)
    named = returned if isinstance(returned, dict) else {turn or "": returned}
    if turn is not None:
        if turn not in named:
            raise hook.reject(f"returned {list(named)} in the turn of '{turn}'.")
        named = {turn: named[turn]}
    found = {}
    for name, (loss_per_batch, extra_loss, variables, *loss_parts) in named.items():
        total = sum_loss(parts, loss_per_batch, batch)
        extra = tf.cast(own, total.dtype) * tf.cast(extra_loss, total.dtype)
        value = keep_if(present, (total + extra) / tf.cast(whole, total.dtype))
        is_scalar = getattr(loss_per_batch, "shape", tf.TensorShape([])).rank == 0
        found[name] = TracedObjective(value, list(variables), dict(*loss_parts), is_scalar)
    return found, {"output": output, "batch": batch, "loss": loss, "weight": weight}


def forward_backward(
    parts: Parts, examples: Any, kept: frozenset[str], share: tuple[Any, ...]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Differentiates the share of one replica in a micro-batch; nothing is summed or updated yet.

    Args:
        examples: how many examples the global batch has
        kept: which of ``output`` and ``batch`` are needed afterwards
        share: the fields of a ``batches.Share``

    Returns:
        ``loss`` and ``gradients``, dicts by objective, and what is kept, in lists; with a weight
        also ``weight``, what the batch weighs divided by B. With a loss scale the gradients are
        those of the scaled objectives. And by objective the variables that have a gradient.
    """
    batch, rows, present, together = share
    scale = parts.loss_scale
    with weigh_by_rows(rows, present, together):
        with tf.GradientTape(persistent=len(parts.optimizers) > 1) as tape:
            objectives, made = compute_objectives(parts, batch, examples, rows, present)
            scaled = {
                name: one.value if scale is None else multiply(one.value, scale.value)
                for name, one in objectives.items()
            }
        pairs = {
            name: _leave_out_idle(parts, tape.gradient(scaled[name], one.variables), one.variables)
            for name, one in objectives.items()
        }
        loss_parts = {key: v for one in objectives.values() for key, v in one.parts.items()}
        update_train_metrics(parts, loss_parts, made, present)
    found = {
        "loss": {name: one.value for name, one in objectives.items()},
        "gradients": {name: [g for g, _ in several] for name, several in pairs.items()},
        **{name: [made[name]] for name in kept},
    }
    if made["weight"] is not None:
        found["weight"] = made["weight"] / parts.shape.batch
    return found, {name: [v for _, v in several] for name, several in pairs.items()}


def _leave_out_idle(parts: Parts, gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Returns gradients of known shape with their variables, but for what a loss does not need."""
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    idle = [name_variable(v) for g, v in zip(gradients, variables, strict=True) if g is None]
    if idle and not parts.quiet:  # then another part of the model may have run
        more = " and others" if len(idle) > 5 else ""
        said = f"the loss does not depend on {', '.join(idle[:5])}{more}: not updated."
        if not pairs:
            raise parts.hooks.grad_pre.reject(said)
        warn(said)
    for number, (gradient, variable) in enumerate(pairs):
        if isinstance(gradient, tf.IndexedSlices):  # whose shape XLA has to know
            shape = tf.constant(tuple(variable.shape), gradient.indices.dtype)
            pairs[number] = tf.IndexedSlices(gradient.values, gradient.indices, shape), variable
    return pairs


def settle_written(
    parts: Parts,
    contributed: dict[str, Any],
    before: list[tf.Tensor],
    rows: tf.Tensor,
    present: tf.Tensor | None,
    together: tf.Tensor,
) -> dict[str, Any]:
    """Lets what a micro-batch has written count by the rows of the replica; a stand-in's does not.

    Moving statistics of each replica's own batch are averaged over the replicas: with r of R rows
    on one of N replicas, they move N r / R times as far, so that each example has the same part.
    What is written from what replicas exchange is the same on all of them that have rows: one that
    has none gets what the first has, which has some if any has.

    Args:
        contributed: what ``forward_backward`` returned; returned without rows of a stand-in
        before: what the written variables held before it
        rows, present, together: see ``batches.Share``
    """
    ratio = tf.cast(parts.shape.replicas * rows, tf.float32)
    ratio = tf.math.divide_no_nan(ratio, tf.cast(together, tf.float32))
    for one, value in zip(parts.written, before, strict=True):
        after = one.variable.read_value()
        if one.furthest is not None:
            length = tf.cast(tf.minimum(ratio, one.furthest), after.dtype)
            after = tf.where(ratio == 1.0, after, value + length * (after - value))
        one.variable.assign(tf.where(rows > 0, after, value))
    if present is None:
        return contributed
    context = tf.distribute.get_replica_context()
    if shared := [one.variable for one in parts.written if one.is_shared]:
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        values = [keep_if(is_first, one.read_value()) for one in shared]
        # TensorFlow sums int32 on the host, and nothing else together with it.
        values = [tf.cast(one, tf.int64) if one.dtype == tf.int32 else one for one in values]
        firsts = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
        for variable, first in zip(shared, firsts, strict=True):
            value = variable.read_value()
            variable.assign(tf.where(present, value, tf.cast(first, value.dtype)))
    cut = {name: keep_rows_if(present, contributed[name]) for name in PIECES if name in contributed}
    return {**contributed, **cut}
