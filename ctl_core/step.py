"""One training step on one replica: forward, loss, gradients, their sum, the update.

The graph hooks are called here, in the order of the step. That a step may be made of several
micro-batches is accumulate.py's part; the outer loop, and the hooks that run on the host, are
trainer.py's.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checks.data import examples_in
from ctl_core.checks.returned import check_update, expect, kind_of, names_of, without_gradient_kind
from ctl_core.compat import GraphWriter, gradients_are_summed, optimizers_refused
from ctl_core.errors import CtlError, HookFailed, SetupError
from ctl_core.hooks import Hook, Hooks, describe
from ctl_core.numerics.learning_rate import Rate
from ctl_core.numerics.precision import LossScale, all_finite, to_float32
from ctl_core.run_state.tracking import find, variable_name
from ctl_core.types import Loss, Model, Optimizer


@dataclasses.dataclass
class Parts:
    """What the step is made of, and the hooks are given.

    Attributes:
        hooks: the hooks
        train_model, train_loss, optimizer: as the create hooks returned them
        lr: the learning rate that the optimizer uses
        optimizers: the optimizer by objective; a single one under ""
        batch_size: global batch size B
        replicas: N, over all processes
        accumulate_steps: A, micro-batches in an update
        jit_compile: whether forward and backward pass are compiled with XLA
        loss_scale: what objectives are multiplied by; only in float16
        notes_losses: whether losses that are not finite are noted
        without_gradient: names of variables that the loss does not depend on, found in tracing
        scalar_losses: the objectives whose loss is one number, found in tracing
        trained: by objective, the variables that it does depend on, found in tracing
    """

    hooks: Hooks
    train_model: Model
    train_loss: Loss
    lr: Rate
    optimizer: Any
    optimizers: dict[str, Optimizer]
    batch_size: int
    replicas: int
    accumulate_steps: int = 1
    jit_compile: bool = False
    loss_scale: LossScale | None = None
    notes_losses: bool = False
    without_gradient: list[str] = dataclasses.field(default_factory=list)
    scalar_losses: set[str] = dataclasses.field(default_factory=set)
    trained: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def micro_batch_size(self) -> int:
        """How many examples a replica takes at once: B / (N A)."""
        return self.batch_size // (self.replicas * self.accumulate_steps)

    def given(self) -> dict[str, Any]:
        """The objects that every hook of the step may name."""
        return {"train_model": self.train_model, "train_loss": self.train_loss, "lr": self.lr}


def forward(parts: Parts, batch: Any, training: bool) -> tuple[Any, Any]:
    """Runs the model and the loss on one replica's batch; returns what both give."""
    output = run_model(parts, batch, training)
    return output, loss_of(parts, batch, output)


def run_model(parts: Parts, batch: Any, training: bool) -> Any:
    """Returns the model's output, in float32 where precision is lower."""
    hooks = parts.hooks
    inputs = hooks.input_pre.in_graph(batch=batch, lr=parts.lr)
    output = _blamed(
        hooks.create_model, "train_model", call_model, parts.train_model, inputs, training
    )
    return to_float32(output)


def loss_of(parts: Parts, batch: Any, output: Any) -> Any:
    """Returns what ``train_loss`` makes of the model's output, in float32 where that is lower."""
    hooks = parts.hooks
    loss_input = hooks.loss_pre.in_graph(output=output, batch=batch, **parts.given())
    return to_float32(_blamed(hooks.create_loss, "train_loss", parts.train_loss, loss_input))


def call_model(model: Any, inputs: Any, training: bool) -> Any:
    """Calls the model, with ``training`` where it takes that argument."""
    if isinstance(model, keras.Layer) or "training" in inspect.signature(model).parameters:
        return model(inputs, training=training)
    return model(inputs)


def _blamed(hook: Hook, what: str, function: Any, *args: Any) -> Any:
    """Calls what a create hook returned; a failure names that hook."""
    try:
        return function(*args)
    except CtlError:
        raise
    except Exception as error:
        raise HookFailed(f"{what} from {hook.failure(error)}") from error


