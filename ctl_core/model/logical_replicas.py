"""Computes a step with logical replicas, whose result has the same bits on any number of devices.

A global batch has V shares, one for each logical replica. leaf_sum.py computes the logical replicas
of each device and adds up their results. This module defines the work of a logical replica, and
applies the sums to the variables on each device.
"""

from __future__ import annotations

import contextlib
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
from ctl_core.model.components import Components, Division, StepContext, choose_division
from ctl_core.model.forward import ForwardBackward, fix_sparse_shape, weigh_share
from ctl_core.model.generator_states import GeneratorStates
from ctl_core.model.leaf_sum import DeviceResult, LeafResult, LeafSum, Run
from ctl_core.model.leaves import LeafVariables, list_parts, weigh_leaf
from ctl_core.model.logical_exchange import gather, gather_pieces, get_device_number
from ctl_core.numerics.bits import are_all_equal, read_bits
from ctl_core.numerics.packing import find_length
from ctl_core.numerics.reduction import Contribution, merge_rows
from ctl_core.types import (
    Batch,
    Count,
    Gradient,
    GradientsByObjective,
    Structure,
    Variable,
    VariablesByObjective,
)


class TracedLeaf(NamedTuple):
    """The values that tracing a logical replica yields, but that a graph function cannot return.

    Every device traces its own function of a logical replica, and these values are the same on all
    devices.

    Attributes:
        variables: the variables of the gradients by objective
        sums: the loss, the gradients and the weight, which give sums their structure
        pieces: the output and the batch, which give pieces their structure
    """

    variables: VariablesByObjective
    sums: Structure
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
        first_leaf: the index of the first logical replica of the device
        first_row: the index of the first row of the device in the global batch
        examples: the number of examples in the global batch
        weights: the weights of the logical replicas; None if they are not computed first
    """

    batch: Batch
    first_leaf: int
    first_row: Count
    examples: Count
    weights: DeviceWeights | None = None


class LogicalReplicas:
    """Computes the forward and backward passes of all logical replicas, and their sum.

    Attributes:
        are_equal: one bool scalar for each variable that must have the same value on all logical
            replicas after they have run. It is True if the values are equal. ``compute`` sets this
            list.
    """

    def __init__(self, context: StepContext, states: GeneratorStates, run: Run) -> None:
        """Prepares an update.

        Args:
            context: the context of the step
            states: the states of the random generators in the step
            run: a function that calls another function on each device, with that device's values
        """
        self._context = context
        self._components: Components = context.components
        self._run = run
        shape = self._components.shape
        self.are_equal: list[tf.Tensor] = []
        self._states = states
        metrics = self._components.list_logged_metrics().values()
        self._variables = LeafVariables([*self._components.written, *list_parts(metrics)])
        self._sum = LeafSum(shape.leaves, shape.replicas)
        self._traced: TracedLeaf | None = None

    def compute(
        self, share: Share, examples: Count, forward_backward: ForwardBackward
    ) -> tuple[Contribution, VariablesByObjective]:
        """Computes all logical replicas, and adds up their contributions.

        Args:
            share: for each device, the rows of its logical replicas
            examples: the number of examples in the global batch
            forward_backward: a function that computes the contribution of a logical replica

        Returns:
            The sum of all contributions, with the outputs and batches of the logical replicas of
            each device; and the variables of the gradients by objective.
        """
        strategy = self._components.strategy
        run_device = partial(self._run_device, examples, forward_backward)
        weights = None
        if choose_division(self._context) is Division.BEFORE_FORWARD:
            weights = self._weigh_leaves(share, examples)
        result, before = self._run(run_device, share, weights)
        totals = self._sum.finish(strategy, self._run, result.roots)
        traced = self._traced
        assert traced is not None
        # The last totals are changes. There may be none, and totals[-0:] would be all totals.
        first_change = len(totals) - len(self._variables.exchanged)
        changes = totals[first_change:]
        sums = tf.nest.pack_sequence_as(traced.sums, totals[:first_change])
        self.are_equal = self._compare_devices(result)
        self._run(self._variables.apply_changes, before, changes)
        loss, gradients, weight = sums
        pieces = result.pieces
        if has_peers(strategy) and pieces[0]:
            pieces = self._run(partial(gather_pieces, self._sum.ranges), pieces)
        gradients = self._run(partial(settle_gradients, variables=traced.variables), gradients)
        output: list[Structure] = []
        batch: list[Structure] = []
        for leaf_pieces in pieces:
            leaf_output, leaf_batch = tf.nest.pack_sequence_as(traced.pieces, leaf_pieces)
            output += leaf_output
            batch += leaf_batch
        total = Contribution(loss, gradients, weight, output, batch, changes=[], differences=[])
        return total, traced.variables

    def _weigh_leaves(self, share: Share, examples: Count) -> DeviceWeights:
        """Computes the weights of all logical replicas, and their sum along the tree.

        Args:
            share: for each device, the rows of its logical replicas
            examples: the number of examples in the global batch
        """
        leaf_sum = LeafSum(self._components.shape.leaves, self._components.shape.replicas)
        result = self._run(partial(self._weigh_on_device, leaf_sum, examples), share)
        (total,) = leaf_sum.finish(self._components.strategy, self._run, result.roots)
        return DeviceWeights(self._run(_join_weights, result.pieces), total)

    def _weigh_on_device(self, leaf_sum: LeafSum, examples: Count, share: Share) -> DeviceResult:
        """Computes the weights of the logical replicas of one device."""
        device = get_device_number()
        device_share = self._describe_share(device, examples, share)

        def weigh_leaf(index: tf.Tensor) -> LeafResult:
            with self._enter_leaf(index):
                self._states.assign(index)
                weight = weigh_share(self._context, self._take_share(device_share, index))
                return LeafResult(summed=[weight], compared=[], pieces=[weight])

        return leaf_sum.add_up_device(device, weigh_leaf)

    def _describe_share(self, device: int, examples: Count, share: Share) -> DeviceShare:
        """Returns the share of a device, from which its logical replicas take their shares."""
        device_leaves = self._sum.ranges[device]
        first_row, _ = find_rows(device_leaves, examples, self._components.shape.leaves)
        return DeviceShare(share.batch, device_leaves.start, first_row, examples)

    @contextlib.contextmanager
    def _enter_leaf(self, index: tf.Tensor) -> Iterator[None]:
        """Enters the contexts in which the hooks of a logical replica are traced."""
        step = self._context.step
        assert isinstance(step, tf.Tensor)
        with (
            enter_logical_replica(index, self._components.shape.leaves),
            compat.mute_other_summaries(step, index),
            tf.name_scope(""),  # otherwise names of summaries would begin with it
        ):
            yield

    def _run_device(
        self,
        examples: Count,
        forward_backward: ForwardBackward,
        share: Share,
        weights: DeviceWeights | None,
    ) -> tuple[DeviceResult, list[tf.Tensor]]:
        """Computes the logical replicas of one device.

        Returns:
            The results, and the values of variables before.
        """
        device = get_device_number()
        before = self._variables.read()
        device_share = self._describe_share(device, examples, share)._replace(weights=weights)
        leaf = partial(self._compute_leaf, device_share, before, forward_backward)
        result = self._sum.add_up_device(device, leaf)
        return result, before

    def _compute_leaf(
        self,
        device_share: DeviceShare,
        before: list[tf.Tensor],
        forward_backward: ForwardBackward,
        index: tf.Tensor,
    ) -> LeafResult:
        """Computes the logical replica with a given index on one device."""
        with self._enter_leaf(index):
            self._states.assign(index)
            self._variables.begin_leaf(before)
            share = self._take_share(device_share, index)
            weights = device_share.weights
            if weights is not None:
                own_weight = weights.by_leaf[index - device_share.first_leaf]
                share = share._replace(weight=ShareWeight(own_weight, weights.total))
            contribution, variables = forward_backward(share)
            sparse_rows = list_sparse_rows(contribution.gradients, variables)
            gradients = merge_rows(contribution.gradients, compiled=False)
            gradients = settle_gradients(gradients, variables)
            sums = (contribution.loss, gradients, contribution.weight)
            pieces = (contribution.output, contribution.batch)
            if share.present is not None:
                pieces = keep_rows_if(share.present, pieces)
            self._traced = TracedLeaf(variables, sums, pieces)
            weight = weigh_leaf(share, device_share.examples, self._components.shape.leaves)
            changes = self._variables.find_changes(before, share, weight)
            return LeafResult(
                summed=[*tf.nest.flatten(sums), *changes],
                compared=self._variables.read_compared(),
                pieces=tf.nest.flatten(pieces),
                sparse_rows=sparse_rows,
            )

    def _take_share(self, device_share: DeviceShare, index: tf.Tensor) -> Share:
        """Returns the share of a logical replica: rows, or an element of the dataset."""
        shape = self._components.shape
        batch = device_share.batch
        if shape.by_rows:
            examples = device_share.examples
            return take_share(batch, examples, index, shape.leaves, device_share.first_row)
        packed = batch[index - device_share.first_leaf]
        return Share(unpack_element(packed, shape.element_spec), leaf=index)

    def _compare_devices(self, result: DeviceResult) -> list[tf.Tensor]:
        """Returns, for each compared variable, whether all logical replicas have the same value."""
        strategy = self._components.strategy
        local_results = strategy.experimental_local_results
        if not result.compared:
            return []
        if has_peers(strategy):
            flags = self._run(compare_between_processes, result.compared, result.are_equal)
            return [local_results(flag)[0] for flag in flags]
        with tf.device(strategy.extended.worker_devices[0]):
            return [
                tf.reduce_all([are_all_equal(local_results(values)), *local_results(are_equal)])
                for values, are_equal in zip(result.compared, result.are_equal, strict=True)
            ]


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


def fix_shape(gradient: Gradient, variable: Variable) -> Gradient:
    """Returns a gradient, sparse or not, with the static shape of its variable."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.ensure_shape(gradient.values, [None, *variable.shape[1:]])
        return fix_sparse_shape(tf.IndexedSlices(values, gradient.indices), variable)
    if gradient.shape.is_fully_defined():
        return gradient
    return tf.ensure_shape(gradient, variable.shape)
