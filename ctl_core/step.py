"""One training step: forward, loss, gradients, their sum over the replicas, the update.

The graph hooks are called here, in the order of the step. ``train_step`` runs over all replicas,
the functions above it on one; all of them while a graph is traced. What a hook may return wrongly
is refused in checks/returned.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl_core.checks.examples import examples_in
from ctl_core.checks.returned import (
    check_update,
    checked_extra,
    checked_loss,
    checked_objectives,
    checked_weight,
    expect,
    not_negative,
    something,
)
from ctl_core.compat import gradients_are_summed, optimizers_refused, summaries_of_first_replica
from ctl_core.compiled import compiled
from ctl_core.context import StepContext
from ctl_core.errors import CtlError, HookFailed
from ctl_core.hooks import Hook
from ctl_core.metrics import update_loss_parts, update_train_metrics
from ctl_core.numerics.micro_batches import ONCE_IN_MICRO_BATCH, accumulate
from ctl_core.numerics.not_finite import found_nans, seen
from ctl_core.numerics.precision import all_finite, to_float32
from ctl_core.numerics.reduction import divide, for_optimizer, sum_over_replicas
from ctl_core.numerics.shares import of_share, weight_of_share
from ctl_core.run_state.tracking import plain_variable, variable_name
from ctl_core.training_mode import call, call_model
from ctl_core.types import Batches


def forward(context: StepContext, batch: Any, training: bool) -> tuple[Any, Any]:
    """Runs the model and the loss on one replica's batch; returns what both give."""
    output = run_model(context, batch, training)
    return output, loss_of(context, batch, output, training)


def model_input(context: StepContext, batch: Any, training: bool) -> Any:
    """Returns what the model is called with."""
    hook, values = context.hooks.input_pre, context.hook_arguments()
    return something(hook, hook.in_graph(batch=batch, training=training, **values), values)


def run_model(context: StepContext, batch: Any, training: bool, trained: bool = False) -> Any:
    """Returns the output, in float32 where precision is lower; ``trained``: of train_model."""
    inputs = model_input(context, batch, training)
    hook, what, model = context.model_for(training or trained)
    return to_float32(_attributed(hook, what, call_model, model, inputs, training))


def loss_of(context: StepContext, batch: Any, output: Any, training: bool) -> Any:
    """Returns what ``train_loss`` makes of the model's output, in float32 where that is lower."""
    hooks = context.hooks
    values = {"batch": batch, "training": training, **context.hook_arguments()}
    loss_input = hooks.loss_pre.in_graph(output=output, **values)
    loss_input = something(hooks.loss_pre, loss_input, values)
    loss = _attributed(
        hooks.create_loss, "train_loss", call, context.train_loss, loss_input, training
    )
    return to_float32(loss)


def _attributed(hook: Hook, what: str, function: Any, *args: Any) -> Any:
    """Calls what a create hook returned; a failure names that hook."""
    try:
        return function(*args)
    except CtlError:
        raise
    except Exception as error:
        raise HookFailed(f"{what} from {hook.failure(error)}") from error


def weight_of(context: StepContext, batch: Any, output: Any) -> tf.Tensor | None:
    """Returns what a replica's batch weighs, a floating-point scalar; None: its share of B.

    No gradient goes through it.
    """
    if (hook := context.hooks.batch_weight) is None:
        return weight_of_share(None)
    values = {"batch": batch, "output": output, **context.hook_arguments()}
    return weight_of_share(checked_weight(hook, hook.in_graph(**values)))


def batch_sum(context: StepContext, loss: Any, batch: Any) -> tf.Tensor:
    """Returns the sum of a loss over the replica's batch.

    Args:
        context: of the step
        loss: a scalar, which is taken as the sum, or one number per example
        batch: whose examples they are
    """
    hooks = context.hooks
    loss = checked_loss(hooks.create_loss, loss, examples_in(hooks.count_examples, batch))
    return tf.reduce_sum(to_float32(loss))


