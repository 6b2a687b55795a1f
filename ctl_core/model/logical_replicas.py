"""Computes a step of logical replicas, which has the same bits on any number of devices.

A global batch has V shares, one for each logical replica. Each device computes a contiguous range
of logical replicas, one after another, and adds up their contributions along the tree of
numerics/summation_tree.py. For each bucket of gradients, all devices then send the roots of their
subtrees to one device, which finishes the tree and sends the sum back. In a cluster, all devices
send their roots to all devices of all processes, and each device finishes the tree by itself.

A logical replica is a graph function that TensorFlow does not inline. TensorFlow therefore
simplifies it separately, in the same way on each device, whatever ops are around it. A model that
is inlined next to other ops could be simplified in another way, and round differently. Additions
are functions, too, for the same reason: TensorFlow folds additions that it can see into AddN, which
adds in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import distribute, has_peers
from ctl_core.cluster.replica_contexts import enter_logical_replica
from ctl_core.input.batches import (
    Share,
    find_rows,
    find_start,
    keep_rows_if,
    take_batch_rows,
    take_rows,
    unpack_element,
)
from ctl_core.model.components import Components, StepContext
from ctl_core.model.forward import ForwardBackward, fix_sparse_shape, keep_if
from ctl_core.model.logical_exchange import gather, gather_pieces, gather_sparse, get_device_number
from ctl_core.numerics.packing import BUCKET_BYTES, Packing
from ctl_core.numerics.randomness import derive_generator_states
from ctl_core.numerics.reduction import Contribution, encode_for_sum, join, merge_rows
from ctl_core.numerics.summation_tree import Subtree, add_up, list_roots, split_leaves
from ctl_core.numerics.variables import name_variable, unwrap
from ctl_core.types import (
    AnyTensor,
    Batch,
    Count,
    Gradient,
    GradientsByObjective,
    PerReplica,
    Structure,
    Variable,
    VariablesByObjective,
)

# The purposes of random numbers, see ``derive_generator_states``.
TRAINING = 0
EVALUATION = 1
# Numbers that ``GeneratorStates.assign`` takes in place of the index of a logical replica.
UPDATE = -1
BETWEEN_STEPS = -2

Run = Callable[..., PerReplica]
# The sums of a subtree are packed into buckets. A bucket is a vector of dense sums, or the sum of a
# sparse gradient, in which each index occurs once.
Bucket: TypeAlias = Gradient
Buckets: TypeAlias = list[Bucket]

_NOT_INLINED = {"_noinline": True}


def _add(left: Bucket, right: Bucket) -> Bucket:
    """Adds two buckets.

    The sum of two sparse gradients has the indices of both, in an order that depends only on these
    two gradients. Its values equal those of the sum of the dense gradients.
    """
    if isinstance(left, tf.IndexedSlices):
        return merge_rows(join(left, right), compiled=False)
    return left + right


hidden_add = tf.function(_add, autograph=False, experimental_attributes=_NOT_INLINED)
hidden_identity = tf.function(tf.identity, autograph=False, experimental_attributes=_NOT_INLINED)


def add_buckets(left: Buckets, right: Buckets) -> Buckets:
    """Adds the buckets of two subtrees, in functions that TensorFlow does not inline."""
    return [hidden_add(*pair) for pair in zip(left, right, strict=True)]


class LeafResult(NamedTuple):
    """The results of one logical replica.

    Attributes:
        summed: the tensors that are added up over all logical replicas; in a sparse gradient, each
            index occurs once
        compared: the values that have to be equal on all logical replicas
        pieces: the tensors, dense or not, of this logical replica that host hooks are passed
    """

    summed: list[Gradient]
    compared: list[tf.Tensor]
    pieces: list[AnyTensor]


class DeviceResult(NamedTuple):
    """The results of the logical replicas of one device.

    Attributes:
        roots: for each root, the buckets of its sum; padded with empty buckets if other devices
            have more roots
        compared: the values, on the first logical replica of the device, that have to be equal on
            all logical replicas
        are_equal: for each of these values, whether it is the same on all logical replicas of the
            device, a bool scalar
        pieces: the pieces of each logical replica of the device; padded with pieces without rows if
            other devices have more logical replicas
    """

    roots: list[Buckets]
    compared: list[tf.Tensor]
    are_equal: list[tf.Tensor]
    pieces: list[list[AnyTensor]]


class LeafSum:
    """Computes the logical replicas, which are the leaves of the tree, and adds them up.

    Attributes:
        packing: packs the dense tensors into buckets; set when the first device is traced
        sparse_rows: for each sparse gradient, its maximum number of rows in one logical replica,
            and the number of rows of its variable
    """

    def __init__(self, leaves: int, devices: int) -> None:
        self.packing: Packing | None = None
        self.sparse_rows: list[tuple[int, int]] = []
        self._are_sparse: list[bool] = []
        self._leaves = leaves
        self._ranges = split_leaves(leaves, devices)
        self._most_roots = max(len(list_roots(leaves, leaves_)) for leaves_ in self._ranges)

    @property
    def ranges(self) -> list[range]:
        """The indices of the logical replicas of each device of all processes."""
        return self._ranges

    def get_leaves(self, device: int) -> range:
        """Returns the indices of the logical replicas of a device."""
        return self._ranges[device]

    def compute(self, device: int, compute: Callable[[tf.Tensor], LeafResult]) -> DeviceResult:
        """Computes the logical replicas of one device.

        Args:
            device: the number of the device
            compute: computes the logical replica of an index, an int32 scalar
        """

        @tf.function(
            autograph=False,
            input_signature=[tf.TensorSpec([], tf.int32)],
            experimental_attributes=_NOT_INLINED,
        )
        def compute_leaf(index: tf.Tensor) -> LeafResult:
            result = compute(index)
            return result._replace(summed=self._pack(result.summed))

        walk = DeviceWalk(compute_leaf.get_concrete_function())
        roots = [
            add_up(root, walk.compute_leaf, walk.add)
            for root in list_roots(self._leaves, self._ranges[device])
        ]
        # All replicas of a strategy have to return the same structure.
        while len(roots) < self._most_roots:
            roots.append([make_empty(bucket) for bucket in roots[0]])
        pieces = [[make_vector(piece) for piece in leaf_pieces] for leaf_pieces in walk.pieces]
        while len(pieces) < max(map(len, self._ranges)):
            pieces.append([take_rows(piece, 0, 0) for piece in pieces[0]])
        return DeviceResult(
            roots,
            walk.compared[0],
            [are_all_equal(values) for values in zip(*walk.compared, strict=True)],
            pieces,
        )

    def _pack(self, summed: list[Gradient]) -> Buckets:
        """Packs the dense tensors of a logical replica; each sparse tensor becomes a bucket."""
        dense = [tensor for tensor in summed if not isinstance(tensor, tf.IndexedSlices)]
        sparse = [tensor for tensor in summed if isinstance(tensor, tf.IndexedSlices)]
        if self.packing is None:
            specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in dense]
            self.packing = Packing(specs, BUCKET_BYTES)
            self._are_sparse = [isinstance(tensor, tf.IndexedSlices) for tensor in summed]
        return [*self.packing.pack(dense), *sparse]

    def finish(
        self, strategy: tf.distribute.Strategy, run: Run, roots: list[list[PerReplica]]
    ) -> list[PerReplica]:
        """Adds up the roots of all devices, and returns the sums on each device.

        In a single process, each bucket is finished on one device, and the devices take turns. In a
        cluster, each device finishes all buckets. A device receives the roots of its next bucket
        only when its previous bucket is finished, so it holds the roots of one bucket at a time.

        Args:
            strategy: the strategy whose devices compute
            run: calls a function on each device, with that device's values
            roots: the roots of all devices, see ``DeviceResult``
        """
        if has_peers(strategy):
            return run(self._finish_on_each_device, roots)  # type: ignore[no-any-return]
        devices = strategy.extended.worker_devices
        totals: list[tf.Tensor] = []
        for bucket in range(len(roots[0])):
            earlier = []
            if bucket >= len(devices):  # the last bucket that the same device has finished
                earlier.append(totals[bucket - len(devices)])
            bucket_roots = [root[bucket] for root in roots]
            known = self._release_roots(strategy, bucket_roots, earlier)
            with tf.device(devices[bucket % len(devices)]):
                totals.append(add_up(Subtree(0, self._leaves), known.get, hidden_add))
        packed = [distribute(strategy, [total] * len(devices)) for total in totals]
        return run(self._unpack_on_device, packed)  # type: ignore[no-any-return]

    def _release_roots(
        self, strategy: tf.distribute.Strategy, roots: list[PerReplica], after: list[tf.Tensor]
    ) -> dict[Subtree, tf.Tensor]:
        """Returns the sums of a bucket by subtree; a device sends its sums once they are computed.

        Args:
            strategy: the strategy whose devices have the sums
            roots: the sums, see ``DeviceResult``
            after: tensors that have to be computed before the sums are sent
        """
        released = {}
        for device, device_leaves in enumerate(self._ranges):
            subtrees = list_roots(self._leaves, device_leaves)
            for subtree, root in zip(subtrees, roots, strict=False):
                value = strategy.experimental_local_results(root)[device]
                if after:
                    with (
                        tf.device(strategy.extended.worker_devices[device]),
                        tf.control_dependencies(after),
                    ):
                        value = hidden_identity(value)
                released[subtree] = value
        return released

    def _finish_on_each_device(self, roots: list[Buckets]) -> list[Gradient]:
        """Adds up the roots of all processes on one device, and returns the sums.

        Args:
            roots: the roots of this device, see ``DeviceResult``
        """
        assert self.packing is not None
        totals: Buckets = []
        for number, bucket in enumerate(self.packing.buckets):
            with tf.control_dependencies(totals[-1:]):
                joined = tf.concat([root[number] for root in roots], 0)
            missing = self._most_roots * bucket.size - joined.shape[0]
            padded = tf.pad(joined, [[0, missing]])
            gathered = tf.reshape(gather(padded), [-1, self._most_roots, bucket.size])
            totals.append(self._add_up_roots(gathered))
        sparse_buckets = range(len(self.packing.buckets), len(roots[0]))
        for number, (leaf_rows, table_rows) in zip(sparse_buckets, self.sparse_rows, strict=True):
            most = min(table_rows, leaf_rows * max(map(len, self._ranges)))
            gathered = gather_sparse([root[number] for root in roots], most)
            totals.append(self._add_up_roots(gathered))
        return self._unpack_on_device(totals)

    def _add_up_roots(self, gathered: Sequence[Sequence[Bucket]] | tf.Tensor) -> Bucket:
        """Returns the sum of a bucket.

        Args:
            gathered: for each device, its roots of the bucket in their order
        """
        known = {
            subtree: gathered[device][index]
            for device, device_leaves in enumerate(self._ranges)
            for index, subtree in enumerate(list_roots(self._leaves, device_leaves))
        }
        return add_up(Subtree(0, self._leaves), known.get, hidden_add)

    def _unpack_on_device(self, packed: Buckets) -> list[Gradient]:
        """Unpacks the sums on one device.

        Each device, including the device that computed the sum, first passes the sum through an
        identity function that is placed on this device and is not inlined. Otherwise,
        ``tf.clip_by_global_norm``, which places its products next to the gradients, would place the
        products of all devices on the device that computed the sum. Grappler reorders the products
        of gradient, clipping factor and learning rate if all of them are on one device (the stage
        MinimizeBroadcasts of its arithmetic optimizer), but not if they are on two. The devices
        would round differently, and diverge.

        All other values that one device computes for others are exact: the states of random
        generators, numbers of steps, and flags.
        """
        assert self.packing is not None
        received = [hidden_identity(bucket) for bucket in packed]
        dense_buckets = len(self.packing.buckets)
        dense = iter(self.packing.unpack(received[:dense_buckets]))
        sparse = iter(received[dense_buckets:])
        return [next(sparse if is_sparse else dense) for is_sparse in self._are_sparse]


class DeviceWalk:
    """Computes the logical replicas of a device in order, and adds them up as soon as possible.

    Each call waits for the one before it, so the device holds the activations of one logical
    replica at a time, and one sum for each level of the tree.

    Attributes:
        compared: for each logical replica so far, its values that have to be equal on all of them
        pieces: for each logical replica so far, its pieces
    """

    def __init__(self, function: tf.types.experimental.ConcreteFunction) -> None:
        """Takes a function that returns the fields of a ``LeafResult``, the first one packed."""
        self.compared: list[list[tf.Tensor]] = []
        self.pieces: list[list[AnyTensor]] = []
        self._function = function
        self._last: list[tf.Tensor] = []

    def compute_leaf(self, subtree: Subtree) -> Buckets | None:
        """Computes a logical replica and returns its buckets; returns None for a larger subtree."""
        if subtree.size > 1:
            return None
        # If the index were a constant, TensorFlow could simplify each call differently.
        index = tf.compat.v1.placeholder_with_default(subtree.start, [])
        with tf.control_dependencies(self._last):
            result: LeafResult = self._function(index)
        self.compared.append(result.compared)
        self.pieces.append(result.pieces)
        self._last = result.summed
        return result.summed

    def add(self, left: Buckets, right: Buckets) -> Buckets:
        """Adds the sums of two subtrees."""
        self._last = add_buckets(left, right)
        return self._last


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
        """Sets all generators for a logical replica, for ``UPDATE`` or for ``BETWEEN_STEPS``."""
        if not self._variables:
            return
        # Negative numbers count from the end, as in a Python list.
        states = tf.gather(self._states, index % self._states.shape[0])
        for number, variable in enumerate(self._variables):
            state = states[number, : len(self._initial_states[number])]
            variable.assign(tf.cast(state, variable.dtype))


class LogicalReplicas:
    """Computes the forward and backward passes of all logical replicas, and their sum.

    Attributes:
        states: the states of the random generators in the update
        are_equal: for each variable that has to have the same value on all logical replicas after
            they have run, whether it has, a bool scalar; set by ``compute``
    """

    def __init__(self, context: StepContext, run: Run) -> None:
        """Prepares an update.

        Args:
            context: the context of the step
            run: calls a function on each device, with that device's values
        """
        self._context = context
        self._components: Components = context.components
        self._run = run
        shape = self._components.shape
        assert context.step is not None
        self.states = GeneratorStates(self._components, TRAINING, context.step, context.turn or 0)
        self.are_equal: list[tf.Tensor] = []
        self._sum = LeafSum(shape.shares, shape.replicas)
        self._variables: VariablesByObjective = {}
        self._metric_variables: list[tf.Variable] = [
            unwrap(variable)
            for metric in self._components.list_logged_metrics().values()
            for variable in metric.variables
        ]
        self._structure: Structure = None
        self._piece_structure: Structure = None

    def compute(
        self, share: Share, examples: Count, forward_backward: ForwardBackward
    ) -> tuple[Contribution, Contribution, VariablesByObjective]:
        """Computes all logical replicas.

        Args:
            share: for each device, the rows of its logical replicas
            examples: the number of examples in the global batch
            forward_backward: computes the contribution of a logical replica

        Returns:
            Three values: the sums, with the outputs and batches of each device; the sums without
            the outputs and batches; and the variables of the gradients by objective.
        """
        strategy = self._components.strategy

        def run_on_device(share: Share) -> tuple[DeviceResult, list[tf.Tensor]]:
            return self._run_device(share.batch, examples, forward_backward)

        result, before = self._run(run_on_device, share)
        totals = self._sum.finish(strategy, self._run, result.roots)
        differences = totals[len(totals) - len(before) :]
        summed = tf.nest.pack_sequence_as(self._structure, totals[: len(totals) - len(before)])
        self.are_equal = self._compare_devices(result)
        self._run(self._add_differences, before, differences)
        loss, gradients, weight = summed
        pieces = result.pieces
        if has_peers(strategy) and pieces[0]:
            pieces = self._run(partial(gather_pieces, self._sum.ranges), pieces)
        gradients = self._run(partial(settle_gradients, variables=self._variables), gradients)
        output: list[Structure] = []
        batch: list[Structure] = []
        for leaf_pieces in pieces:
            leaf_output, leaf_batch = tf.nest.pack_sequence_as(self._piece_structure, leaf_pieces)
            output += leaf_output
            batch += leaf_batch
        contribution = Contribution(loss, gradients, weight, output, batch)
        return contribution, Contribution(loss, gradients, weight, [], []), self._variables

    def _run_device(
        self, batch: Batch, examples: Count, forward_backward: ForwardBackward
    ) -> tuple[DeviceResult, list[tf.Tensor]]:
        """Computes the logical replicas of one device.

        Returns:
            The results; and the previous value of each variable of ``_list_added``.
        """
        device = get_device_number()
        written = self._components.written
        before = [entry.variable.read_value() for entry in written]
        metrics_before = [variable.read_value() for variable in self._metric_variables]
        shape = self._components.shape
        leaves = shape.shares
        device_leaves = self._sum.get_leaves(device)
        first_leaf = device_leaves.start
        first_row, _ = find_rows(device_leaves, examples, leaves)

        def compute(index: tf.Tensor) -> LeafResult:
            with (
                enter_logical_replica(index, leaves),
                compat.mute_other_summaries(self._context.step, index),
                tf.name_scope(""),  # the name of a summary begins with the name scope
            ):
                self.states.assign(index)
                for entry, value in zip(written, before, strict=True):
                    entry.variable.assign(value)
                for variable in self._metric_variables:
                    variable.assign(tf.zeros_like(variable))
                if shape.by_rows:
                    share = take_leaf(batch, examples, index, leaves, first_row)
                else:
                    share = Share(unpack_element(batch[index - first_leaf], shape.element_spec))
                contribution, variables = forward_backward(share)
                self._sum.sparse_rows = list_sparse_rows(contribution.gradients, variables)
                gradients = merge_rows(contribution.gradients, compiled=False)
                gradients = settle_gradients(gradients, variables)
                contribution = contribution._replace(gradients=gradients)
                self._variables = variables
                return self._collect(contribution, share, before, examples)

        result = self._sum.compute(device, compute)
        pairs = zip(written, before, strict=True)
        added_before = [value for entry, value in pairs if not entry.is_shared]
        return result, added_before + metrics_before

    def _collect(
        self, contribution: Contribution, share: Share, before: list[tf.Tensor], examples: Count
    ) -> LeafResult:
        """Returns the results of a logical replica after its forward and backward pass."""
        self._structure = (contribution.loss, contribution.gradients, contribution.weight)
        pieces = (contribution.output, contribution.batch)
        if share.present is not None:
            pieces = keep_rows_if(share.present, pieces)
        self._piece_structure = pieces
        rows = share.rows
        if rows is None:
            rows = examples // self._components.shape.shares
        share_of_rows = tf.cast(rows, tf.float32) / tf.cast(examples, tf.float32)
        differences = []
        compared = []
        for written, value in zip(self._components.written, before, strict=True):
            after = written.variable.read_value()
            if written.is_shared:
                compared.append(after)
                continue
            difference = after - value
            if written.max_stretch is not None:  # a moving statistic, which becomes the mean
                difference *= tf.cast(share_of_rows, difference.dtype)
            differences.append(keep_if(share.present, difference))
        differences += [variable.read_value() for variable in self._metric_variables]
        return LeafResult(
            [*tf.nest.flatten(self._structure), *differences],
            compared,
            tf.nest.flatten(self._piece_structure),
        )

    def _list_added(self) -> list[tf.Variable]:
        """Returns the variables whose changes by all logical replicas are added up."""
        written = self._components.written
        return [
            *(entry.variable for entry in written if not entry.is_shared),
            *self._metric_variables,
        ]

    def _add_differences(self, before: list[tf.Tensor], differences: list[tf.Tensor]) -> None:
        """Adds the changes that all logical replicas made to variables, on one device."""
        for variable, value, difference in zip(
            self._list_added(), before, differences, strict=True
        ):
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


def compare_between_processes(
    compared: list[tf.Tensor], are_equal: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns on one device, for each value, whether all logical replicas have the same value.

    Args:
        compared: the values of this device, see ``DeviceResult``
        are_equal: whether each is the same on all logical replicas of this device
    """
    vectors = [tf.reshape(tf.cast(read_bits(value), tf.int64), [-1]) for value in compared]
    gathered = gather(tf.concat([tf.cast(tf.stack(are_equal), tf.int64), *vectors], 0))
    sizes = [len(are_equal), *(vector.shape[0] for vector in vectors)]
    flags, *bits = tf.split(gathered, sizes, axis=1)
    return [
        tf.reduce_all(bits_of_value == bits_of_value[:1]) & tf.reduce_all(flags[:, number] == 1)
        for number, bits_of_value in enumerate(bits)
    ]


