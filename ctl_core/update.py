"""Makes the update of a step, which applies the sums over the replicas to the weights.

``update_pre`` changes the summed gradients, optimizers apply them, and then ``update_post`` runs.
As in step.py, everything runs while a graph is traced.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import place_rows, replica_id
from ctl_core.cluster.replica_contexts import enter_logical_replica, weigh_by_rows
from ctl_core.executable import describe_op, find_uncompilable_op, forbid_uncompilable
from ctl_core.input.batches import find_first_replica
from ctl_core.model.components import Compilation, StepContext
from ctl_core.model.failures import find_line
from ctl_core.model.forward import call_made, fix_sparse_shape
from ctl_core.model.replicas import Replicas
from ctl_core.numerics import reduction
from ctl_core.numerics.not_finite import are_finite, are_losses_finite, are_numbers
from ctl_core.numerics.randomness import draws_random_numbers
from ctl_core.numerics.reduction import PIECES, Contribution
from ctl_core.numerics.variables import unwrap
from ctl_core.run.errors import HookFailed, NotCompilable, SetupError
from ctl_core.types import (
    Count,
    Gradients,
    GradientsByObjective,
    UserObject,
    Variable,
    VariablesByObjective,
)


class Updates(NamedTuple):
    """The results of ``update_pre`` by objective.

    Attributes:
        applied: the gradients that optimizers apply
        displayed: the gradients that host hooks receive as ``display_gradients``
        skips: bool scalars that say whether to skip an update, if ``update_pre`` returned any
    """

    applied: GradientsByObjective
    displayed: dict[str, UserObject]
    skips: dict[str, tf.Tensor]


class Sums(NamedTuple):
    """The sums over all leaves of a batch.

    Attributes:
        local: the contribution of each replica, which has the replica's own output and batch; along
            the tree, the same values as ``total``
        total: the sums, the same on all replicas
        variables: the variables by objective, in the order of the gradients; they are not tensors
        are_equal: see ``Report``
    """

    local: Contribution
    total: Contribution
    variables: VariablesByObjective
    are_equal: tf.Tensor


class UpdateResult(NamedTuple):
    """The results of an update; tensors have a value for each replica.

    Attributes:
        summed: the gradients and objectives summed over the replicas
        updates: the result of ``call_update_pre``
        loss_is_finite: see ``Report``
        gradients_are_numbers: see ``Report``
    """

    summed: Contribution
    updates: Updates
    loss_is_finite: tf.Tensor
    gradients_are_numbers: tf.Tensor


# A function that makes an update with the sums, see ``make_update``.
MakeUpdate: TypeAlias = Callable[[StepContext, Replicas, Count, Sums], UpdateResult]


def finish_sums(context: StepContext, is_executable: bool, total: Contribution) -> Contribution:
    """Finishes the sums over the replicas, on one replica.

    The sums are divided by the loss scale and by the weight of the batch. Rows of a sparse gradient
    that have the same index are merged.

    Args:
        context: the context of the step
        is_executable: whether XLA compiles the traced graph
        total: the result of ``sum_contributions``
    """
    gradients = reduction.merge_rows(total.gradients, is_executable)
    return unscale_sums(context, total._replace(gradients=gradients))


def unscale_sums(context: StepContext, total: Contribution) -> Contribution:
    """Divides the sums by the loss scale and by the weight of the batch, on one replica.

    Args:
        context: the context of the step
        total: the sums over all replicas; in a sparse gradient, each index occurs once
    """
    components = context.components
    loss = total.loss
    gradients = total.gradients
    if components.loss_scale is not None:
        gradients = reduction.multiply(gradients, 1.0 / components.loss_scale.value)
    if total.weight:
        factor = tf.math.reciprocal_no_nan(total.weight[0])
        loss = reduction.multiply(loss, factor)
        gradients = reduction.multiply(gradients, factor)
    return Contribution(loss, gradients, [], [], [], [], [])


def make_update(
    context: StepContext, replicas: Replicas, examples: Count, sums: Sums
) -> UpdateResult:
    """Makes the update with the sums over all leaves.

    Args:
        context: the context of the step, or of a turn within it
        replicas: the replicas that make the update
        examples: the number of examples in the global batch
        sums: the sums
    """
    is_executable = context.compilation is Compilation.STEP
    finish = partial(finish_sums, context, is_executable)
    call = partial(call_update_pre, context, examples, sums.variables)
    if context.components.shape.logical_replicas is not None:
        finish = partial(unscale_sums, context)
        call = partial(_call_alike, context, call)
    summed = replicas.run(finish, sums.total)
    updates = replicas.run(call, sums.local, summed)
    flags = replicas.run(partial(compute_flags, context), sums.local, summed)
    apply_updates(context, replicas, sums.variables, summed, updates)
    return UpdateResult(summed, updates, *flags)


def _call_alike(
    context: StepContext,
    call: Callable[[Contribution, Contribution], Updates],
    local: Contribution,
    summed: Contribution,
) -> Updates:
    """Calls ``update_pre`` on a device as if the device were logical replica 0.

    All devices thus compute the same update.
    """
    with enter_logical_replica(0, context.components.shape.leaves):
        return call(local, summed)


def make_logical_update(
    context: StepContext, replicas: Replicas, examples: Count, sums: Sums
) -> UpdateResult:
    """Makes the update of logical replicas, which is never compiled; see ``make_update``."""
    with refuse_random_ops(context, obstacle="that of logical replicas never is"):
        return make_update(context, replicas, examples, sums)


def make_compiled_update(
    context: StepContext, replicas: Replicas, examples: Count, sums: Sums
) -> UpdateResult:
    """Makes the update in one XLA executable for each replica; for arguments see ``make_update``.

    The work before the sum is compiled by XLA. An update that draws random numbers must be compiled
    as well, because the same seed gives other random numbers without XLA. If an update draws none,
    and XLA cannot compile it, for example because it writes a summary, it is not compiled.

    Raises:
        SetupError: the update draws random numbers, but cannot be compiled.
    """
    arguments = context.hooks.update_pre.arguments
    needed = sums.local._replace(
        gradients={},
        weight=[],
        output=sums.local.output if "output" in arguments else [],
        batch=sums.local.batch if "batch" in arguments else [],
        changes=[],
        differences=[],
    )
    total = sums.total._replace(changes=[], differences=[])
    update = partial(_run_compiled_update, context, examples, sums.variables)
    try:
        result: UpdateResult = replicas.run(update, needed, total)
        return result
    except NotCompilable as error:
        obstacle = str(error)
    except HookFailed as error:
        if not isinstance(error.__cause__, NotCompilable):
            raise
        obstacle = str(error)
    with refuse_random_ops(context, obstacle):
        return make_update(context, replicas, examples, sums)


@contextlib.contextmanager
def refuse_random_ops(context: StepContext, obstacle: str) -> Iterator[None]:
    """Rejects an uncompiled update that draws random numbers; it is traced inside the context.

    Does nothing in a run that is not compiled.

    Args:
        context: the context of the step
        obstacle: why the update is not compiled, for the error message

    Raises:
        SetupError: an op draws random numbers; the message names its line.
    """
    graph = tf.compat.v1.get_default_graph()
    operations_before = len(graph.get_operations())
    yield
    if context.compilation is not Compilation.REPLICA:
        return
    for op in compat.add_called_ops(graph.get_operations()[operations_before:]):
        if draws_random_numbers(op):
            raise SetupError(
                f"{find_line(op, context.hooks) or 'the update'}: draws random numbers, and "
                "the update cannot be compiled, so they would differ from those that XLA "
                f"draws; train with --no-jit-compile. ({obstacle})"
            )


def _run_compiled_update(
    context: StepContext,
    examples: Count,
    variables: VariablesByObjective,
    contribution: Contribution,
    total: Contribution,
) -> UpdateResult:
    """Makes the update of one replica in an XLA executable.

    Raises:
        NotCompilable: XLA cannot compile the update.
    """
    strategy = context.components.strategy
    replica = tf.get_static_value(tf.convert_to_tensor(replica_id()))
    number = int(replica) - find_first_replica(strategy)

    @tf.function(jit_compile=True, autograph=False)
    def compiled(contribution: Contribution, total: Contribution) -> UpdateResult:
        gradients = {
            name: list(map(fix_sparse_shape, gradients, variables[name]))
            for name, gradients in total.gradients.items()
        }
        summed = finish_sums(context, True, total._replace(gradients=gradients))
        updates = call_update_pre(context, examples, variables, contribution, summed)
        flags = compute_flags(context, contribution, summed)
        with compat.enter_update(strategy, number):
            apply_on_replica(context, number, variables, summed, updates)
        return UpdateResult(summed, updates, *flags)

    with forbid_uncompilable():
        op = find_uncompilable_op(compiled.get_concrete_function(contribution, total).graph)
        if op is not None:
            raise NotCompilable(describe_op(op, context.hooks))
        result: UpdateResult = compiled(contribution, total)
        return result


def call_update_pre(
    context: StepContext,
    examples: Count,
    variables: VariablesByObjective,
    contribution: Contribution,
    summed: Contribution,
) -> Updates:
    """Calls ``update_pre`` for each objective on one replica, without applying the updates.

    Args:
        context: the context of the step, or of a turn within it
        examples: the number of examples in the global batch
        variables: the variables by objective, in the order of the gradients
        contribution: the contribution of the replica, before the sum
        summed: the gradients and objectives summed over the replicas
    """
    components = context.components
    hook = context.hooks.update_pre
    pieces = {
        name: reduction.join_pieces(getattr(contribution, name))
        for name in PIECES
        if name in hook.arguments
    }
    applied: GradientsByObjective = {}
    displayed: dict[str, UserObject] = {}
    skips: dict[str, tf.Tensor] = {}
    shape = components.shape
    rows, present = shape.count_rows_of(replica_id(), examples)
    find_offset = partial(shape.count_rows_before, replica_id(), examples)
    with weigh_by_rows(rows, present), place_rows(find_offset):
        for name, gradients in summed.gradients.items():
            if not gradients:  # all variables of this objective are frozen
                applied[name] = []
                displayed[name] = []
                continue
            values = {
                **pieces,
                **context.hook_values(),
                "objective": name or None,
                "gradients": gradients,
                "all_gradients": summed.gradients,
                "variables": variables[name],
                "loss": summed.loss.get(name),
                "optimizer": components.optimizers[name],
            }
            with compat.skip_reduction():
                update, displayed[name], *skip = hook.trace(**values)
            _check_shapes(context, update, variables[name])
            applied[name] = list(update)
            if skip and skip[0] is not None:
                skips[name] = tf.convert_to_tensor(skip[0])
    return Updates(applied, displayed, skips)


def _check_shapes(context: StepContext, update: Gradients, variables: list[Variable]) -> None:
    """Rejects gradients returned by ``update_pre`` that do not match their variables."""
    problem = ""
    for gradient, variable in zip(update, variables, strict=False):
        shape = tf.TensorShape(getattr(gradient, "shape", None))
        variable_shape = tf.TensorShape(variable.shape)
        if not shape.is_compatible_with(variable_shape):
            problem = f" ({shape} for {variable_shape})"
            break
    if problem or len(update) != len(variables):
        raise context.hooks.update_pre.reject(
            f"returned {len(update)} update_gradients for {len(variables)} gradients{problem}; "
            "return one per gradient, with the same shapes, in the same order."
        )


def compute_flags(
    context: StepContext, contribution: Contribution, summed: Contribution
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns whether the loss of a replica is finite, and whether no summed gradient has a NaN."""
    loss_is_finite = are_losses_finite(contribution.loss)
    if context.components.loss_scale is not None:  # updates with NaN are skipped anyway
        return loss_is_finite, tf.constant(True)
    gradients = itertools.chain(*summed.gradients.values())
    return loss_is_finite, are_numbers(gradients)


