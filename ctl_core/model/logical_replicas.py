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

import numpy as np
import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import has_peers
from ctl_core.cluster.replica_contexts import enter_logical_replica
from ctl_core.input.batches import (
    Share,
    ShareWeight,
    find_rows,
    find_start,
    keep_rows_if,
    take_batch_rows,
    unpack_element,
)
from ctl_core.model.components import Components, Division, StepContext, choose_division
from ctl_core.model.forward import ForwardBackward, fix_sparse_shape, keep_if, weigh_share
from ctl_core.model.leaf_sum import DeviceResult, LeafResult, LeafSum, Run, are_all_equal, read_bits
from ctl_core.model.logical_exchange import gather, gather_pieces, get_device_number
from ctl_core.numerics.packing import find_length
from ctl_core.numerics.randomness import derive_generator_states
from ctl_core.numerics.reduction import Contribution, merge_rows
from ctl_core.numerics.variables import name_variable, unwrap
from ctl_core.types import (
    Batch,
    Count,
    Gradient,
    GradientsByObjective,
    Structure,
    Variable,
    VariablesByObjective,
)

# Values of the argument ``purpose`` of ``derive_generator_states``.
TRAINING = 0
EVALUATION = 1
# Special values of the argument ``index`` of ``GeneratorStates.assign``, which is otherwise the
# index of a logical replica.
UPDATE = -1
BETWEEN_STEPS = -2


class GeneratorStates:
    """The states of the random generators in a step, or in the evaluation of a batch."""

    def __init__(self, components: Components, purpose: int, step: Count, turn: Count) -> None:
        """Derives the states; see ``derive_generator_states`` for the arguments."""
        self._variables = components.generators.variables
        self._initial_states = components.generators.initial_states
        if self._variables:
            with tf.device("CPU:0"):
                self._states = derive_generator_states(
                    self._initial_states, purpose, step, turn, components.shape.shares
                )

    def assign(self, index: Count) -> None:
        """Sets the states of all generators.

        Args:
            index: the index of a logical replica, ``UPDATE`` or ``BETWEEN_STEPS``
        """
        if not self._variables:
            return
        # A negative index counts from the end, as in a Python list.
        states = tf.gather(self._states, index % find_length(self._states))
        for number, variable in enumerate(self._variables):
            state = states[number, : len(self._initial_states[number])]
            variable.assign(tf.cast(state, variable.dtype))

    def are_between_steps(self) -> bool:
        """Returns True if the generators have the states that they have after a step."""
        for number, variable in enumerate(self._variables):
            state = self._states[BETWEEN_STEPS, number, : len(self._initial_states[number])]
            if not np.array_equal(tf.cast(state, variable.dtype), variable.numpy()):
                return False
        return True


def has_states_after(components: Components, step: int) -> bool:
    """Returns True if all generators have the states that follow from their initial states.

    Args:
        components: the components of a run
        step: the last step that was taken
    """
    generators = components.generators
    if step == 0:
        states = [variable.numpy() for variable in generators.variables]
        return all(map(np.array_equal, states, generators.initial_states))
    last_turn = max(len(components.hooks.turns) - 1, 0)
    return GeneratorStates(components, TRAINING, step, last_turn).are_between_steps()


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


class ValuesBefore(NamedTuple):
    """The values of variables on a device before its logical replicas run.

    Attributes:
        written: the values of the variables that the forward or backward pass writes
        metrics: the values of the variables of the training metrics
    """

    written: list[tf.Tensor]
    metrics: list[tf.Tensor]


