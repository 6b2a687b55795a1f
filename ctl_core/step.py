"""Takes a training step: computes all leaves of a batch, adds them up, and makes the update.

Everything runs while a graph is traced. Functions handle all replicas at once, unless their
docstring says that they run on one replica. model/forward.py contains the forward and backward pass
of a leaf, model/leaves.py combines the changes that leaves make to variables, and update.py
contains the update.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import tensorflow as tf

from ctl_core import compat
from ctl_core.input.batches import Share, keep_rows_if, leaf_may_lack_rows
from ctl_core.model.components import (
    SINGLE_OBJECTIVE,
    Compilation,
    Components,
    Division,
    StepContext,
    choose_division,
)
from ctl_core.model.forward import forward_backward
from ctl_core.model.generator_states import TRAINING, choose_generators
from ctl_core.model.leaves import LeafVariables, Sums, weigh_leaf
from ctl_core.model.logical_replicas import LogicalReplicas
from ctl_core.model.replicas import Replicas
from ctl_core.model.shared_functions import hide_numbers
from ctl_core.model.weighed_shares import WeighedShares
from ctl_core.numerics import reduction
from ctl_core.numerics.reduction import PIECES, ContributionLayout, PackedContribution
from ctl_core.numerics.report import Report
from ctl_core.types import (
    Count,
    GradientsByObjective,
    PerReplica,
    Structure,
    UserObject,
    VariablesByObjective,
)
from ctl_core.update import make_update

_OPTIMIZER_IN_LEAF = (
    "grad_pre: applies an optimizer itself, which {setting} {problem}; return dicts by objective "
    "from create_opt and grad_pre, or leave out {setting}."
)


class GlobalBatch(NamedTuple):
    """A global batch, which is divided into leaves.

    Attributes:
        deal: returns the ``Share`` of the leaf that each replica of this process computes, given
            the index of a micro-batch
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
        report: the flags of the step, which do not have a value for each replica
    """

    loss: dict[str, PerReplica]
    weight: list[PerReplica]
    gradients: GradientsByObjective
    update_gradients: GradientsByObjective
    display_gradients: dict[str, UserObject]
    variables: VariablesByObjective
    output: list[PerReplica]
    batch: list[PerReplica]
    report: Report

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
        report=Report.combine([result.report for result in results]),
    )


def update_once(
    context: StepContext, global_batch: GlobalBatch, fetches: frozenset[str]
) -> StepResult:
    """Makes one update on a global batch."""
    replicas = Replicas(context)
    needed = frozenset({*fetches, *context.hooks.update_pre.arguments})
    if context.components.shape.logical_replicas is not None:
        sums = compute_along_tree(context, replicas, global_batch, needed)
    else:
        sums = LeavesOfReplicas(context, replicas, global_batch, needed).add_up()
    result = make_update(context, replicas, global_batch.examples, sums, fetches)
    return StepResult(
        loss=result.loss,
        weight=result.weight,
        gradients=result.gradients,
        update_gradients=result.update_gradients,
        display_gradients=result.display_gradients,
        variables=sums.layout.variables,
        output=sums.local.output,
        batch=sums.local.batch,
        report=combine_reports(replicas, result.report, sums.are_equal),
    )


def combine_reports(replicas: Replicas, reports: PerReplica, are_equal: tf.Tensor | None) -> Report:
    """Returns the report of an update, in which the flags of all replicas are combined.

    Args:
        replicas: the replicas that made the update
        reports: the report of each replica
        are_equal: the flag of this name, if it is the same for all replicas; otherwise None
    """
    combined = Report.combine(
        [Report(*flags) for flags in zip(*map(replicas.get_local_results, reports), strict=True)]
    )
    if are_equal is not None:
        combined = combined._replace(are_equal=are_equal)
    return combined


def compute_along_tree(
    context: StepContext,
    replicas: Replicas,
    global_batch: GlobalBatch,
    needed: frozenset[str],
) -> Sums:
    """Computes all leaves, and adds them up along a fixed tree; the leaves are logical replicas.

    Args:
        context: the context of the step
        replicas: the devices that compute the leaves
        global_batch: the global batch
        needed: the names of the values that hooks or the caller need afterwards
    """
    computation = LogicalReplicas(context, replicas, frozenset(PIECES) & needed)
    return computation.compute(global_batch.deal(0), global_batch.examples)


class LeavesOfReplicas:
    """Computes all leaves, and adds up those of each replica, and then those of all replicas.

    If a replica has several leaves, it computes them one after another.
    """

    def __init__(
        self,
        context: StepContext,
        replicas: Replicas,
        global_batch: GlobalBatch,
        needed: frozenset[str],
    ) -> None:
        """Prepares an update; see ``compute_along_tree`` for the arguments."""
        self._context = context
        self._shape = context.components.shape
        self._replicas = replicas
        self._examples = global_batch.examples
        self._deal = global_batch.deal
        generators = choose_generators(context)
        assert context.step is not None
        self._states = generators.derive(TRAINING, context.step, context.turn or 0)
        if choose_division(context) is Division.BEFORE_FORWARD:
            self._deal = WeighedShares(
                context, replicas, generators, self._states, global_batch.deal
            ).deal
        takes_first = leaf_may_lack_rows(self._examples, self._shape.leaves)
        self._variables = choose_leaf_variables(context.components, takes_first)
        kept = frozenset(PIECES) & needed
        key = ("leaf", context.turn, kept)
        leaf = Leaf(context, self._variables, kept)
        self._leaf = replicas.share(
            key,
            leaf.compute,
            compiled=context.compilation is Compilation.REPLICA,
            waits=self._shape.accumulate_steps > 1,
        )
        self._leaf.obstacle = self._leaf.obstacle or context.components.leaf_obstacle
        self._before: PerReplica = []
        if self._variables.exchanged or self._shape.accumulate_steps > 1:
            self._before = replicas.run(self._variables.read)

    def add_up(self) -> Sums:
        """Computes all leaves, and adds them up."""
        micro_batches = self._shape.accumulate_steps
        if micro_batches == 1:
            contribution, layout = self._compute_round(0)
        else:
            contribution, layout = reduction.accumulate(
                self._replicas.run, micro_batches, self._compute_round
            )
        add_up = partial(reduction.sum_over_replicas, replicas=self._shape.replicas)
        return Sums(
            local=contribution,
            total=self._replicas.run(add_up, contribution.buckets),
            layout=layout,
            written=self._variables,
            before=self._before,
            states=self._states,
            are_equal=None,
        )

    def _compute_round(self, micro_batch: Count) -> tuple[PackedContribution, ContributionLayout]:
        """Computes one leaf of each replica.

        Args:
            micro_batch: the index of the leaf among those of its replica

        Returns:
            The contribution of each replica, and its layout.
        """
        share = self._replicas.run(partial(hide_numbers, self._leaf), self._deal(micro_batch))
        values = (micro_batch, share, self._examples, self._before, self._states)
        call = partial(self._replicas.call, self._leaf, *values)
        packed, layout = self._leaf.run_again_if_not_shareable(call)
        return self._replicas.run(layout.restore_shapes, packed), layout


def choose_leaf_variables(components: Components, takes_first: bool) -> LeafVariables:
    """Returns the variables whose changes are combined after all leaves have been computed.

    Args:
        components: the components of the run
        takes_first: see ``LeafVariables``
    """
    shape = components.shape
    if shape.leaves == 1:  # a single leaf changes the variables itself
        return LeafVariables([])
    variables = LeafVariables(components.written, takes_first)
    # With one round, each leaf begins with the right values anyway. Only the variables that are
    # exchanged have to be read.
    if shape.accumulate_steps == 1:
        variables = LeafVariables(variables.exchanged, takes_first)
    return variables


class Leaf:
    """Computes a leaf on one replica. Contains no tensors, so that all graphs can use it."""

    def __init__(
        self,
        context: StepContext,
        variables: LeafVariables,
        kept: frozenset[str],
    ) -> None:
        """Prepares to compute leaves.

        Args:
            context: the context of the step; its step is not used
            variables: the variables whose changes are combined
            kept: the values to return besides the gradients: any of ``output`` and ``batch``
        """
        self._context = dataclasses.replace(context, step=None)
        self._generators = choose_generators(context)
        self._has_rounds = context.components.shape.accumulate_steps > 1
        self._variables = variables
        self._kept = kept

    def compute(
        self,
        step: tf.Tensor,
        micro_batch: Count,
        share: Share,
        examples: Count,
        before: list[tf.Tensor],
        states: tf.Tensor | None,
    ) -> tuple[PackedContribution, ContributionLayout]:
        """Computes a leaf.

        Args:
            step: the number of the step
            micro_batch: the index of the leaf among those of its replica
            share: the rows of the leaf
            examples: the number of examples in the global batch
            before: the values of the written variables before the update
            states: the states of the random generators in this update
        """
        context = self._context.begin_step(step)
        self._generators.assign(states, share.leaf)
        values_of_previous_leaf: list[tf.Tensor] = []
        differences: list[tf.Tensor] = []
        if self._has_rounds:
            values_of_previous_leaf = self._variables.read()
            self._variables.begin_leaf(before)
        with refuse_optimizers(context):
            contribution, variables = forward_backward(context, examples, self._kept, share)
        if self._has_rounds:
            differences = self._variables.count_differences(
                values_of_previous_leaf, micro_batch, share.present
            )
            if share.present is not None:
                self._variables.drop_if_absent(values_of_previous_leaf, share.present)
        weight = weigh_leaf(share, examples, context.components.shape.leaves)
        changes = self._variables.find_changes(before, share, weight)
        contribution = contribution._replace(changes=changes, differences=differences)
        if share.present is not None:
            contribution = contribution._replace(
                output=keep_rows_if(share.present, contribution.output),
                batch=keep_rows_if(share.present, contribution.batch),
            )
        layout = ContributionLayout(
            contribution, variables, are_exchanged=context.components.shape.replicas > 1
        )
        return layout.pack(contribution), layout


def refuse_optimizers(context: StepContext) -> contextlib.AbstractContextManager[None]:
    """Raises an error inside the context if a leaf must not apply an optimizer itself, but does."""
    components = context.components
    if components.shape.accumulate_steps > 1:
        problem = "would repeat in each micro-batch"
        setting = "accumulate_steps"
    elif components.shards is not None:
        problem = "cannot divide among the devices"
        setting = "shard_optimizer"
    else:
        return contextlib.nullcontext()
    return compat.refuse_optimizers(_OPTIMIZER_IN_LEAF.format(setting=setting, problem=problem))
