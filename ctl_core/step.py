"""One training step: what replicas make of their shares (forward.py), its sum, the update.

Everything runs while a graph is traced. ``train_step`` sees all replicas at once, the functions
above it one of them.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import replica_id, weigh_by_rows
from ctl_core.model.forward import call_made, forward_backward, settle_written
from ctl_core.model.parts import Parts
from ctl_core.numerics import reduction
from ctl_core.numerics.not_finite import are_finite, note_update
from ctl_core.numerics.variables import unwrap

_TOO_OFTEN = (
    "grad_pre: applies an optimizer by itself, with accumulate_steps in each micro-batch; return "
    "dicts by objective from create_opt and grad_pre, or leave out accumulate_steps."
)


class StepResult(NamedTuple):
    """What a step returns; all values are those of all replicas, as ``strategy.run`` gives them.

    Attributes:
        loss: by objective, its sum over the replicas; empty where nobody asks for it
        gradients, update_gradients, display_gradients: by objective
        variables: whose gradients they are, by objective; not tensors, but the variables
        output, batch: of the last turn, one for each micro-batch; empty where nobody asks for them
        notes: by turn, see ``note_update``
    """

    loss: dict[str, Any]
    gradients: dict[str, list[Any]]
    update_gradients: dict[str, list[Any]]
    display_gradients: dict[str, Any]
    variables: dict[str, list[Any]]
    output: list[Any]
    batch: list[Any]
    notes: list[Any]

    def fetch(self, names: frozenset[str]) -> dict[str, Any]:
        """Returns the values of these names; of a single objective, without its name."""
        values = {name: getattr(self, name) for name in names}
        return {
            name: value[""] if isinstance(value, dict) and "" in value else value
            for name, value in values.items()
        }


def make_gradients(
    parts: Parts,
    contributed: dict[str, Any],
    trained: dict[str, list[Any]],
    examples: Any,
    asks_for_loss: bool,
) -> StepResult:
    """Sums what replicas contribute, once, and calls ``update_pre``; nothing is applied yet.

    Args:
        contributed: what ``forward_backward`` returned, or the sum of several
        examples: how many the global batch has
        asks_for_loss: whether a host hook that is due names ``loss``
    """
    hook = parts.hooks.update_pre
    summed = sum_contributions(parts, contributed, asks_for_loss or "loss" in hook.arguments)
    counts = parts.shape.count_rows_of(replica_id(), examples)
    with weigh_by_rows(*counts):
        updates, displays = change_gradients(parts, contributed, summed, trained)
    # The default turns NaN into 0; with a loss scale, such an update is skipped.
    counts_nans = hook.is_default and parts.loss_scale is None
    counted = itertools.chain(*summed["gradients"].values()) if counts_nans else ()
    return StepResult(
        **summed,
        update_gradients=updates,
        display_gradients=displays,
        variables={},
        **{name: contributed.get(name, []) for name in reduction.PIECES},
        notes=[note_update(contributed["loss"], counted)],
    )


def sum_contributions(parts: Parts, contributed: dict[str, Any], with_loss: bool) -> dict[str, Any]:
    """Sums gradients, and objectives if they are asked for, over the replicas, in one all-reduce.

    The sums are those of the objectives, without their scale, divided by what the batch weighs.
    """
    names = {"gradients", "weight", *(["loss"] if with_loss else [])} & contributed.keys()
    values = {name: contributed[name] for name in names}
    values = reduction.sum_over_replicas(values, parts.shape.replicas, parts.in_executable)
    if parts.loss_scale is not None:
        values["gradients"] = reduction.multiply(values["gradients"], 1.0 / parts.loss_scale.value)
    if (weight := values.pop("weight", None)) is not None:
        values = reduction.multiply(values, tf.math.reciprocal_no_nan(weight))
    return {"loss": {}, **values}


def change_gradients(
    parts: Parts, contributed: dict[str, Any], summed: dict[str, Any], trained: dict[str, list[Any]]
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Calls ``update_pre`` for each objective; returns what is applied and what is shown."""
    hook = parts.hooks.update_pre
    pieces = {
        name: several[0] if len(several) == 1 else tf.nest.map_structure(reduction.join, *several)
        for name, several in contributed.items()
        if name in reduction.PIECES and name in hook.arguments
    }
    updates: dict[str, list[Any]] = {}
    displays: dict[str, Any] = {}
    for name, gradients in summed["gradients"].items():
        if not gradients:  # all of this objective's variables are frozen
            updates[name], displays[name] = [], []
            continue
        values = {**pieces, **parts.values(), "objective": name or None}
        values |= {"gradients": gradients, "all_gradients": summed["gradients"]}
        values["variables"] = trained[name]
        values |= {"loss": summed["loss"].get(name), "optimizer": parts.optimizers[name]}
        with compat.skip_reduction():
            update, displays[name] = hook.trace(**values)
        shapes = [tf.TensorShape(getattr(gradient, "shape", None)) for gradient in update]
        own = [tf.TensorShape(variable.shape) for variable in trained[name]]
        pairs = zip(shapes, own, strict=False)
        wrong = [f" ({a} for {b})" for a, b in pairs if not a.is_compatible_with(b)]
        if wrong or len(shapes) != len(own):
            raise hook.reject(
                f"returned {len(shapes)} update_gradients for {len(own)} gradients"
                f"{''.join(wrong[:1])}; return one for each, of its shape, in the same order."
            )
        updates[name] = list(update)
    return updates, displays


