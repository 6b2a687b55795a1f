"""One training step: forward, loss, gradients, their sum over the replicas, the update.

The graph hooks are called here, in the order of the step; everything runs while a graph is traced.
``train_step`` sees all replicas at once, the functions above it one of them. What a hook may
return wrongly is refused in checks/returned.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import tensorflow as tf

from ctl_core.batches import cut_unless
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
from ctl_core.collectives import counting_rows, replica_id
from ctl_core.compat import (
    drawing_from,
    global_seed_generator,
    gradients_are_summed,
    optimizers_refused,
    summaries_of_first_replica,
)
from ctl_core.compiled import compiled
from ctl_core.console import warn
from ctl_core.errors import CtlError, HookFailed
from ctl_core.hooks import Hook
from ctl_core.metrics import update_loss_parts, update_train_metrics
from ctl_core.model.pairs import refuse_pairs
from ctl_core.model.parts import Moment, Parts
from ctl_core.model.variables import plain_variable, variable_name
from ctl_core.numerics.micro_batches import ONCE_IN_MICRO_BATCH, accumulate
from ctl_core.numerics.not_finite import found_nans, seen
from ctl_core.numerics.precision import all_finite, to_float32
from ctl_core.numerics.reduction import divide, for_optimizer, sum_over_replicas
from ctl_core.training_mode import call, call_model

PIECES = ("output", "batch")  # what hooks are given of each replica


class Batches(Protocol):
    """What a step draws its global batch from: the input, or a stack of batches drawn before."""

    def draw(self) -> tuple[Callable[[Any], Any], Any]:
        """Returns what deals out micro-batches, and the number of examples: see ``Input.draw``."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """What one micro-batch contributes to one objective.

    Attributes:
        value: (sum(loss_per_batch) + rows extra_loss) / examples, a scalar; with a weight w of the
            batch (sum(loss_per_batch) + w extra_loss) / B, still to be divided by sum(w) / B
        variables: that are trained, those of frozen layers left out
        parts: of the loss, by name
    """

    value: tf.Tensor
    variables: list[Any]
    parts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step returns; all values are those of all replicas, as ``strategy.run`` gives them.

    Attributes:
        loss: by objective, its sum over the replicas; empty where nobody asks for it
        gradients, update_gradients, display_gradients: by objective
        output, batch: of the last turn, one for each micro-batch; empty where nobody asks for them
        noted: what ``not_finite.seen`` returned, by turn
        weights: what a replica's batch and all batches weigh, by turn; only with ``batch_weight``
    """

    loss: dict[str, Any]
    gradients: dict[str, list[Any]]
    update_gradients: dict[str, list[Any]]
    display_gradients: dict[str, Any]
    output: list[Any]
    batch: list[Any]
    noted: list[Any]
    weights: list[Any]

    def fetch(self, names: frozenset[str]) -> dict[str, Any]:
        """Returns the values of these names; of a single objective, without its name."""
        values = {name: getattr(self, name) for name in names}
        return {
            name: value[""] if isinstance(value, dict) and "" in value else value
            for name, value in values.items()
        }


# ---- On one replica ------------------------------------------------------------------------------


def run_model(parts: Parts, moment: Moment, batch: Any, training: bool) -> Any:
    """Returns the model's output for a batch, in float32 where precision is lower."""
    inputs = make_model_input(parts, moment, batch, training)
    hook, what, model = parts.model_for(training)
    return to_float32(_call(hook, what, call_model, model, inputs, training))


def make_model_input(parts: Parts, moment: Moment, batch: Any, training: bool) -> Any:
    """Returns what the model is called with."""
    hook, values = parts.hooks.input_pre, parts.values(moment)
    return something(hook, hook.in_graph(batch=batch, training=training, **values), values)


def compute_loss(parts: Parts, moment: Moment, batch: Any, output: Any, training: bool) -> Any:
    """Returns what ``train_loss`` makes of the model's output, in float32."""
    hooks = parts.hooks
    values = {"batch": batch, "training": training, **parts.values(moment)}
    loss_input = something(hooks.loss_pre, hooks.loss_pre.in_graph(output=output, **values), values)
    train_loss = parts.train_loss
    return to_float32(
        _call(hooks.create_loss, "train_loss", call, train_loss, loss_input, training)
    )