def weight_of(parts: Parts, batch: Any, output: Any) -> tf.Tensor | None:
    """Returns what a replica's batch weighs, a floating-point scalar; None: its examples.

    No gradient goes through it.

    Raises:
        SetupError: ``batch_weight`` returned something else than one number from 0 up.
    """
    hook = parts.hooks.batch_weight
    if hook is None:
        return None
    value = hook.in_graph(batch=batch, output=output)
    try:
        weight = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        weight = None
    real = weight is not None and (weight.dtype.is_floating or weight.dtype.is_integer)
    scalar = real and weight.shape.rank in (0, None)
    fixed = tf.get_static_value(weight) if scalar else None
    if not scalar or (fixed is not None and not fixed >= 0):
        got = kind_of(value) if weight is None else describe(weight) if fixed is None else fixed
        raise SetupError(
            f"batch_weight ({hook.where}): returned {got}, expected how much the batch weighs, one "
            "number from 0 up, such as tf.reduce_sum(mask)."
        )
    weight = tf.stop_gradient(tf.ensure_shape(weight, []))
    return weight if weight.dtype in (tf.float32, tf.float64) else tf.cast(weight, tf.float32)


def objectives(
    parts: Parts, batch: Any, output: Any, loss: Any, weight: tf.Tensor | None = None
) -> dict[str, tuple[tf.Tensor, list[Any]]]:
    """Calls ``grad_pre`` and works out what this micro-batch contributes to each objective.

    Returns:
        By objective: sum(loss_per_batch) / B + extra_loss / (N A), and the variables, of which
        there are none where all are frozen. With a weight w the former is (sum(loss_per_batch) +
        w extra_loss) / B, still to be divided by sum(w) / B.

    Raises:
        SetupError: ``grad_pre`` returned something else than it should.
    """
    hook = parts.hooks.grad_pre
    result = hook.in_graph(loss=loss, output=output, batch=batch, **parts.given())
    named = result if isinstance(result, dict) else {"": result}
    if set(named) != set(parts.optimizers):
        raise SetupError(
            f"grad_pre ({hook.where}): returned the objectives {names_of(named)}, but create_opt "
            f"the optimizers {names_of(parts.optimizers)}; the names must be the same."
        )
    found = {}
    for name, values in named.items():
        where = f"grad_pre ({hook.where})" + (f"['{name}']" if name else "")
        loss_per_batch, extra_loss, variables = expect(
            values, ("loss_per_batch", "extra_loss", "trainable_vars"), where
        )
        total = batch_sum(loss_per_batch, batch, parts)
        if tf.convert_to_tensor(loss_per_batch).shape.rank == 0:
            parts.scalar_losses.add(name)
        extra = extra_term(parts, extra_loss, total.dtype, where)
        if not isinstance(variables, list | tuple):
            raise SetupError(
                f"{where}: trainable_vars must be a list of variables, got {kind_of(variables)}."
            )
        for variable in variables:
            if kind := without_gradient_kind(variable):
                raise SetupError(
                    f"{where}: trainable_vars has {variable_name(variable)} of type {kind}, which "
                    "has no gradient; leave it out."
                )
        if weight is None:
            shares = parts.replicas * parts.accumulate_steps
            objective = total / parts.batch_size + extra / shares
        else:
            objective = (total + tf.cast(weight, total.dtype) * extra) / parts.batch_size
        found[name] = (objective, list(variables))
    if not any(variables for _, variables in found.values()):
        raise SetupError(
            f"grad_pre ({hook.where}): returned no trainable_vars; there is nothing to train."
        )
    return found


def extra_term(parts: Parts, extra_loss: Any, dtype: tf.DType, where: str) -> tf.Tensor:
    """Returns an extra loss as a scalar of a type.

    Raises:
        SetupError: it has another shape; a layer is named that has added a loss of such a shape.
    """
    extra = tf.cast(tf.convert_to_tensor(extra_loss, dtype_hint=dtype), dtype)
    if extra.shape.rank in (0, None):
        return extra
    for layer in reversed(find({"": parts.train_model}).layers):  # the inner ones first
        for added in layer.losses:
            if tf.is_tensor(added) and added.shape.rank not in (0, None):
                raise SetupError(
                    f"create_model ({parts.hooks.create_model.where}): the layer {layer.path} adds "
                    f"a loss of shape {added.shape} by add_loss; expected one number, such as "
                    "the mean over its batch: self.add_loss(tf.reduce_mean(loss))."
                )
    raise SetupError(f"{where}: extra_loss must be a scalar, got shape {extra.shape}.")