def take_leaf(
    batch: Batch, examples: Count, index: tf.Tensor, leaves: int, first_row: Count
) -> Share:
    """Takes the rows of a logical replica from the rows of its device.

    If the number of examples varies, there may be fewer of them than logical replicas. A logical
    replica without rows gets the last row of the global batch as a placeholder. It then writes the
    same values to variables as the last logical replica with rows, so comparing them does not fail.

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


def make_vector(piece: AnyTensor) -> AnyTensor:
    """Returns a scalar as a vector of one element, and any other tensor as it is."""
    if piece.shape.rank == 0:
        return tf.reshape(piece, [1])
    return piece


def make_empty(bucket: Bucket) -> Bucket:
    """Returns a bucket without elements, or without rows if it is sparse."""
    if isinstance(bucket, tf.IndexedSlices):
        return tf.IndexedSlices(bucket.values[:0], bucket.indices[:0], bucket.dense_shape)
    return tf.zeros([0], bucket.dtype)


def list_sparse_rows(
    gradients: GradientsByObjective, variables: VariablesByObjective
) -> list[tuple[int, int]]:
    """Returns, for each sparse gradient, its maximum number of rows and that of its variable.

    Args:
        gradients: the gradients of a logical replica, in which an index may occur more than once
        variables: their variables
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

    Whether a gradient is sparse depends only on how the model uses the variable.
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


def are_all_equal(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a bool scalar: whether tensors have the same bits. All NaN count as equal."""
    first, *others = map(read_bits, values)
    return tf.reduce_all([tf.constant(True), *(tf.reduce_all(first == bits) for bits in others)])


def read_bits(value: tf.Tensor) -> tf.Tensor:
    """Returns the bits of a tensor as integers to be compared; all NaN give the same integer."""
    encoded = encode_for_sum(value)
    if not encoded.dtype.is_floating:
        return encoded
    nan = tf.constant(float("nan"), encoded.dtype)
    encoded = tf.where(tf.math.is_nan(encoded), nan, encoded)
    return tf.bitcast(encoded, tf.int64 if encoded.dtype == tf.float64 else tf.int32)


def list_compared(components: Components) -> list[str]:
    """Returns the names of the variables that have to be equal on all logical replicas."""
    if components.shape.logical_replicas is None:
        return []
    return [name_variable(written.variable) for written in components.written if written.is_shared]