def _call(hook: Hook, what: str, function: Any, *args: Any) -> Any:
    """Calls what a create hook returned; a failure names that hook."""
    try:
        return function(*args)
    except CtlError:
        raise
    except Exception as error:
        raise HookFailed(f"{what} from {hook.failure(error)}") from error


def weigh_batch(
    parts: Parts, moment: Moment, batch: Any, output: Any, present: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns what ``batch_weight`` says that a replica's batch weighs; None without that hook."""
    hook = parts.hooks.batch_weight
    if hook is None:
        return None
    weight = hook.in_graph(batch=batch, output=output, **parts.values(moment))
    return keep_if(present, checked_weight(hook, weight))


def sum_loss(parts: Parts, loss: Any, batch: Any) -> tf.Tensor:
    """Returns the sum of a loss over a replica's batch.

    Args:
        parts: of the step
        loss: a scalar, which is taken as the sum, or one number per example
        batch: whose examples they are
    """
    hooks = parts.hooks
    refuse_pairs(hooks, loss)
    loss = checked_loss(hooks.create_loss, loss, examples_in(hooks.count_examples, batch))
    return tf.reduce_sum(to_float32(loss))


def keep_if(present: tf.Tensor | None, value: tf.Tensor) -> tf.Tensor:
    """Returns a value, or zero on a replica that has no rows."""
    return value if present is None else tf.where(present, value, tf.zeros_like(value))


def compute_objectives(
    parts: Parts,
    moment: Moment,
    batch: Any,
    examples: Any,
    rows: tf.Tensor | None = None,
    present: tf.Tensor | None = None,
) -> tuple[dict[str, Objective], dict[str, Any]]:
    """Runs the model and the loss on a replica's batch, and ``grad_pre`` on what they give.

    Args:
        parts: of the step
        moment: of the step
        batch: the rows of this replica
        examples: how many examples the global batch has
        rows, present: how many rows the replica has, and whether it has any, see ``input.Share``

    Returns:
        The objectives by name; and what they were made of: output, batch, loss and weight.
    """
    hooks = parts.hooks
    output = run_model(parts, moment, batch, training=True)
    loss = compute_loss(parts, moment, batch, output, training=True)
    weight = weigh_batch(parts, moment, batch, output, present)
    values = {"loss": loss, "output": output, "batch": batch, **parts.values(moment)}
    returned = hooks.grad_pre.in_graph(**values)
    found = {}
    for name, where, (loss_per_batch, extra_loss, variables, loss_parts) in checked_objectives(
        hooks.grad_pre, returned, dict(parts.optimizers), objective=parts.objective(moment)
    ):
        total = keep_if(present, sum_loss(parts, loss_per_batch, batch))
        extra = checked_extra(hooks.create_model, parts.train_model, extra_loss, total.dtype, where)
        if weight is None:
            value = total / tf.cast(examples, total.dtype) + keep_if(
                present, extra * _part_of_batch(parts, rows, examples, total.dtype)
            )
        else:
            value = (total + tf.cast(weight, total.dtype) * extra) / parts.shape.batch
        found[name] = Objective(value, list(variables), loss_parts)
    return found, {"output": output, "batch": batch, "loss": loss, "weight": weight}


def _part_of_batch(parts: Parts, rows: tf.Tensor | None, examples: Any, dtype: Any) -> Any:
    """Returns which part of the global batch a share is."""
    if rows is None:
        return 1 / parts.shape.shares
    return tf.cast(rows, dtype) / tf.cast(examples, dtype)


def forward_backward(
    parts: Parts, moment: Moment, examples: Any, kept: frozenset[str], share: tuple[Any, ...]
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Differentiates the share of one replica in a micro-batch; nothing is summed or updated yet.

    Args:
        parts: of the step
        moment: of the step
        examples: how many examples the global batch has
        kept: which of ``output`` and ``batch`` are needed afterwards
        share: the fields of an ``input.Share``

    Returns:
        ``loss`` and ``gradients``, dicts by objective, and what is kept; with a weight also
        ``weight``, what the batch weighs divided by B. With a loss scale the gradients are those of
        the scaled objectives. And by objective the variables that have a gradient.
    """
    batch, rows, present, together = share
    scale = parts.loss_scale
    with counting_rows(rows, present, together), _writing_by_rows(parts, rows, together):
        with tf.GradientTape(persistent=len(parts.optimizers) > 1) as tape:
            objectives, made = compute_objectives(parts, moment, batch, examples, rows, present)
            scaled = {
                name: one.value if scale is None else scale.multiply(one.value)
                for name, one in objectives.items()
            }
        gradients = {
            name: _existing(parts, tape.gradient(scaled[name], one.variables), one.variables)
            for name, one in objectives.items()
        }
        for one in objectives.values():
            update_loss_parts(parts, moment, one.parts, batch, present)
        update_train_metrics(parts, moment, batch, made["output"], made["loss"], present)
    found = {
        "loss": {name: one.value for name, one in objectives.items()},
        "gradients": {name: several for name, (several, _) in gradients.items()},
    }
    found |= {name: made[name] for name in ("output", "batch") if name in kept}
    if made["weight"] is not None:
        weight = made["weight"]
        if parts.shape.accumulate_steps > 1:  # in their sum, a negative one would not show
            weight = not_negative(weight)
        found["weight"] = weight / parts.shape.batch
    return found, {name: variables for name, (_, variables) in gradients.items()}


@contextmanager
def _writing_by_rows(parts: Parts, rows: Any, together: Any) -> Iterator[None]:
    """Lets what is written to variables count by the rows of the replica; a stand-in's does not.

    Moving statistics of each replica's own batch are averaged over the replicas: with r of R rows
    on one of N replicas, they move N r / R times as far, so that each example has the same part.
    """
    if rows is None:
        yield
        return
    before = [one.variable.read_value() for one in parts.written]
    yield
    ratio = tf.math.divide_no_nan(
        tf.cast(parts.shape.replicas * rows, tf.float32), tf.cast(together, tf.float32)
    )
    for one, value in zip(parts.written, before, strict=True):
        after = one.variable.read_value()
        if one.furthest is not None:
            length = tf.cast(tf.minimum(ratio, one.furthest), after.dtype)
            after = tf.where(ratio == 1.0, after, value + length * (after - value))
        one.variable.assign(tf.where(rows > 0, after, value))


def settle_stand_in(parts: Parts, contributed: dict[str, Any], present: tf.Tensor) -> Any:
    """Gives a replica without rows what the first one has written, and no rows of a stand-in.

    The first one has rows, if any has. What is written from what replicas exchange is the same on
    all of them that have some.
    """
    context = tf.distribute.get_replica_context()
    written = [
        one.variable
        for one in parts.written
        if not one.is_own and (one.variable.dtype.is_floating or one.variable.dtype.is_integer)
    ]
    if written and parts.shape.replicas > 1:
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        values = [variable.read_value() for variable in written]
        masked = [tf.where(is_first, value, tf.zeros_like(value)) for value in values]
        firsts = context.all_reduce(tf.distribute.ReduceOp.SUM, masked)
        for variable, value, first in zip(written, values, firsts, strict=True):
            variable.assign(tf.where(present, value, first))
    cut = {name: cut_unless(present, contributed[name]) for name in contributed if name in PIECES}
    return {**contributed, **cut}


def _existing(
    parts: Parts, gradients: list[Any], variables: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Leaves out the variables that the loss does not depend on."""
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    idle = [variable_name(v) for g, v in zip(gradients, variables, strict=True) if g is None]
    if idle:
        more = " and others" if len(idle) > 5 else ""
        warn(f"the loss does not depend on {', '.join(idle[:5])}{more}: not updated.", once=True)
    if variables and not pairs:
        raise parts.hooks.grad_pre.reject(
            "the loss depends on none of the trainable_vars "
            f"({', '.join(variable_name(v) for v in variables[:5])})."
        )
    return [g for g, _ in pairs], [v for _, v in pairs]


def apply_update(
    parts: Parts,
    moment: Moment,
    contributed: dict[str, Any],
    trained: dict[str, list[Any]],
    examples: Any,
    asks_for_loss: bool,
) -> dict[str, Any]:
    """Makes one update of what this replica contributes: sum, ``update_pre``, optimizer.

    Gradients are summed over the replicas once, before ``update_pre``; the optimizer applies them
    without reducing again. With a loss scale it is the caller who applies them, if the update is
    finite: a replica cannot decide on its own.

    Args:
        parts: of the step
        moment: of the step
        contributed: what ``forward_backward`` returned, or the sum of several
        trained: by objective, the variables of the gradients
        examples: how many the global batch has
        asks_for_loss: whether a host hook does

    Returns:
        ``loss``, if anybody asks for it, ``gradients``, ``update_gradients`` and
        ``display_gradients``, each by objective; ``weights``; with a loss scale also ``finite``, a
        scalar bool that is the same on every replica.
    """
    asks_for_loss = asks_for_loss or "loss" in parts.hooks.update_pre.arguments
    summed = sum_contributions(parts, contributed, asks_for_loss)
    counts = parts.shape.count_rows_of(replica_id(), examples)
    with counting_rows(*counts):
        updates, displays = change_gradients(parts, moment, contributed, summed, trained)
    found = {**summed, "update_gradients": updates, "display_gradients": displays}
    if parts.loss_scale is not None:
        return {**found, "finite": all_finite(summed["gradients"])}
    apply_gradients(parts, updates, trained)
    return found


def change_gradients(
    parts: Parts,
    moment: Moment,
    contributed: dict[str, Any],
    summed: dict[str, Any],
    trained: dict[str, list[Any]],
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Calls ``update_pre`` for each objective; returns what is applied and what is shown."""
    hook = parts.hooks.update_pre
    updates: dict[str, list[Any]] = {}
    displays: dict[str, Any] = {}
    for name, gradients in summed["gradients"].items():
        if not gradients:  # all of this objective's variables are frozen
            updates[name], displays[name] = [], []
            continue
        values = {**contributed, "gradients": gradients, **parts.values(moment)}
        values |= {"loss": summed["loss"].get(name), "optimizer": parts.optimizers[name]}
        with gradients_are_summed():
            result = hook.in_graph(**values)
        names = ("update_gradients", "display_gradients")
        update, displays[name] = expect(result, names, str(hook))
        check_update(update, trained[name], str(hook))
        updates[name] = list(update)
    return updates, displays


def sum_contributions(parts: Parts, contributed: dict[str, Any], with_loss: bool) -> dict[str, Any]:
    """Sums gradients, and objectives if they are asked for, over the replicas, in one all-reduce.

    The sums are those of the objectives, without their scale, divided by what the batch weighs.
    """
    values = {"gradients": contributed["gradients"]}
    if with_loss:
        values["loss"] = contributed["loss"]
    own = contributed.get("weight")
    if own is not None:
        values["weight"] = not_negative(own)
    values = sum_over_replicas(values, parts.shape.replicas, parts.in_executable)
    weight, weights = values.pop("weight", None), []
    if scale := parts.loss_scale:
        values["gradients"] = {
            name: [scale.divide(gradient) for gradient in several]
            for name, several in values["gradients"].items()
        }
    if weight is not None:
        weights = [tf.stack([own, weight]) * tf.cast(parts.shape.batch, weight.dtype)]
        values = tf.nest.map_structure(lambda value: divide(value, weight), values)
    return {"loss": {}, **values, "weights": weights}


def apply_gradients(
    parts: Parts, updates: dict[str, list[Any]], trained: dict[str, list[Any]]
) -> None:
    """Lets each objective's optimizer apply what ``update_pre`` returned for it, if anything."""
    for name, gradients in updates.items():
        optimizer = parts.optimizers[name]
        pairs = list(zip(for_optimizer(optimizer, gradients), trained[name], strict=True))
        if pairs:
            with gradients_are_summed():
                _call(parts.hooks.create_opt, "the optimizer", optimizer.apply_gradients, pairs)


# ---- Over all replicas ---------------------------------------------------------------------------


def train_step(parts: Parts, data: Batches, fetches: frozenset[str], step: tf.Tensor) -> StepResult:
    """Takes a step: one update on a batch of its own, or one on the same batch for each turn.

    Args:
        parts: what the step is made of
        data: where a global batch is drawn from
        fetches: names of the values that are wanted, out of ``table.OBSERVED``; what nobody wants
            is not computed
        step: the number of the step, an int64 scalar
    """
    if parts.rate_schedule is not None:
        parts.rate_schedule.apply(step)
    deal, examples = data.draw()
    if parts.hooks.turns:
        batch = deal(0)
        deal = lambda _: batch  # noqa: E731
    results = [
        make_update(parts, moment, deal, examples, fetches) for moment in parts.moments(step)
    ]
    if len(results) == 1:
        return results[0]
    by_objective: dict[str, Any] = {
        field: {name: value for one in results for name, value in getattr(one, field).items()}
        for field in ("loss", "gradients", "update_gradients", "display_gradients")
    }
    of_turns: dict[str, Any] = {
        field: [value for one in results for value in getattr(one, field)]
        for field in ("noted", "weights")
    }
    return dataclasses.replace(results[-1], **by_objective, **of_turns)


def make_update(
    parts: Parts,
    moment: Moment,
    deal: Callable[[Any], Any],
    examples: Any,
    fetches: frozenset[str],
) -> StepResult:
    """Makes one update over all replicas, on the micro-batches that ``deal`` returns."""
    update_pre, scale, strategy = parts.hooks.update_pre, parts.loss_scale, parts.strategy
    kept = frozenset({"output", "batch"} & {*fetches, *update_pre.arguments})
    trained: dict[str, list[Any]] = {}
    generator = global_seed_generator()  # which replicas are traced without, each in a thread

    def on_replicas(function: Callable[..., Any], *args: Any) -> Any:
        def on_replica(*args: Any) -> Any:
            with drawing_from(generator), summaries_of_first_replica(moment.step):
                return function(*args)

        with tf.name_scope(""):  # a summary's name begins with it; a loop's would be part of that
            return strategy.run(on_replica, args)

    def contribute(share: Any) -> Any:
        found, variables = forward_backward(parts, moment, examples, kept, share)
        trained.update(variables)
        return found

    def contribute_once(share: Any) -> Any:
        with optimizers_refused(ONCE_IN_MICRO_BATCH):
            return contribute(share)

    def update(contributed: dict[str, Any]) -> dict[str, Any]:
        with found_nans() as nans:
            found = apply_update(parts, moment, contributed, trained, examples, "loss" in fetches)
        if parts.notes_losses:  # with a loss scale, an update of NaN gradients is skipped
            found["noted"] = [seen(contributed["loss"], [] if scale else nans)]
        return found

    def contribute_all(index: Any) -> Any:
        share = deal(index)
        contributed, present = on_replicas(run, share), share[2]
        if present is None:
            return contributed
        return on_replicas(lambda *args: settle_stand_in(parts, *args), contributed, present)

    if parts.shape.accumulate_steps == 1:
        run = compiled(contribute) if parts.jit_compile else contribute
        contributed = contribute_all(0)
        pieces = {name: [contributed[name]] for name in kept}
        found = on_replicas(update, contributed)
    else:
        run = compiled(contribute_once) if parts.jit_compile else contribute_once
        contributed, pieces = accumulate(
            strategy,
            parts.shape.accumulate_steps,
            contribute_all,
            joined_for={name: str(update_pre) for name in kept & {*update_pre.arguments}},
        )
        found = on_replicas(update, contributed)
    if scale is None:
        finish_update(parts, moment, trained)
    else:
        finite = strategy.experimental_local_results(found.pop("finite"))[0]

        def apply_if_finite() -> None:
            updates = found["update_gradients"]
            on_replicas(lambda one: apply_gradients(parts, one, trained), updates)
            finish_update(parts, moment, trained)

        tf.cond(finite, apply_if_finite, lambda: None)
        scale.adjust(finite)
    output, batch = pieces.get("output", []), pieces.get("batch", [])
    return StepResult(**{"noted": [], **found}, output=output, batch=batch)


def finish_update(parts: Parts, moment: Moment, trained: dict[str, list[Any]]) -> None:
    """Calls ``update_post`` and averages the weights, for each local replica with its own values.

    No value passes between replicas: all compute the same from the same variables.
    """
    hook = parts.hooks.update_post
    average = parts.average if parts.ends_step(moment) else None
    some = [variable for several in trained.values() for variable in several]
    if (hook is None and average is None) or not some:
        return
    devices = itertools.count()

    def on_device(_: Any) -> None:
        # A summary's name begins with the scope.
        with tf.name_scope(""), summaries_of_first_replica(moment.step, next(devices)):
            if hook is not None:
                hook.in_graph(optimizer=parts.optimizer, **parts.values(moment))
        if average is not None:
            average.update()

    parts.strategy.extended.update(plain_variable(some[0]), on_device, group=False)