def batch_sum(loss: Any, batch: Any, parts: Parts) -> tf.Tensor:
    """Returns the sum of a loss over the replica's batch.

    Args:
        loss: a scalar, which is taken as the sum, or one number per example

    Raises:
        SetupError: the loss has another shape.
    """
    create_loss = f"create_loss ({parts.hooks.create_loss.where})"
    try:
        loss = tf.convert_to_tensor(loss)
    except (TypeError, ValueError):
        raise SetupError(
            f"{create_loss}: the loss is {kind_of(loss)}; expected one number per example, or "
            "their sum."
        ) from None
    rank = loss.shape.rank
    examples = examples_in(parts.hooks.count_examples, batch)
    length = loss.shape[0] if rank == 1 else None
    wrong_length = isinstance(examples, int) and length is not None and length != examples
    if rank not in (0, 1, None) or wrong_length or not loss.dtype.is_floating:
        raise SetupError(
            f"{create_loss}: the loss has shape {loss.shape} and "
            f"type {loss.dtype.name}; expected floating-point numbers, one per example "
            f"(shape [{examples if isinstance(examples, int) else 'batch'}]) or their sum (shape "
            "[]); sum or average over the other dimensions in create_loss. What the sum is divided "
            "by, if not by the examples, is for the hook batch_weight to say."
        )
    return tf.reduce_sum(to_float32(loss))


def contribution(parts: Parts, batch: Any, kept: frozenset[str]) -> dict[str, Any]:
    """Differentiates one micro-batch of this replica; nothing is summed or updated yet.

    Runs in a replica context, while a graph is traced, as ``update`` does.

    Args:
        parts: what the step is made of
        batch: one element of the dataset, B / (N A) examples
        kept: which of ``output`` and ``batch`` the update will need

    Returns:
        ``loss`` and ``gradients``, dicts by objective, and what is kept; with ``batch_weight`` also
        ``weight``, what the batch weighs divided by B. With a loss scale the gradients are those of
        the scaled objectives.
    """
    if parts.accumulate_steps > 1:
        with optimizers_refused(_IN_MICRO_BATCH):
            return _contribution_of(parts, batch, kept)
    return _contribution_of(parts, batch, kept)


_IN_MICRO_BATCH = (
    "grad_pre: applies an optimizer by itself, which with accumulate_steps would be once for each "
    "micro-batch; make it an objective of its own (create_opt and grad_pre return dicts with the "
    "same names), or leave out accumulate_steps."
)


def _contribution_of(parts: Parts, batch: Any, kept: frozenset[str]) -> dict[str, Any]:
    if not parts.jit_compile:
        return _contribution(parts, batch, kept)

    # A function of its own for each replica and each graph: a cached trace of another replica
    # would hold that replica's variables.
    @tf.function(jit_compile=True, autograph=False)
    def compiled(one: Any) -> dict[str, Any]:
        with GraphWriter(_no_summaries).as_default():
            return _contribution(parts, one, kept)

    return compiled(batch)  # type: ignore[no-any-return]


def _no_summaries() -> None:
    raise ValueError(
        "tf.summary in a step that jit_compile compiles; write it in update_pre or a host hook, or "
        "leave out jit_compile"
    )


def _contribution(parts: Parts, batch: Any, kept: frozenset[str]) -> dict[str, Any]:
    several = len(parts.optimizers) > 1
    with tf.GradientTape(persistent=several) as tape:
        output, loss = forward(parts, batch, training=True)
        weight = weight_of(parts, batch, output)
        named = objectives(parts, batch, output, loss, weight)
        losses = {name: objective for name, (objective, _) in named.items()}
        scaled = losses
        if parts.loss_scale is not None:
            scaled = {name: parts.loss_scale.multiply(one) for name, one in losses.items()}
    gradients = {}
    for name, (_, variables) in named.items():
        found = tape.gradient(scaled[name], variables)
        gradients[name], parts.trained[name] = _existing(parts, found, variables)
    values = {"loss": losses, "gradients": gradients, "output": output, "batch": batch}
    found = {name: values[name] for name in ("loss", "gradients", *sorted(kept))}
    return found if weight is None else {**found, "weight": weight / parts.batch_size}