def apply_updates(
    context: StepContext,
    replicas: Replicas,
    variables: VariablesByObjective,
    summed: Contribution,
    updates: Updates,
) -> None:
    """Lets optimizers apply the updates; in float16, only if all gradients are finite."""
    # The gradients are the same on all replicas, so a single check decides for all of them.
    gradients = tf.nest.flatten(summed.gradients)
    _apply_if_finite(
        context,
        partial(apply_on_devices, context, variables, updates),
        [replicas.get_local_results(value)[0] for value in gradients],
    )


def _apply_if_finite(
    context: StepContext, apply: Callable[[], None], gradients: list[tf.Tensor]
) -> None:
    """Applies an update; if there is a loss scale, only if all gradients are finite.

    The loss scale is adjusted whether the update is applied or not.
    """
    loss_scale = context.components.loss_scale
    if loss_scale is None:
        apply()
        return
    is_finite = are_finite(gradients)
    tf.cond(is_finite, apply, lambda: None)
    loss_scale.adjust(is_finite)


def apply_on_devices(
    context: StepContext, variables: VariablesByObjective, updates: Updates
) -> None:
    """Applies the updates on each device of this process, to the variables of that device.

    Replicas exchange no values here, because all replicas compute the same update from the same
    gradients. A condition in ``update_pre`` or in an optimizer therefore has the same value on all
    replicas.
    """
    updated = list(itertools.chain(*variables.values()))
    if not updated:
        return
    # ``extended.update`` calls the function once for each device, in order, but does not pass the
    # index of the device. The variable only tells it which devices there are.
    device_numbers = itertools.count()

    def apply_on_next_device(
        _: tf.Variable, applied: GradientsByObjective, skips: dict[str, tf.Tensor]
    ) -> None:
        apply_on_device(context, next(device_numbers), variables, applied, skips)

    context.components.strategy.extended.update(
        unwrap(updated[0]),
        apply_on_next_device,
        args=(updates.applied, updates.skips),
        group=False,
    )


