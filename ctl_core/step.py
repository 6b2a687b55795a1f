"""Takes a training step: computes all leaves of a batch, adds them up, and makes the update.

Everything runs while a graph is traced. Functions handle all replicas at once, unless their
docstring says that they run on one replica. model/forward.py contains the forward and backward pass
of a leaf, model/leaves.py combines the changes that leaves make to variables, and update.py
contains the update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import replica_id
from ctl_core.executable import find_obstacle_to_determinism, forbid_uncompilable
from ctl_core.input.batches import Share, keep_rows_if, leaf_may_lack_rows
from ctl_core.model.components import (
    SINGLE_OBJECTIVE,
    Compilation,
    Division,
    StepContext,
    WrittenVariable,
    choose_division,
)
from ctl_core.model.forward import ForwardBackward, forward_backward
from ctl_core.model.generator_states import BETWEEN_STEPS, TRAINING, UPDATE, GeneratorStates
from ctl_core.model.leaves import LeafVariables, weigh_leaf
from ctl_core.model.logical_replicas import LogicalReplicas
from ctl_core.model.replicas import Replicas
from ctl_core.model.weighed_shares import WeighedShares
from ctl_core.numerics import reduction
from ctl_core.numerics.reduction import PIECES, Contribution
from ctl_core.numerics.report import Report
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
    MakeUpdate,
    Sums,
    UpdateResult,
    make_compiled_update,
    make_logical_update,
    make_update,
)

_OPTIMIZER_IN_MICRO_BATCH = (
    "grad_pre: applies an optimizer itself, which accumulate_steps would repeat in each "
    "micro-batch; return dicts by objective from create_opt and grad_pre, or leave out "
    "accumulate_steps."
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
    states = derive_states(context)
    needed = frozenset({*fetches, *context.hooks.update_pre.arguments})
    is_logical = context.components.shape.logical_replicas is not None
    if is_logical:
        sums = compute_along_tree(context, replicas, states, global_batch, needed)
    else:
        sums = LeavesOfReplicas(context, replicas, states, global_batch, needed).add_up()
    if states.sets_states:  # all devices get equal states, so they draw equal numbers in the update
        replicas.run(partial(states.assign, UPDATE))
    result = choose_update(context)(context, replicas, global_batch.examples, sums)
    if states.sets_states and is_logical:
        replicas.run(partial(states.assign, BETWEEN_STEPS))
    return StepResult(
        loss=result.summed.loss,
        weight=sums.total.weight,
        gradients=result.summed.gradients,
        update_gradients=result.updates.applied,
        display_gradients=result.updates.displayed,
        variables=sums.variables,
        output=sums.local.output,
        batch=sums.local.batch,
        report=combine_reports(replicas, result, sums),
    )


def combine_reports(replicas: Replicas, result: UpdateResult, sums: Sums) -> Report:
    """Returns the report of an update, in which the flags of all replicas are combined."""
    flags = zip(
        replicas.get_local_results(result.loss_is_finite),
        replicas.get_local_results(result.gradients_are_numbers),
        strict=True,
    )
    return Report.combine([Report(*flags_of_replica, sums.are_equal) for flags_of_replica in flags])


def derive_states(context: StepContext) -> GeneratorStates:
    """Returns the states that random generators have in an update.

    In a step without noise, they are not set, so that the step writes the same variables on any
    number of devices.
    """
    components = context.components
    assert context.step is not None
    drawn: Collection[int] = components.generators.drawn
    if context.quiet:
        drawn = ()
    turn = context.turn or 0
    leaves = components.shape.leaves
    return GeneratorStates(components, TRAINING, context.step, turn, leaves, drawn)


def choose_update(context: StepContext) -> MakeUpdate:
    """Returns the function that makes the update with the sums over all leaves."""
    if context.components.shape.logical_replicas is not None:
        return make_logical_update
    if context.compilation is Compilation.REPLICA:
        return make_compiled_update
    return make_update


def compute_along_tree(
    context: StepContext,
    replicas: Replicas,
    states: GeneratorStates,
    global_batch: GlobalBatch,
    needed: frozenset[str],
) -> Sums:
    """Computes all leaves, and adds them up along a fixed tree; the leaves are logical replicas.

    Args:
        context: the context of the step
        replicas: the devices that compute the leaves
        states: the states of the random generators
        global_batch: the global batch
        needed: the names of the values that hooks or the caller need afterwards
    """
    examples = global_batch.examples
    kept = frozenset(PIECES) & needed
    function: ForwardBackward = partial(forward_backward, context, examples, kept)
    if context.compilation is Compilation.REPLICA:
        function = partial(_run_compiled_leaf, context, function)
    computation = LogicalReplicas(context, states, replicas.run)
    total, variables = computation.compute(global_batch.deal(0), examples, function)
    are_equal = stack_flags(computation.are_equal)
    return Sums(local=total, total=total, variables=variables, are_equal=are_equal)


def stack_flags(flags: list[tf.Tensor]) -> tf.Tensor:
    """Returns a bool vector of flags, of which there may be none."""
    return tf.stack(flags) if flags else tf.zeros([0], tf.bool)


class LeavesOfReplicas:
    """Computes all leaves, and adds up those of each replica, and then those of all replicas.

    If a replica has several leaves, it computes them one after another.
    """

    def __init__(
        self,
        context: StepContext,
        replicas: Replicas,
        states: GeneratorStates,
        global_batch: GlobalBatch,
        needed: frozenset[str],
    ) -> None:
        """Prepares an update; see ``compute_along_tree`` for the arguments."""
        self._context = context
        self._needs_loss = "loss" in needed
        self._shape = context.components.shape
        self._replicas = replicas
        self._states = states
        self._examples = global_batch.examples
        self._deal = global_batch.deal
        if choose_division(context) is Division.BEFORE_FORWARD:
            self._deal = WeighedShares(context, replicas, states, global_batch.deal).deal
        kept = frozenset(PIECES) & needed
        self._forward_backward: ForwardBackward = partial(
            forward_backward, context, self._examples, kept
        )
        if self._shape.accumulate_steps > 1:
            self._forward_backward = partial(_run_without_optimizers, self._forward_backward)
        if context.compilation is Compilation.REPLICA:
            self._forward_backward = partial(_run_compiled, self._forward_backward)
        written: Sequence[WrittenVariable] = ()
        if self._shape.leaves > 1:  # a single leaf changes the variables itself
            written = context.components.written
        takes_first = leaf_may_lack_rows(self._examples, self._shape.leaves)
        self._variables = LeafVariables(written, takes_first)
        # With one round, each leaf begins with the right values anyway. Only the variables that are
        # exchanged have to be read.
        if self._shape.accumulate_steps == 1:
            self._variables = LeafVariables(self._variables.exchanged, takes_first)
        self._before: PerReplica = []
        if written:
            self._before = replicas.run(self._variables.read)

    def add_up(self) -> Sums:
        """Computes all leaves, adds them up, and assigns the combined changes of variables."""
        micro_batches = self._shape.accumulate_steps
        if micro_batches == 1:
            contribution, variables = self._compute_round(0)
        else:
            contribution, variables = reduction.accumulate(
                self._replicas.run, micro_batches, self._compute_round
            )
        add_up = partial(sum_contributions, self._context, self._needs_loss)
        total = self._replicas.run(add_up, contribution)
        if self._variables.exchanged:
            self._replicas.run(self._apply_changes, self._before, total.changes)
        counts = [self._replicas.get_local_results(count)[0] for count in total.differences]
        return Sums(
            local=contribution,
            total=total,
            variables=variables,
            are_equal=stack_flags([tf.equal(count, 0.0) for count in counts]),
        )

    def _apply_changes(self, before: list[tf.Tensor], totals: list[tf.Tensor]) -> None:
        """Assigns the changes of all leaves on one replica."""
        _, present = self._shape.count_rows_of(replica_id(), self._examples)
        self._variables.apply_changes(before, totals, present)

    def _compute_round(self, micro_batch: Count) -> tuple[Contribution, VariablesByObjective]:
        """Computes one leaf of each replica.

        Args:
            micro_batch: the index of the leaf among those of its replica

        Returns:
            The contribution of each replica, and the variables that its gradients belong to, by
            objective.
        """
        share = self._deal(micro_batch)
        result: tuple[Contribution, VariablesByObjective] = self._replicas.run(
            partial(self._compute_leaf, micro_batch), share, self._before
        )
        return result

    def _compute_leaf(
        self, micro_batch: Count, share: Share, before: list[tf.Tensor]
    ) -> tuple[Contribution, VariablesByObjective]:
        """Computes a leaf. Runs on one replica.

        Args:
            micro_batch: the index of the leaf among those of its replica
            share: the rows of the leaf
            before: the values of the written variables before the update
        """
        self._states.assign(share.leaf)
        values_of_previous_leaf: list[tf.Tensor] = []
        differences: list[tf.Tensor] = []
        if self._shape.accumulate_steps > 1:
            values_of_previous_leaf = self._variables.read()
            self._variables.begin_leaf(before)
        contribution, variables = self._forward_backward(share)
        if self._shape.accumulate_steps > 1:
            differences = self._variables.count_differences(
                values_of_previous_leaf, micro_batch, share.present
            )
            if share.present is not None:
                self._variables.drop_if_absent(values_of_previous_leaf, share.present)
        weight = weigh_leaf(share, self._examples, self._shape.leaves)
        changes = self._variables.find_changes(before, share, weight)
        contribution = contribution._replace(changes=changes, differences=differences)
        if share.present is not None:
            contribution = contribution._replace(
                output=keep_rows_if(share.present, contribution.output),
                batch=keep_rows_if(share.present, contribution.batch),
            )
        return contribution, variables


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
    """Sums all numbers of a contribution over all replicas, with one all-reduce for each dtype.

    The objectives are summed only if they are needed. Runs on one replica. ``finish_sums`` turns
    the result into the values for ``update_pre``.
    """
    summands = contribution._replace(output=[], batch=[])
    if not needs_loss:
        summands = summands._replace(loss={})
    total: Contribution = reduction.sum_over_replicas(summands, context.components.shape.replicas)
    return total