def update(parts: Parts, contributed: dict[str, Any], wanted: frozenset[str]) -> dict[str, Any]:
    """Makes one update of what this replica contributes: sum, ``update_pre``, optimizer.

    Gradients are summed over the replicas once, before ``update_pre``; the optimizer applies them
    without reducing again. With a loss scale it is the caller who calls ``apply``, if the update
    is finite: a replica cannot decide on its own.

    Args:
        parts: what the step is made of
        contributed: what ``contribution`` returned, or the sum of several
        wanted: names of the values to return, out of ``hooks.OBSERVED``; what is not wanted is
            not computed

    Returns:
        The wanted values by name: output and batch of this replica, the others reduced. With
        several objectives all but these two are dicts by objective. With a loss scale also
        ``finite``, a scalar bool that is the same on every replica, and ``updates``, for ``apply``.
    """
    hook = parts.hooks.update_pre
    with_loss = "loss" in wanted or "loss" in hook.arguments
    summed = _sum_over_replicas(parts, contributed, with_loss)
    where = f"update_pre ({hook.where})"
    updates: dict[str, list[Any]] = {}
    displays: dict[str, Any] = {}
    for name, gradients in summed["gradients"].items():
        if not gradients:  # all of this objective's variables are frozen
            updates[name], displays[name] = [], []
            continue
        values = {**contributed, "gradients": gradients, "loss": summed["loss"][name]}
        with gradients_are_summed():
            result = hook.in_graph(**values, optimizer=parts.optimizers[name], **parts.given())
        update, displays[name] = expect(result, ("update_gradients", "display_gradients"), where)
        check_update(update, parts.trained[name], where)
        updates[name] = list(update)
    values = {**contributed, **summed, "update_gradients": updates, "display_gradients": displays}
    found = {
        name: value[""] if name not in ("output", "batch") and "" in value else value
        for name, value in values.items()
        if name in wanted
    }
    if parts.loss_scale is not None:
        return {**found, "finite": all_finite(summed["gradients"]), "updates": updates}
    apply(parts, updates)
    return found


def apply(parts: Parts, updates: dict[str, list[Any]]) -> None:
    """Lets each objective's optimizer apply what ``update_pre`` returned for it, if anything."""
    for name, gradients in updates.items():
        pairs = list(zip(gradients, parts.trained[name], strict=True))
        optimizer = parts.optimizers[name]
        if not pairs:
            continue
        with gradients_are_summed():
            _blamed(parts.hooks.create_opt, "the optimizer", optimizer.apply_gradients, pairs)


def _existing(
    parts: Parts, gradients: list[Any], variables: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Leaves out the variables that the loss does not depend on, and notes their names."""
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    for gradient, variable in zip(gradients, variables, strict=True):
        name = variable_name(variable)
        if gradient is None and name not in parts.without_gradient:
            parts.without_gradient.append(name)
    if variables and not pairs:
        raise SetupError(
            f"grad_pre ({parts.hooks.grad_pre.where}): the loss depends on none of the "
            f"trainable_vars ({', '.join(variable_name(v) for v in variables[:5])})."
        )
    return [g for g, _ in pairs], [v for _, v in pairs]


def _sum_over_replicas(
    parts: Parts, contributed: dict[str, Any], with_loss: bool
) -> dict[str, Any]:
    """Sums gradients, and objectives if they are wanted, all of them in one all-reduce.

    The sums are those of the objectives, without their scale, divided by what the batch weighs.
    """
    names = {"gradients", "weight"} | ({"loss"} if with_loss else set())
    values = {name: part for name, part in contributed.items() if name in names}
    if parts.replicas > 1:
        context = tf.distribute.get_replica_context()
        if isinstance(context.strategy, tf.distribute.MultiWorkerMirroredStrategy):
            values = {name: tf.nest.map_structure(_of_fixed_shape, v) for name, v in values.items()}
        values = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
    gradients = {
        name: [_merge_rows(gradient) for gradient in several]
        for name, several in values["gradients"].items()
    }
    if parts.loss_scale is not None:
        gradients = {
            name: [parts.loss_scale.divide(gradient) for gradient in several]
            for name, several in gradients.items()
        }
    values = {"loss": contributed["loss"], **values, "gradients": gradients}
    if "weight" not in values:
        return values
    weight = values["weight"]
    return {
        name: tf.nest.map_structure(lambda value: _divided(value, weight), values[name])
        for name in ("loss", "gradients")
    }


def _divided(value: Any, weight: tf.Tensor) -> Any:
    """Divides a tensor, dense or sparse, by a number; 0 if that is 0."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(value.values, weight), value.indices, value.dense_shape)
    return tf.math.divide_no_nan(value, tf.cast(weight, value.dtype))


def _of_fixed_shape(gradient: Any) -> Any:
    """Returns a sparse gradient as a dense one, if the number of its rows may change.

    Between processes, sparse gradients are gathered, and the collective of a graph takes no other
    shape than that of its first step.
    """
    sparse = isinstance(gradient, tf.IndexedSlices)
    return (
        tf.convert_to_tensor(gradient) if sparse and gradient.values.shape[0] is None else gradient
    )


def _merge_rows(gradient: Any) -> Any:
    """Adds up the rows of a sparse gradient that belong to one index.

    Until then its norm is not the gradient's norm, and clipping would depend on how often an
    index occurs.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, rows = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, rows, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