def apply_on_replica(
    context: StepContext,
    number: int,
    variables: VariablesByObjective,
    summed: Contribution,
    updates: Updates,
) -> None:
    """Applies the updates on one replica, like ``apply_updates``; runs in an update context.

    Args:
        context: the context of the step, or of a turn within it
        number: the index of the device among the devices of this process
        variables: the variables by objective, in the order of the gradients
        summed: the gradients and objectives summed over the replicas
        updates: the result of ``call_update_pre``
    """
    if not any(variables.values()):
        return
    apply = partial(apply_on_device, context, number, variables, updates.applied, updates.skips)
    _apply_if_finite(context, apply, tf.nest.flatten(summed.gradients))


def apply_on_device(
    context: StepContext,
    number: int,
    variables: VariablesByObjective,
    applied: GradientsByObjective,
    skips: dict[str, tf.Tensor],
) -> None:
    """Applies the updates on one device of this process.

    Args:
        context: the context of the step, or of a turn within it
        number: the index of the device among the devices of this process
        variables: the variables by objective, in the order of the gradients
        applied: the gradients that optimizers apply, by objective
        skips: bool scalars that say whether to skip an update, by objective
    """
    strategy = context.components.strategy
    assert isinstance(context.step, tf.Tensor)
    with (
        tf.device(strategy.extended.worker_devices[number]),
        tf.name_scope(""),  # otherwise, the names of summaries would begin with the name scope
        compat.mute_other_summaries(context.step, number),
        compat.update_device(strategy, number),
    ):
        for name, gradients in applied.items():
            apply = partial(apply_gradients, context, name, gradients, variables[name])
            run_unless(skips.get(name), apply)
        run_unless(_find_common_skip(applied, skips), partial(finish_update, context))