def apply_gradients(
    parts: Parts, updates: dict[str, list[Any]], trained: dict[str, list[Any]]
) -> None:
    """Lets optimizers apply what ``update_pre`` returned for them; they do not reduce again."""
    for name, gradients in updates.items():
        optimizer = parts.optimizers[name]
        if pairs := list(zip(gradients, trained[name], strict=True)):
            with compat.skip_reduction():
                call_made(parts.hooks.create_opt, optimizer.apply_gradients, pairs)


def refuse_to_compile(*_: Any, **__: Any) -> None:
    """Refuses what an executable cannot do, whatever it is called with."""
    raise ValueError(
        "jit_compile compiles no tf.summary and no exchange of replicas; leave that or it out"
    )


def train_step(
    parts: Parts,
    deal: Callable[[Any], Any],
    examples: Any,
    fetches: frozenset[str],
    step: tf.Tensor,
) -> StepResult:
    """Takes a step: one update on a global batch, or one on the same batch for each turn.

    Args:
        deal: deals out micro-batches of the global batch, see ``Input.deal_out``
        examples: how many it has
        fetches: names of the values that are wanted, out of ``table.OBSERVED``; what nobody wants
            is not computed
        step: the number of the step, an int64 scalar
    """
    if parts.assign_rate is not None:
        parts.assign_rate(step)
    if parts.hooks.turns:
        batch = deal(0)
        deal = lambda _: batch  # noqa: E731
    results = [make_update(turn, deal, examples, fetches) for turn in parts.list_turns(step)]
    by_objective: dict[str, Any] = {
        field: {name: value for one in results for name, value in getattr(one, field).items()}
        for field in ("loss", "gradients", "update_gradients", "display_gradients", "variables")
    }
    notes = [note for one in results for note in one.notes]
    return results[-1]._replace(**by_objective, notes=notes)


def make_update(
    parts: Parts, deal: Callable[[Any], Any], examples: Any, fetches: frozenset[str]
) -> StepResult:
    """Makes one update over all replicas, on the micro-batches that ``deal`` returns."""
    steps, strategy, scale = parts.shape.accumulate_steps, parts.strategy, parts.loss_scale
    kept = frozenset({*reduction.PIECES} & {*fetches, *parts.hooks.update_pre.arguments})
    trained: dict[str, list[Any]] = {}  # filled as the forward pass is traced
    generator = compat.get_seed_generator()  # which replicas are traced without, each in a thread

    def on_replicas(function: Callable[..., Any], *args: Any) -> Any:
        def on_replica(*args: Any) -> Any:
            with compat.run_replica(generator), compat.mute_other_summaries(parts.step):
                return function(*args)

        with tf.name_scope(""):  # a summary's name begins with it; a loop's would be part of that
            return strategy.run(on_replica, args)

    def contribute(share: Any) -> Any:
        once = compat.refuse_optimizers(_TOO_OFTEN) if steps > 1 else contextlib.nullcontext()
        with once:
            found, variables = forward_backward(parts, examples, kept, share)
        trained.update(variables)
        return found

    def contribute_compiled(share: Any) -> Any:
        # A function of its own for each replica and each graph: a cached trace of another replica
        # would hold that replica's variables.
        if parts.shape.replicas > 1:
            tf.distribute.get_replica_context().merge_call = refuse_to_compile
        with compat.GraphWriter(refuse_to_compile).as_default():
            return tf.function(contribute, jit_compile=True, autograph=False)(share)

    def contribute_all(index: Any) -> Any:
        share, function = deal(index), contribute_compiled if parts.jit_compile else contribute
        if share.rows is None:
            return on_replicas(function, share)
        before = on_replicas(lambda: [one.variable.read_value() for one in parts.written])
        contributed = on_replicas(function, share)
        return on_replicas(settle_written, parts, contributed, before, *share[1:])

    def finish() -> None:
        on_replicas(lambda updates: apply_gradients(parts, updates, trained), made.update_gradients)
        finish_update(parts, trained)

    contributed = reduction.accumulate(on_replicas, steps, contribute_all)
    made: StepResult = on_replicas(
        lambda one: make_gradients(parts, one, trained, examples, "loss" in fetches), contributed
    )
    if scale is None:
        finish()
    else:  # a replica cannot decide on its own
        gradients = tf.nest.flatten(made.gradients)
        local = strategy.experimental_local_results
        finite = are_finite([local(gradient)[0] for gradient in gradients])
        tf.cond(finite, finish, lambda: None)
        scale.adjust(finite)
    return made._replace(variables=trained)


def finish_update(parts: Parts, trained: dict[str, list[Any]]) -> None:
    """Calls ``update_post`` and averages the weights, for each local replica with its own values.

    No value passes between replicas: all compute the same from the same variables.
    """
    hook = parts.hooks.update_post
    is_last = parts.turn in (None, len(parts.hooks.turns) - 1)  # of its step
    average = parts.update_average if is_last else None
    some = [variable for several in trained.values() for variable in several]
    if (hook is None and average is None) or not some:
        return
    devices = itertools.count()

    def on_device(_: Any) -> None:
        # A summary's name begins with the scope.
        with tf.name_scope(""), compat.mute_other_summaries(parts.step, next(devices)):
            if hook is not None:
                hook.trace(optimizer=parts.optimizer, **parts.values())
        if average is not None:
            average()

    parts.strategy.extended.update(unwrap(some[0]), on_device, group=False)
