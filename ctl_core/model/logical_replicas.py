"""Computes a step with logical replicas, whose result has the same bits on any number of devices.

A global batch has V shares, one for each logical replica. leaf_sum.py computes the logical replicas
of each device and adds up their results. This module defines the work of a logical replica, and
applies the sums to the variables on each device.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import has_peers
from ctl_core.cluster.replica_contexts import enter_logical_replica
from ctl_core.input.batches import (
    Share,
    ShareWeight,
    find_rows,
    keep_rows_if,
    take_share,
    unpack_element,
)
from ctl_core.model.components import Compilation, Division, StepContext, choose_division
from ctl_core.model.executable import find_obstacle_to_determinism
from ctl_core.model.forward import fix_shape, forward_backward, weigh_share
from ctl_core.model.generator_states import TRAINING, choose_generators
from ctl_core.model.leaf_sum import BucketLayout, DeviceResult, LeafResult, LeafSum
from ctl_core.model.leaves import LeafVariables, Sums, list_parts, weigh_leaf
from ctl_core.model.logical_exchange import gather, gather_pieces, get_device_number
from ctl_core.model.replicas import Replicas
from ctl_core.model.shared_functions import call_compiled, hide
from ctl_core.numerics.bits import are_all_equal, read_bits
from ctl_core.numerics.packing import BUCKET_BYTES, GradientPacking, find_length
from ctl_core.numerics.reduction import (
    Contribution,
    ContributionLayout,
    PackedContribution,
    merge_rows,
)
from ctl_core.numerics.report import stack_flags
from ctl_core.run.errors import SetupError
from ctl_core.types import (
    Batch,
    Count,
    Gradient,
    GradientsByObjective,
    Structure,
    VariablesByObjective,
)


class LeafFacts(NamedTuple):
    """The values that tracing a logical replica yields, but that a graph function cannot return.

    Attributes:
        layout: the layout of the contribution
        buckets: the layout of the same tensors, for the sum along the tree
        pieces: the structure of the output and the batch, without tensors
    """

    layout: ContributionLayout
    buckets: BucketLayout
    pieces: Structure


class DeviceWeights(NamedTuple):
    """The results of ``batch_weight``, if they are computed before the forward pass.

    Attributes:
        by_leaf: the weights of the logical replicas of the device, a vector
        total: the sum of the weights of all logical replicas
    """

    by_leaf: tf.Tensor
    total: tf.Tensor


class DeviceShare(NamedTuple):
    """The share of a device, from which its logical replicas take their shares.

    Attributes:
        batch: the rows of the device's logical replicas, or their packed elements
        first_leaf: the index of the first logical replica of the device, an int32 scalar
        first_row: the index of the first row of the device in the global batch, an int32 scalar
        examples: the number of examples in the global batch
        weights: the weights of the logical replicas; None if they are not computed first
    """

    batch: Batch
    first_leaf: tf.Tensor
    first_row: tf.Tensor
    examples: Count
    weights: DeviceWeights | None = None


class LogicalReplicas:
    """Computes the forward and backward passes of all logical replicas, and their sum."""

    def __init__(self, context: StepContext, replicas: Replicas, kept: frozenset[str]) -> None:
        """Prepares an update.

        Args:
            context: the context of the step
            replicas: the devices
            kept: the values to return besides the gradients: any of ``output`` and ``batch``
        """
        self._context = context
        self._shape = context.components.shape
        self._strategy = context.components.strategy
        self._replicas = replicas
        self._sum = LeafSum(self._shape.leaves, self._shape.replicas)
        metrics = context.components.list_logged_metrics().values()
        self._variables = LeafVariables([*context.components.written, *list_parts(metrics)])
        leaf = LogicalLeaf(context, self._variables, kept)
        key = ("logical replica", context.turn, kept)
        self._leaf = replicas.share(key, leaf.compute, inlined=False)
        self._weigh = replicas.share((*key, "weight"), leaf.weigh, inlined=False)
        assert isinstance(context.step, tf.Tensor)
        self._step = context.step
        generators = choose_generators(context)
        self._states = generators.derive(TRAINING, context.step, context.turn or 0)
        self._facts: LeafFacts | None = None

    def compute(self, share: Share, examples: Count) -> Sums:
        """Computes all logical replicas, and adds up their contributions.

        Args:
            share: for each device, the rows of its logical replicas
            examples: the number of examples in the global batch
        """
        weights = None
        if choose_division(self._context) is Division.BEFORE_FORWARD:
            weights = self._weigh_leaves(share, examples)
        run_device = partial(self._run_device, examples)
        result, before = self._leaf.run_again_if_not_shareable(
            partial(self._replicas.run, run_device, share, weights)
        )
        total = self._sum.finish(self._strategy, self._replicas.run, result.roots)
        assert self._facts is not None
        pieces = result.pieces
        if has_peers(self._strategy) and pieces[0]:
            pieces = self._replicas.run(partial(gather_pieces, self._sum.ranges), pieces)
        output: list[Structure] = []
        batch: list[Structure] = []
        for leaf_pieces in pieces:
            leaf_output, leaf_batch = tf.nest.pack_sequence_as(self._facts.pieces, leaf_pieces)
            output += leaf_output
            batch += leaf_batch
        flags = self._compare_devices(result)
        return Sums(
            local=PackedContribution([], {}, output, batch),
            total=total,
            layout=self._facts.layout,
            written=self._variables,
            before=before,
            states=self._states,
            are_equal=stack_flags(flags),
        )

    def _weigh_leaves(self, share: Share, examples: Count) -> DeviceWeights:
        """Computes the weights of all logical replicas, and their sum along the tree.

        Args:
            share: for each device, the rows of its logical replicas
            examples: the number of examples in the global batch
        """
        leaf_sum = LeafSum(self._shape.leaves, self._shape.replicas)

        def run_device(share: Share) -> DeviceResult:
            device = get_device_number()
            device_share = self._describe_share(device, examples, share)

            def weigh(index: tf.Tensor) -> tuple[LeafResult, BucketLayout]:
                result: tuple[LeafResult, BucketLayout]
                result = self._weigh(self._step, index, device_share, self._states)
                return result

            return leaf_sum.add_up_device(device, weigh)

        result = self._weigh.run_again_if_not_shareable(
            partial(self._replicas.run, run_device, share)
        )
        total = leaf_sum.finish(self._strategy, self._replicas.run, result.roots)
        (total_weight,) = self._replicas.run(lambda buckets: _unpack(leaf_sum, buckets), total)
        return DeviceWeights(self._replicas.run(_join_weights, result.pieces), total_weight)

    def _describe_share(self, device: int, examples: Count, share: Share) -> DeviceShare:
        """Returns the share of a device, from which its logical replicas take their shares."""
        device_leaves = self._sum.ranges[device]
        first_row, _ = find_rows(device_leaves, examples, self._shape.leaves)
        return DeviceShare(share.batch, hide(device_leaves.start), hide(first_row), examples)

    def _run_device(
        self, examples: Count, share: Share, weights: DeviceWeights | None
    ) -> tuple[DeviceResult, list[tf.Tensor]]:
        """Computes the logical replicas of one device.

        Returns:
            The results, and the values of variables before.
        """
        device = get_device_number()
        before = self._variables.read()
        device_share = self._describe_share(device, examples, share)._replace(weights=weights)

        def compute(index: tf.Tensor) -> tuple[LeafResult, BucketLayout]:
            result, facts = self._leaf(self._step, index, device_share, before, self._states)
            self._facts = facts
            return result, facts.buckets

        return self._sum.add_up_device(device, compute), before

    def _compare_devices(self, result: DeviceResult) -> list[tf.Tensor]:
        """Returns, for each compared variable, whether all logical replicas have the same value."""
        local_results = self._strategy.experimental_local_results
        if not result.compared:
            return []
        if has_peers(self._strategy):
            flags = self._replicas.run(compare_between_processes, result.compared, result.are_equal)
            return [local_results(flag)[0] for flag in flags]
        with tf.device(self._strategy.extended.worker_devices[0]):
            return [
                tf.reduce_all([are_all_equal(local_results(values)), *local_results(are_equal)])
                for values, are_equal in zip(result.compared, result.are_equal, strict=True)
            ]


class LogicalLeaf:
    """Computes a logical replica on one device. Contains no tensors, so all graphs can use it."""

    def __init__(
        self, context: StepContext, variables: LeafVariables, kept: frozenset[str]
    ) -> None:
        """Prepares to compute logical replicas.

        Args:
            context: the context of the step; its step is not used
            variables: the variables whose changes are combined
            kept: the values to return besides the gradients: any of ``output`` and ``batch``
        """
        self._context = dataclasses.replace(context, step=None)
        self._shape = context.components.shape
        self._generators = choose_generators(context)
        self._variables = variables
        self._kept = kept

    def compute(
        self,
        step: tf.Tensor,
        index: tf.Tensor,
        device_share: DeviceShare,
        before: list[tf.Tensor],
        states: tf.Tensor | None,
    ) -> tuple[LeafResult, LeafFacts]:
        """Computes a logical replica.

        Args:
            step: the number of the step
            index: the index of the logical replica, an int32 scalar
            device_share: the share of the device
            before: the values of the written variables before the update
            states: the states of the random generators in this update
        """
        with self._enter(step, index):
            self._generators.assign(states, index)
            self._variables.begin_leaf(before)
            share = self._take_share(device_share, index)
            weights = device_share.weights
            if weights is not None:
                own_weight = weights.by_leaf[index - device_share.first_leaf]
                share = share._replace(weight=ShareWeight(own_weight, weights.total))
            contribution, variables = self._compute_pass(step, device_share.examples, share)
            sparse_rows = list_sparse_rows(contribution.gradients, variables)
            gradients = merge_rows(contribution.gradients, compiled=False)
            weight = weigh_leaf(share, device_share.examples, self._shape.leaves)
            contribution = contribution._replace(
                gradients=settle_gradients(gradients, variables),
                changes=self._variables.find_changes(before, share, weight),
            )
            pieces = (contribution.output, contribution.batch)
            if share.present is not None:
                pieces = keep_rows_if(share.present, pieces)
            layout = ContributionLayout(contribution, variables, are_exchanged=True)
            result = LeafResult(
                buckets=layout.pack(contribution).buckets,
                compared=self._variables.read_compared(),
                pieces=tf.nest.flatten(pieces),
            )
        structure = tf.nest.map_structure(lambda _: 0, pieces)
        return result, LeafFacts(layout, BucketLayout(layout.packing, sparse_rows), structure)

    def weigh(
        self, step: tf.Tensor, index: tf.Tensor, device_share: DeviceShare, states: tf.Tensor | None
    ) -> tuple[LeafResult, BucketLayout]:
        """Computes the weight of a logical replica; see ``compute`` for the arguments."""
        with self._enter(step, index) as context:
            self._generators.assign(states, index)
            weight = weigh_share(context, self._take_share(device_share, index))
        packing = GradientPacking([weight], BUCKET_BYTES)
        return LeafResult(packing.pack([weight]), [], [weight]), BucketLayout(packing)

    @contextlib.contextmanager
    def _enter(self, step: tf.Tensor, index: tf.Tensor) -> Iterator[StepContext]:
        """Enters the contexts in which the hooks of a logical replica are traced."""
        with (
            enter_logical_replica(index, self._shape.leaves),
            compat.mute_other_summaries(step, index),
            tf.name_scope(""),  # otherwise names of summaries would begin with it
        ):
            yield self._context.begin_step(step)

    def _take_share(self, device_share: DeviceShare, index: tf.Tensor) -> Share:
        """Returns the share of a logical replica: rows, or an element of the dataset."""
        batch = device_share.batch
        if self._shape.by_rows:
            examples = device_share.examples
            return take_share(batch, examples, index, self._shape.leaves, device_share.first_row)
        packed = batch[index - device_share.first_leaf]
        return Share(unpack_element(packed, self._shape.element_spec), leaf=index)

    def _compute_pass(
        self, step: tf.Tensor, examples: Count, share: Share
    ) -> tuple[Contribution, VariablesByObjective]:
        """Runs the forward and backward pass; in a compiled run, in an XLA executable.

        Raises:
            SetupError: XLA cannot compile the pass; the message names the op and its line.
        """
        context = self._context.begin_step(step)
        function = partial(forward_backward, context, examples, self._kept)
        if context.compilation is not Compilation.REPLICA:
            return function(share)
        return call_compiled(function, self._refuse_noise, share)

    def _refuse_noise(self, graph: tf.Graph) -> None:
        """Raises an error if XLA cannot compile a graph into deterministic ops."""
        obstacle = find_obstacle_to_determinism(graph, self._context.hooks)
        if obstacle is not None:
            raise SetupError(f"jit_compile: {obstacle}; train with --no-jit-compile.")


def _unpack(leaf_sum: LeafSum, buckets: list[Gradient]) -> list[Gradient]:
    """Returns the sums of a tree on one device."""
    assert leaf_sum.layout is not None
    return leaf_sum.layout.packing.unpack(buckets)


def _join_weights(pieces: list[list[tf.Tensor]]) -> tf.Tensor:
    """Returns the weights of the logical replicas of a device as a vector."""
    return tf.concat([piece for pieces_of_leaf in pieces for piece in pieces_of_leaf], 0)


def compare_between_processes(
    compared: list[tf.Tensor], are_equal: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns, for each value, whether it is the same on all logical replicas of all processes.

    Runs on each device.

    Args:
        compared: the values of this device, see ``DeviceResult``
        are_equal: for each value, whether it is the same on all logical replicas of this device
    """
    vectors = [tf.reshape(tf.cast(read_bits(value), tf.int64), [-1]) for value in compared]
    gathered = gather(tf.concat([tf.cast(tf.stack(are_equal), tf.int64), *vectors], 0))
    sizes = [len(are_equal), *map(find_length, vectors)]
    flags, *bits = tf.split(gathered, sizes, axis=1)
    return [
        tf.reduce_all(bits_of_value == bits_of_value[:1]) & tf.reduce_all(flags[:, number] == 1)
        for number, bits_of_value in enumerate(bits)
    ]


def list_sparse_rows(
    gradients: GradientsByObjective, variables: VariablesByObjective
) -> list[tuple[int, int]]:
    """Returns, for each sparse gradient, the maximum numbers of rows of it and of its variable.

    Args:
        gradients: the gradients of a logical replica, in which an index may occur more than once
        variables: the variables of the gradients
    """
    rows = []
    for gradient, variable in zip(
        tf.nest.flatten(gradients), tf.nest.flatten(variables), strict=True
    ):
        if isinstance(gradient, tf.IndexedSlices):
            table_rows = int(variable.shape[0])
            rows.append((gradient.values.shape[0] or table_rows, table_rows))
    return rows


def settle_gradients(
    gradients: GradientsByObjective, variables: VariablesByObjective
) -> GradientsByObjective:
    """Returns gradients with the static shapes of their variables.

    Sparse gradients stay sparse: whether a gradient is sparse depends only on how the model uses
    its variable.
    """
    return {
        name: list(map(fix_shape, objective_gradients, variables[name]))
        for name, objective_gradients in gradients.items()
    }