class LogicalReplicas:
    """Computes the forward and backward passes of all logical replicas, and their sum.

    Attributes:
        states: the states of the random generators in the update
        are_equal: one bool scalar for each variable that must have the same value on all logical
            replicas after they have run. It is True if the values are equal. ``compute`` sets this
            list.
    """

    def __init__(self, context: StepContext, run: Run) -> None:
        """Prepares an update.

        Args:
            context: the context of the step
            run: a function that calls another function on each device, with that device's values
        """
        self._context = context
        self._components: Components = context.components
        self._run = run
        shape = self._components.shape
        assert context.step is not None
        self.states = GeneratorStates(self._components, TRAINING, context.step, context.turn or 0)
        self.are_equal: list[tf.Tensor] = []
        self._sum = LeafSum(shape.shares, shape.replicas)
        self._traced: TracedLeaf | None = None
        self._metric_variables: list[tf.Variable] = [
            unwrap(variable)
            for metric in self._components.list_logged_metrics().values()
            for variable in metric.variables
        ]

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
        result, values_before = self._run(run_device, share, weights)
        totals = self._sum.finish(strategy, self._run, result.roots)
        traced = self._traced
        assert traced is not None
        # The last totals are differences. There may be none, and totals[-0:] would be all totals.
        first_difference = len(totals) - len(values_before)
        differences = totals[first_difference:]
        sums = tf.nest.pack_sequence_as(traced.sums, totals[:first_difference])
        self.are_equal = self._compare_devices(result)
        self._run(self._add_differences, values_before, differences)
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
        return Contribution(loss, gradients, weight, output, batch), traced.variables

    def _weigh_leaves(self, share: Share, examples: Count) -> DeviceWeights:
        """Computes the weights of all logical replicas, and their sum along the tree.

        Args:
            share: for each device, the rows of its logical replicas
            examples: the number of examples in the global batch
        """
        leaf_sum = LeafSum(self._components.shape.shares, self._components.shape.replicas)
        result = self._run(partial(self._weigh_on_device, leaf_sum, examples), share)
        (total,) = leaf_sum.finish(self._components.strategy, self._run, result.roots)
        return DeviceWeights(self._run(_join_weights, result.pieces), total)

    def _weigh_on_device(self, leaf_sum: LeafSum, examples: Count, share: Share) -> DeviceResult:
        """Computes the weights of the logical replicas of one device."""
        device = get_device_number()
        device_share = self._describe_share(device, examples, share)

        def weigh_leaf(index: tf.Tensor) -> LeafResult:
            with self._enter_leaf(index):
                self.states.assign(index)
                weight = weigh_share(self._context, self._take_share(device_share, index))
                return LeafResult(summed=[weight], compared=[], pieces=[weight])

        return leaf_sum.add_up_device(device, weigh_leaf)

    def _describe_share(self, device: int, examples: Count, share: Share) -> DeviceShare:
        """Returns the share of a device, from which its logical replicas take their shares."""
        device_leaves = self._sum.ranges[device]
        first_row, _ = find_rows(device_leaves, examples, self._components.shape.shares)
        return DeviceShare(share.batch, device_leaves.start, first_row, examples)

    @contextlib.contextmanager
    def _enter_leaf(self, index: tf.Tensor) -> Iterator[None]:
        """Enters the contexts in which the hooks of a logical replica are traced."""
        step = self._context.step
        assert isinstance(step, tf.Tensor)
        with (
            enter_logical_replica(index, self._components.shape.shares),
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
            The results, and the value that each variable of ``_list_added`` had before.
        """
        device = get_device_number()
        before = ValuesBefore(
            written=[entry.variable.read_value() for entry in self._components.written],
            metrics=[variable.read_value() for variable in self._metric_variables],
        )
        device_share = self._describe_share(device, examples, share)._replace(weights=weights)
        leaf = partial(self._compute_leaf, device_share, before, forward_backward)
        result = self._sum.add_up_device(device, leaf)
        return result, self._select_added(before)

    def _compute_leaf(
        self,
        device_share: DeviceShare,
        before: ValuesBefore,
        forward_backward: ForwardBackward,
        index: tf.Tensor,
    ) -> LeafResult:
        """Computes the logical replica with a given index on one device."""
        with self._enter_leaf(index):
            self._reset_variables(before, index)
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
            differences, compared = self._read_changes(share, device_share.examples, before)
            return LeafResult(
                summed=[*tf.nest.flatten(sums), *differences],
                compared=compared,
                pieces=tf.nest.flatten(pieces),
                sparse_rows=sparse_rows,
            )

    def _reset_variables(self, before: ValuesBefore, index: tf.Tensor) -> None:
        """Gives variables the values with which each logical replica starts.

        Args:
            before: the values of the variables before all logical replicas
            index: the index of the logical replica, which determines its random numbers
        """
        self.states.assign(index)
        for entry, value in zip(self._components.written, before.written, strict=True):
            entry.variable.assign(value)
        for variable in self._metric_variables:
            variable.assign(tf.zeros_like(variable))

    def _take_share(self, device_share: DeviceShare, index: tf.Tensor) -> Share:
        """Returns the share of a logical replica: rows, or an element of the dataset."""
        shape = self._components.shape
        batch = device_share.batch
        if shape.by_rows:
            examples = device_share.examples
            return take_leaf(batch, examples, index, shape.shares, device_share.first_row)
        packed = batch[index - device_share.first_leaf]
        return Share(unpack_element(packed, shape.element_spec))

    def _read_changes(
        self, share: Share, examples: Count, before: ValuesBefore
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Reads what a logical replica has written to variables.

        Returns:
            The differences to add to the variables of ``_list_added``, and the values of the other
            variables, which have to be equal on all logical replicas.
        """
        rows: Count | None = share.rows
        if rows is None:
            rows = examples // self._components.shape.shares
        share_of_rows = tf.cast(rows, tf.float32) / tf.cast(examples, tf.float32)
        differences = []
        compared = []
        for written, value in zip(self._components.written, before.written, strict=True):
            after = written.variable.read_value()
            if written.is_shared:
                compared.append(after)
                continue
            difference = after - value
            if written.is_moving_statistic:  # it is averaged over the rows
                difference *= tf.cast(share_of_rows, difference.dtype)
            differences.append(keep_if(share.present, difference))
        # The metrics started at 0, so their values are differences.
        differences += [variable.read_value() for variable in self._metric_variables]
        return differences, compared

    def _list_added(self) -> list[tf.Variable]:
        """Returns the variables whose changes are added up over all logical replicas."""
        written = self._components.written
        return [
            *(entry.variable for entry in written if not entry.is_shared),
            *self._metric_variables,
        ]

    def _select_added(self, before: ValuesBefore) -> list[tf.Tensor]:
        """Returns the value that each variable of ``_list_added`` had before."""
        pairs = zip(self._components.written, before.written, strict=True)
        return [*(value for entry, value in pairs if not entry.is_shared), *before.metrics]

    def _add_differences(
        self, values_before: list[tf.Tensor], differences: list[tf.Tensor]
    ) -> None:
        """Adds the summed changes of all logical replicas to the variables of one device.

        Args:
            values_before: the result of ``_select_added``
            differences: the sum of the differences of all logical replicas for each variable
        """
        variables = self._list_added()
        for variable, value, difference in zip(variables, values_before, differences, strict=True):
            variable.assign(value + difference)

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


def take_leaf(
    batch: Batch, examples: Count, index: tf.Tensor, leaves: int, first_row: Count
) -> Share:
    """Takes the rows of a logical replica from the rows of its device.

    If the number of examples varies, there may be fewer examples than logical replicas. A logical
    replica without rows gets the last row of the global batch as a placeholder. It then writes the
    same values to variables as the last logical replica with rows, so that the values are equal on
    all logical replicas.

    Args:
        batch: the rows of the device
        examples: the number of examples in the global batch
        index: the index of the logical replica
        leaves: the number of logical replicas
        first_row: the index of the first row of the device in the global batch
    """
    if isinstance(examples, int) and examples % leaves == 0:
        size = examples // leaves
        return Share(take_batch_rows(batch, index * size - first_row, size))
    first = find_start(index, examples, leaves)
    rows = find_start(index + 1, examples, leaves) - first
    together = tf.convert_to_tensor(examples)
    if isinstance(examples, int):
        return Share(take_batch_rows(batch, first - first_row, rows), rows, None, together)
    first = tf.minimum(first, examples - 1)
    taken = take_batch_rows(batch, first - first_row, tf.maximum(rows, 1))
    return Share(taken, rows, rows > 0, together)


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


def list_compared(components: Components) -> list[str]:
    """Returns the names of the variables that have to be equal on all logical replicas."""
    if components.shape.logical_replicas is None:
        return []
    return [name_variable(written.variable) for written in components.written if written.is_shared]