def _find_common_skip(
    applied: GradientsByObjective, skips: dict[str, tf.Tensor]
) -> tf.Tensor | None:
    """Returns whether all updates are skipped; None if an updated objective has no ``skip``."""
    updating = [name for name, gradients in applied.items() if gradients]
    if not skips or len(skips) < len(updating):
        return None
    return tf.reduce_all(list(skips.values()))


def run_unless(is_skipped: tf.Tensor | None, function: Callable[[], None]) -> None:
    """Calls a function if ``is_skipped`` is None, or if it is a tensor whose value is False."""
    if is_skipped is None:
        function()
    else:
        tf.cond(is_skipped, lambda: None, function)


def apply_gradients(
    context: StepContext, objective: str, gradients: Gradients, variables: list[Variable]
) -> None:
    """Lets the optimizer of an objective apply gradients, which have already been summed."""
    optimizer = context.components.optimizers[objective]
    pairs = list(zip(gradients, variables, strict=True))
    if pairs:
        call_made(context.hooks.create_opt, optimizer.apply_gradients, pairs)


def finish_update(context: StepContext) -> None:
    """Calls ``update_post`` on one device; after the last turn, also updates the weight average."""
    components = context.components
    hook = context.hooks.update_post
    if hook is not None:
        hook.trace(optimizer=components.optimizer, **context.hook_values())
    if context.is_last_turn and components.update_average is not None:
        components.update_average()