def objectives(
    context: StepContext, batch: Any, output: Any, loss: Any, weight: tf.Tensor | None = None
) -> dict[str, tuple[tf.Tensor, list[Any], dict[str, Any]]]:
    """Calls ``grad_pre`` and works out what this micro-batch contributes to each objective.

    Returns:
        By objective: sum(loss_per_batch) / B + extra_loss / (N A); the variables, of which there
        are none where all are frozen; and the parts of the loss by name. With a weight w the first
        is (sum(loss_per_batch) + w extra_loss) / B, still to be divided by sum(w) / B.
    """
    hooks = context.hooks
    result = hooks.grad_pre.in_graph(
        loss=loss, output=output, batch=batch, **context.hook_arguments()
    )
    found = {}
    several = checked_objectives(
        hooks.grad_pre, result, context.optimizers, objective=context.objective
    )
    for name, where, (loss_per_batch, extra_loss, variables, parts) in several:
        total = batch_sum(context, loss_per_batch, batch)
        if tf.convert_to_tensor(loss_per_batch).shape.rank == 0:
            context.scalar_losses.add(name)
        extra = checked_extra(
            hooks.create_model, context.train_model, extra_loss, total.dtype, where
        )
        if weight is None:
            shares = context.replicas * context.accumulate_steps
            objective = total / context.batch_size + extra / shares
        else:
            objective = of_share(total + tf.cast(weight, total.dtype) * extra) / context.batch_size
        found[name] = (objective, list(variables), parts)
    return found


def forward_backward(context: StepContext, batch: Any, kept: frozenset[str]) -> dict[str, Any]:
    """Differentiates one micro-batch of this replica; nothing is summed or updated yet.

    Args:
        context: of the step
        batch: one element of the dataset, B / (N A) examples
        kept: which of ``output`` and ``batch`` the update will need

    Returns:
        ``loss`` and ``gradients``, dicts by objective, and what is kept; with a weight also
        ``weight``, what the batch weighs divided by B. With a loss scale the gradients are those of
        the scaled objectives.
    """
    scale = context.loss_scale
    with tf.GradientTape(persistent=len(context.optimizers) > 1 or bool(context.look)) as tape:
        output, loss = forward(context, batch, training=True)
        weight = weight_of(context, batch, output)
        named = objectives(context, batch, output, loss, weight)
        scaled = {
            name: objective if scale is None else scale.multiply(objective)
            for name, (objective, *_) in named.items()
        }
    if context.look is not None:
        context.look(tape, scaled)
    gradients = {}
    for name, (_, variables, parts) in named.items():
        found = tape.gradient(scaled[name], variables)
        gradients[name], context.trained[name] = _existing(context, found, variables)
        update_loss_parts(context, parts, batch)
    update_train_metrics(context, batch, output, loss)
    losses = {name: objective for name, (objective, *_) in named.items()}
    values = {"loss": losses, "gradients": gradients, "output": output, "batch": batch}
    returned = {name: values[name] for name in ("loss", "gradients", *sorted(kept))}
    if weight is None:
        return returned
    if context.accumulate_steps > 1:  # in their sum, a negative one would not show
        weight = not_negative(weight)
    return {**returned, "weight": weight / context.batch_size}


