"""Takes a training step: the forward and backward pass, the sum over the replicas, and the update.

Everything runs while a graph is traced. Functions handle all replicas at once, unless their
docstring says that they run on one replica. model/forward.py contains the forward and backward pass
of a replica on its share of a batch, and update.py contains the update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.replica_contexts import enter_logical_replica
from ctl_core.executable import find_obstacle_to_determinism, forbid_uncompilable
from ctl_core.input.batches import Share
from ctl_core.model.components import (
    SINGLE_OBJECTIVE,
    Compilation,
    Division,
    StepContext,
    choose_division,
)
from ctl_core.model.forward import ForwardBackward, forward_backward, read_written, settle_written
from ctl_core.model.logical_replicas import BETWEEN_STEPS, UPDATE, LogicalReplicas
from ctl_core.model.replicas import Replicas
from ctl_core.model.weighed_shares import WeighedShares
from ctl_core.numerics import reduction
from ctl_core.numerics.not_finite import FiniteFlags
from ctl_core.numerics.reduction import PIECES, Contribution
from ctl_core.run.errors import SetupError
from ctl_core.types import (
    Count,
    GradientsByObjective,
    GraphFunction,
    PerReplica,
    Structure,
    UserObject,
    VariablesByObjective,
)
from ctl_core.update import (
    Updates,
    apply_updates,
    call_update_pre,
    compute_flags,
    make_compiled_update,
    make_update,
    refuse_random_ops,
    unscale_sums,
)

_OPTIMIZER_IN_MICRO_BATCH = (
    "grad_pre: applies an optimizer itself, which accumulate_steps would repeat in each "
    "micro-batch; return dicts by objective from create_opt and grad_pre, or leave out "
    "accumulate_steps."
)


class GlobalBatch(NamedTuple):
    """A global batch, from which replicas take their shares.

    Attributes:
        deal: returns the ``Share`` of each replica of this process, given the index of a
            micro-batch
        examples: the number of examples in the global batch, an int or an int32 tensor
    """

    deal: Callable[[Count], Share]
    examples: Count


class StepResult(NamedTuple):
    """The results of a step, or of one of its updates; tensors have a value for each replica.

    Attributes:
        loss: the objectives summed over the replicas; empty if they are not needed
        weight: a list with the weight of the batch of the last update, divided by the global batch
            size; empty without ``batch_weight``
        gradients: the gradients summed over the replicas, before ``update_pre`` can clip them; a
            sparse gradient has each index once
        update_gradients: the gradients that optimizers apply, as ``update_pre`` returned them
        display_gradients: the gradients that ``update_pre`` returned for host hooks to display
        variables: the variables that the gradients belong to, which are not tensors
        output: the output of the last update, a list with an entry for each micro-batch; empty if
            it is not needed
        batch: the batch of the last update, in the same form as ``output``
        flags: a ``FiniteFlags`` for each update
        are_equal: says for each variable of ``list_compared`` whether it is equal on all logical
            replicas
    """

    loss: dict[str, PerReplica]
    weight: list[PerReplica]
    gradients: GradientsByObjective
    update_gradients: GradientsByObjective
    display_gradients: dict[str, UserObject]
    variables: VariablesByObjective
    output: list[PerReplica]
    batch: list[PerReplica]
    flags: list[FiniteFlags]
    are_equal: list[tf.Tensor]

    def fetch(self, names: frozenset[str]) -> dict[str, Structure]:
        """Returns the values with the given names.

        With several objectives, gradients, variables and losses are dicts by objective. With a
        single objective, gradients and variables are lists, and the loss is a tensor.
        """
        return {name: strip_objective(getattr(self, name)) for name in names}


def strip_objective(values: Structure) -> Structure:
    """Returns the value of the single objective, if ``values`` is a dict with only this objective.

    Otherwise, the values are returned unchanged.
    """
    if isinstance(values, dict) and SINGLE_OBJECTIVE in values:
        return values[SINGLE_OBJECTIVE]
    return values


def train_step(
    context: StepContext, global_batch: GlobalBatch, fetches: frozenset[str]
) -> StepResult:
    """Takes a step on a global batch. A step makes one update, or one update for each turn.

    Args:
        context: the context of the step
        global_batch: the global batch
        fetches: the names of the values to return, from ``table.OBSERVED``; values that are not
            needed are not computed
    """
    components = context.components
    if components.assign_rate is not None:
        assert isinstance(context.step, tf.Tensor)
        components.assign_rate(context.step)
    if context.hooks.turns:
        share = global_batch.deal(0)  # all turns use the same batch
        global_batch = global_batch._replace(deal=lambda _: share)
    results = [update_once(turn, global_batch, fetches) for turn in context.list_turns()]
    return merge_turns(results)


def merge_turns(results: list[StepResult]) -> StepResult:
    """Merges the results of all turns of a step; output and batch are those of the last turn."""

    def merge(field: str) -> dict[str, Structure]:
        merged: dict[str, Structure] = {}
        for result in results:
            merged |= getattr(result, field)
        return merged

    return results[-1]._replace(
        loss=merge("loss"),
        gradients=merge("gradients"),
        update_gradients=merge("update_gradients"),
        display_gradients=merge("display_gradients"),
        variables=merge("variables"),
        flags=[flags for result in results for flags in result.flags],
        are_equal=[
            tf.reduce_all(flags)
            for flags in zip(*(result.are_equal for result in results), strict=True)
        ],
    )


def update_once(
    context: StepContext, global_batch: GlobalBatch, fetches: frozenset[str]
) -> StepResult:
    """Makes one update on a global batch."""
    replicas = Replicas(context)
    update_pre = context.hooks.update_pre
    kept = frozenset(PIECES) & {*fetches, *update_pre.arguments}
    needs_loss = "loss" in fetches or "loss" in update_pre.arguments

    if context.components.shape.logical_replicas is not None:
        return update_logical_replicas(context, replicas, global_batch, kept)
    contribution, variables = compute_contribution(context, replicas, global_batch, kept)
    total = replicas.run(partial(sum_contributions, context, needs_loss), contribution)
    update = make_update
    if context.compilation is Compilation.REPLICA:
        update = make_compiled_update
    result = update(context, replicas, global_batch.examples, variables, contribution, total)
    return StepResult(
        loss=result.summed.loss,
        weight=total.weight,
        gradients=result.summed.gradients,
        update_gradients=result.updates.applied,
        display_gradients=result.updates.displayed,
        variables=variables,
        output=contribution.output,
        batch=contribution.batch,
        flags=[result.flags],
        are_equal=[],
    )


def update_logical_replicas(
    context: StepContext, replicas: Replicas, global_batch: GlobalBatch, kept: frozenset[str]
) -> StepResult:
    """Makes one update with logical replicas.

    Args:
        context: the context of the step
        replicas: the devices that compute the logical replicas
        global_batch: the global batch
        kept: the names, out of ``output`` and ``batch``, of the values that are needed afterwards
    """
    examples = global_batch.examples
    function: ForwardBackward = partial(forward_backward, context, examples, kept)
    if context.compilation is Compilation.REPLICA:
        function = partial(_run_compiled_leaf, context, function)
    computation = LogicalReplicas(context, replicas.run)
    total, variables = computation.compute(global_batch.deal(0), examples, function)
    with refuse_random_ops(context, obstacle="that of logical replicas never is"):
        summed = replicas.run(partial(unscale_sums, context), total)
        updates = replicas.run(
            partial(_call_update_pre_alike, context, computation, examples, variables),
            total,
            summed,
        )
        flags = replicas.run(partial(compute_flags, context), total, summed)
        apply_updates(context, replicas, variables, summed, updates)
    replicas.run(partial(computation.states.assign, BETWEEN_STEPS))
    return StepResult(
        loss=summed.loss,
        weight=total.weight,
        gradients=summed.gradients,
        update_gradients=updates.applied,
        display_gradients=updates.displayed,
        variables=variables,
        output=total.output,
        batch=total.batch,
        flags=[flags],
        are_equal=computation.are_equal,
    )


def _call_update_pre_alike(
    context: StepContext,
    computation: LogicalReplicas,
    examples: Count,
    variables: VariablesByObjective,
    total: Contribution,
    summed: Contribution,
) -> Updates:
    """Calls ``update_pre`` on a device, as if the device were logical replica 0.

    All devices thus draw the same random numbers and compute the same update.
    """
    with enter_logical_replica(0, context.components.shape.shares):
        computation.states.assign(UPDATE)
        return call_update_pre(context, examples, variables, total, summed)


def compute_contribution(
    context: StepContext, replicas: Replicas, global_batch: GlobalBatch, kept: frozenset[str]
) -> tuple[Contribution, VariablesByObjective]:
    """Runs the forward and backward pass of each replica, in micro-batches if there are several.

    Args:
        context: the context of the step, or of a turn within it
        replicas: the replicas that run the pass
        global_batch: the global batch
        kept: the names, out of ``output`` and ``batch``, of the values that are needed afterwards

    Returns:
        The contribution of each replica, and the variables that its gradients belong to, by
        objective.
    """
    components = context.components
    micro_batches = components.shape.accumulate_steps
    function: ForwardBackward = partial(forward_backward, context, global_batch.examples, kept)
    if micro_batches > 1:
        function = partial(_run_without_optimizers, function)
    if context.compilation is Compilation.REPLICA:
        function = partial(_run_compiled, function)

    deal = global_batch.deal
    if choose_division(context) is Division.BEFORE_FORWARD:
        deal = WeighedShares(context, replicas, deal).deal

    def contribute(index: Count) -> tuple[Contribution, VariablesByObjective]:
        share = deal(index)
        if share.rows is None:
            contribution, variables = replicas.run(function, share)
        else:
            before = replicas.run(partial(read_written, components))
            contribution, variables = replicas.run(function, share)
            contribution = replicas.run(
                partial(settle_written, components),
                contribution, before, share.rows, share.present, share.together,
            )  # fmt: skip
        return contribution, variables

    if micro_batches == 1:
        return contribute(0)
    return reduction.accumulate(replicas.run, micro_batches, contribute)


def _run_without_optimizers(
    function: ForwardBackward, share: Share
) -> tuple[Contribution, VariablesByObjective]:
    """Runs the forward and backward pass of a micro-batch.

    Raises an error if a hook applies an optimizer in it.
    """
    with compat.refuse_optimizers(_OPTIMIZER_IN_MICRO_BATCH):
        return function(share)


def _run_compiled(
    function: ForwardBackward, share: Share
) -> tuple[Contribution, VariablesByObjective]:
    """Runs the forward and backward pass of one replica in an XLA executable.

    A compiled function can return only tensors, so the variables are returned separately. The
    function is defined again for each replica and each graph, because a cached trace would use the
    variables of another replica.
    """
    variables: VariablesByObjective = {}
    compiled = _define_compiled(function, variables)
    with forbid_uncompilable():
        return compiled(share), variables


def _define_compiled(function: ForwardBackward, variables: VariablesByObjective) -> GraphFunction:
    """Returns a function that XLA compiles; tracing the function fills ``variables``."""

    @tf.function(jit_compile=True, autograph=False)
    def compiled(share: Share) -> Contribution:
        contribution, traced_variables = function(share)
        variables.update(traced_variables)
        return contribution

    return compiled


def _run_compiled_leaf(
    context: StepContext, function: ForwardBackward, share: Share
) -> tuple[Contribution, VariablesByObjective]:
    """Runs the forward and backward pass of one logical replica in an XLA executable.

    Raises:
        SetupError: XLA cannot compile the pass; the message names the op and its line.
    """
    variables: VariablesByObjective = {}
    compiled = _define_compiled(function, variables)
    with forbid_uncompilable():
        graph = compiled.get_concrete_function(share).graph
        obstacle = find_obstacle_to_determinism(graph, context.hooks)
        if obstacle is not None:
            raise SetupError(f"jit_compile: {obstacle}; train with --no-jit-compile.")
        return compiled(share), variables


def sum_contributions(
    context: StepContext, needs_loss: bool, contribution: Contribution
) -> Contribution:
    """Sums gradients, and objectives if they are needed, over all replicas in one all-reduce.

    Runs on one replica. ``finish_sums`` turns the result into the values for ``update_pre``.
    """
    loss = contribution.loss if needs_loss else {}
    gradients, summed_loss, weight = reduction.sum_over_replicas(
        (contribution.gradients, loss, contribution.weight), context.components.shape.replicas
    )
    return Contribution(summed_loss, gradients, weight, [], [])