def _existing(
    context: StepContext, gradients: list[Any], variables: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Leaves out the variables that the loss does not depend on, and notes their names."""
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    for gradient, variable in zip(gradients, variables, strict=True):
        name = variable_name(variable)
        if gradient is None and name not in context.without_gradient:
            context.without_gradient.append(name)
    if variables and not pairs:
        raise context.hooks.grad_pre.reject(
            "the loss depends on none of the trainable_vars "
            f"({', '.join(variable_name(v) for v in variables[:5])})."
        )
    return [g for g, _ in pairs], [v for _, v in pairs]


def apply_update(
    context: StepContext, contributed: dict[str, Any], fetches: frozenset[str]
) -> dict[str, Any]:
    """Makes one update of what this replica contributes: sum, ``update_pre``, optimizer.

    Gradients are summed over the replicas once, before ``update_pre``; the optimizer applies them
    without reducing again. With a loss scale it is the caller who calls ``apply_gradients``, if the
    update is finite: a replica cannot decide on its own.

    Args:
        context: of the step
        contributed: what ``forward_backward`` returned, or the sum of several
        fetches: names of the values to return, out of ``table.OBSERVED``; what is not fetched is
            not computed

    Returns:
        The fetched values by name: output and batch of this replica, the others reduced. With
        several objectives all but these two are dicts by objective. With a loss scale also
        ``finite``, a scalar bool that is the same on every replica, and ``updates``, for
        ``apply_gradients``.
    """
    hook = context.hooks.update_pre
    summed = _summed(context, contributed, "loss" in fetches or "loss" in hook.arguments)
    updates: dict[str, list[Any]] = {}
    displays: dict[str, Any] = {}
    for name, gradients in summed["gradients"].items():
        if not gradients:  # all of this objective's variables are frozen
            updates[name], displays[name] = [], []
            continue
        values = {**contributed, "gradients": gradients, "loss": summed["loss"][name]}
        values |= {"optimizer": context.optimizers[name], **context.hook_arguments()}
        with gradients_are_summed():
            result = hook.in_graph(**values)
        names = ("update_gradients", "display_gradients")
        update, displays[name] = expect(result, names, str(hook))
        check_update(update, context.trained[name], str(hook))
        updates[name] = list(update)
    values = {**contributed, **summed, "update_gradients": updates, "display_gradients": displays}
    found = {
        name: value[""] if name not in ("output", "batch") and "" in value else value
        for name, value in values.items()
        if name in fetches
    }
    if context.loss_scale is not None:
        return {**found, "finite": all_finite(summed["gradients"]), "updates": updates}
    apply_gradients(context, updates)
    return found


def _summed(context: StepContext, contributed: dict[str, Any], with_loss: bool) -> dict[str, Any]:
    """Sums gradients, and objectives if they are asked for, all of them in one all-reduce.

    The sums are those of the objectives, without their scale, divided by what the batch weighs.
    """
    names = {"gradients", "weight"} | ({"loss"} if with_loss else set())
    values = {name: part for name, part in contributed.items() if name in names}
    own = contributed.get("weight")
    if own is not None:
        values["weight"] = not_negative(own)
    in_executable = context.stack is not None
    summed = sum_over_replicas(values, context.replicas, in_executable)
    values = {"loss": contributed["loss"], **summed}
    weight = values.pop("weight", None)
    if scale := context.loss_scale:
        values["gradients"] = {
            name: [scale.divide(gradient) for gradient in several]
            for name, several in values["gradients"].items()
        }
    if weight is not None:
        assert own is not None
        if context.hooks.batch_weight is not None:
            weight = context.watched_weight(own, weight)
        values = tf.nest.map_structure(lambda value: divide(value, weight), values)
    return values


def apply_gradients(context: StepContext, updates: dict[str, list[Any]]) -> None:
    """Lets each objective's optimizer apply what ``update_pre`` returned for it, if anything."""
    for name, gradients in updates.items():
        optimizer = context.optimizers[name]
        gradients = for_optimizer(optimizer, gradients)
        pairs = list(zip(gradients, context.trained[name], strict=True))
        if pairs:
            hook, apply = context.hooks.create_opt, optimizer.apply_gradients
            with gradients_are_summed():
                _attributed(hook, "the optimizer", apply, pairs)


def train_step(
    context: StepContext,
    data: Batches,
    fetches: frozenset[str],
    watch: bool = False,
    step: tf.Tensor | None = None,
) -> dict[str, Any]:
    """Takes a step: one update on a batch of its own, or one on the same batch for each turn.

    Args:
        context: what the step is made of
        data: where A elements for each local replica are drawn from
        fetches: names of the values to return, out of ``table.OBSERVED``
        watch: whether to measure how long it waits for its elements
        step: the number of the step, an int64 scalar, for summaries; where nobody runs it, none

    Returns:
        The fetched values by name, each with a value per replica, as ``strategy.run`` returns them;
        ``output`` and ``batch``, those of the last turn, as a list of such values, one for each
        micro-batch. And ``noted``, if losses are looked at: a list of what ``not_finite.seen``
        returns.
    """
    if context.rate_schedule is not None and step is not None:
        context.rate_schedule.apply(step)
    batch = data.next_batch(watch) if context.hooks.turns else None

    def draw(index: Any = 0) -> Any:
        return data.next_batch(watch, index) if batch is None else batch

    found: dict[str, Any] = {}
    for _ in context.each_turn():
        for name, value in make_update(context, data.strategy, draw, fetches, step).items():
            if name == "noted":
                value = [*found.get(name, []), *value]
            elif name not in ("output", "batch") and context.hooks.turns:
                value = {**found.get(name, {}), **value}  # by objective
            found[name] = value
    return found


def make_update(
    context: StepContext,
    strategy: tf.distribute.Strategy,
    draw: Callable[..., Any],
    fetches: frozenset[str],
    step: tf.Tensor | None,
) -> dict[str, Any]:
    """Makes one update over all replicas, on the batches that ``draw`` returns; see train_step."""
    update_pre, scale = context.hooks.update_pre, context.loss_scale
    kept = frozenset({"output", "batch"} & {*fetches, *update_pre.arguments})

    def on_replicas(function: Callable[..., Any], *args: Any) -> Any:
        def on_replica(*args: Any) -> Any:
            with summaries_of_first_replica(step):
                return function(*args)

        with tf.name_scope(""):  # a summary's name begins with it; a loop's would be part of that
            return strategy.run(on_replica, args)

    def differentiate(batch: Any) -> Any:
        if context.accumulate_steps == 1:
            return forward_backward(context, batch, kept)
        with optimizers_refused(ONCE_IN_MICRO_BATCH):
            return forward_backward(context, batch, kept)

    contribute = context.shares.counted(differentiate) if context.shares else differentiate
    contribute = compiled(contribute) if context.jit_compile else contribute

    def update(contributed: dict[str, Any]) -> dict[str, Any]:
        with found_nans() as nans:
            found = apply_update(context, contributed, fetches)
        if context.notes_losses:  # with a loss scale, an update of NaN gradients is skipped
            found["noted"] = [seen(contributed["loss"], [] if scale else nans)]
        return found

    if context.accumulate_steps == 1:
        found = on_replicas(lambda batch: update(contribute(batch)), draw())
        found = {name: [value] if name in kept else value for name, value in found.items()}
    else:
        contributed, pieces = accumulate(
            strategy,
            context.accumulate_steps,
            lambda index: on_replicas(contribute, draw(index)),
            joined_for={name: str(update_pre) for name in kept & {*update_pre.arguments}},
        )
        found = on_replicas(update, contributed)
        found |= {name: values for name, values in pieces.items() if name in fetches}
    if scale is None:
        after_update(context, strategy)
        return found
    updates, finite = found.pop("updates"), found.pop("finite")
    finite = strategy.experimental_local_results(finite)[0]

    def if_finite() -> None:
        on_replicas(lambda one: apply_gradients(context, one), updates)
        after_update(context, strategy)

    tf.cond(finite, if_finite, lambda: None)
    scale.adjust(finite)
    return found


def after_update(context: StepContext, strategy: tf.distribute.Strategy) -> None:
    """Calls ``update_post`` and averages the weights, for each local replica with its own values.

    No value passes between replicas: all compute the same from the same variables.
    """
    hook, average = context.hooks.update_post, context.average if context.ends_step else None
    some = [variable for several in context.trained.values() for variable in several]
    if (hook is None and average is None) or not some:
        return
    devices = itertools.count()

    def on_device(_: Any) -> None:
        # A summary's name begins with the scope.
        with tf.name_scope(""), summaries_of_first_replica(context.taking, next(devices)):
            if hook is not None:
                hook.in_graph(optimizer=context.optimizer, **context.hook_arguments())
        if average is not None:
            average.update()

    strategy.extended.update(plain_variable(some[0]), on_device, group=False)
