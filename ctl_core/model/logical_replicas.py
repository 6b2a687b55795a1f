"""A step of logical replicas: the same bits on any number of devices.

A global batch has V shares, one for each logical replica. A device computes a contiguous range of
them, one after another, in one loop of the graph, and adds up what they contribute along the tree
of numerics/summation_tree.py. The roots of all devices go to the first device, which finishes the
tree and sends back the sums.

Every logical replica is computed inside the loop, even if a device has only one. The specification
of what a loop carries comes from a trace that is thrown away: an iteration outside of the loop
could be simplified in another way, and round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ctl_core.cluster.collectives import distribute
from ctl_core.cluster.replica_contexts import enter_logical_replica
from ctl_core.compat import make_scratch_graph, mute_other_summaries
from ctl_core.input.batches import (
    Share,
    find_fixed_start,
    find_start,
    take_batch_rows,
    unpack_element,
)
from ctl_core.model.components import Components, StepContext, WrittenVariable
from ctl_core.model.forward import forward_backward
from ctl_core.numerics.packing import Packing
from ctl_core.numerics.randomness import derive_generator_states
from ctl_core.numerics.reduction import Contribution, join
from ctl_core.numerics.summation_tree import (
    Subtree,
    add_up,
    count_levels,
    find_entry,
    list_blocks,
    list_roots,
    split_leaves,
)
from ctl_core.numerics.variables import name_variable
from ctl_core.run.errors import SetupError
from ctl_core.types import (
    Batch,
    Count,
    GradientsByObjective,
    PerReplica,
    Structure,
    VariablesByObjective,
)

# The purpose of random numbers, see ``derive_generator_states``; and what is no logical replica.
TRAINING = 0
EVALUATION = 1
UPDATE = -1
BETWEEN_STEPS = -2

Run = Callable[..., PerReplica]


def _add(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return left + right


# TensorFlow folds additions that it can see into AddN, which adds up in another order.
hidden_add = tf.function(_add, autograph=False, experimental_attributes={"_noinline": True})


hidden_identity = tf.function(
    tf.identity, autograph=False, experimental_attributes={"_noinline": True}
)


def add_buckets(left: Sequence[tf.Tensor], right: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Adds the buckets of two subtrees, in functions that TensorFlow does not look into."""
    sums = []
    for left_bucket, right_bucket in zip(left, right, strict=True):
        total = hidden_add(left_bucket, right_bucket)
        sums.append(tf.ensure_shape(total, left_bucket.shape))
    return sums


class LeafResult(NamedTuple):
    """The results of one logical replica.

    Attributes:
        summed: the tensors that are added up over all logical replicas
        digests: a checksum of each value that has to be equal on all of them, int64[n]
        pieces: the tensors that host hooks are passed, in the order of the logical replicas
    """

    summed: list[tf.Tensor]
    digests: tf.Tensor
    pieces: list[tf.Tensor]


class DeviceResult(NamedTuple):
    """The results of the logical replicas of one device.

    Attributes:
        roots: for each root the buckets of its sum; placeholders where other devices have more
        lowest: the lowest checksum of each value that has to be equal, int64[n]
        highest: the highest one
        pieces: for each piece its tensors of all logical replicas of the device, concatenated
    """

    roots: list[list[tf.Tensor]]
    lowest: tf.Tensor
    highest: tf.Tensor
    pieces: list[tf.Tensor]


class LeafLoop:
    """Computes the logical replicas of a device in a loop, and adds them up along the tree.

    Attributes:
        packing: how the summed tensors are packed; known once the first device is traced
    """

    def __init__(self, leaves: int, devices: int) -> None:
        self.packing: Packing | None = None
        self._leaves = leaves
        self._ranges = split_leaves(leaves, devices)
        self._most_roots = max(len(list_roots(leaves, leaves_)) for leaves_ in self._ranges)
        self._piece_specs: list[tf.TensorSpec] = []

    def get_leaves(self, device: int) -> range:
        """Returns the logical replicas of a device."""
        return self._ranges[device]

    def run(self, device: int, compute: Callable[[tf.Tensor], LeafResult]) -> DeviceResult:
        """Traces the loop of one device.

        Args:
            device: the number of the device
            compute: computes the logical replica of an index, an int32 scalar
        """
        packing = self._find_packing(compute)
        levels = count_levels(self._leaves)
        device_leaves = self._ranges[device]
        # If the bounds were constants, the loop could be simplified in another way on each device.
        start = tf.compat.v1.placeholder_with_default(device_leaves.start, [])
        end = tf.compat.v1.placeholder_with_default(device_leaves.stop, [])

        def take_next(
            index: tf.Tensor, lowest: tf.Tensor, highest: tf.Tensor, held: Any, pieces: Any
        ) -> Any:
            result = compute(index)
            held = self._hold(held, index, start, packing.pack(result.summed))
            pieces = [
                array.write(index - start, piece)
                for array, piece in zip(pieces, result.pieces, strict=True)
            ]
            lowest = tf.minimum(lowest, result.digests)
            highest = tf.maximum(highest, result.digests)
            return index + 1, lowest, highest, held, pieces

        held = [
            tf.TensorArray(
                bucket.dtype, 2 * levels, element_shape=[bucket.size], clear_after_read=False
            )
            for bucket in packing.buckets
        ]
        pieces = [
            tf.TensorArray(spec.dtype, len(device_leaves), infer_shape=False)
            for spec in self._piece_specs
        ]
        digests = [self._digest_count]
        _, lowest, highest, held, pieces = tf.while_loop(
            lambda index, *_: index < end,
            take_next,
            (
                start,
                tf.fill(digests, tf.int64.max),
                tf.fill(digests, tf.int64.min),
                held,
                pieces,
            ),
            parallel_iterations=1,
        )
        return DeviceResult(
            self._read_roots(held, device_leaves),
            lowest,
            highest,
            [self._join_pieces(array, spec, len(device_leaves))
             for array, spec in zip(pieces, self._piece_specs, strict=True)],
        )  # fmt: skip

    def _find_packing(self, compute: Callable[[tf.Tensor], LeafResult]) -> Packing:
        """Traces a logical replica, in a graph that is thrown away, to know its tensors."""
        if self.packing is None:
            with make_scratch_graph("logical_replica").as_default():
                result = compute(tf.compat.v1.placeholder_with_default(0, []))
            specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in result.summed]
            self._piece_specs = [tf.TensorSpec(piece.shape, piece.dtype) for piece in result.pieces]
            self._digest_count = int(result.digests.shape[0])
            self.packing = Packing(specs)
        return self.packing

    def _hold(
        self, held: list[tf.TensorArray], leaf: tf.Tensor, start: tf.Tensor, buckets: Any
    ) -> list[tf.TensorArray]:
        """Adds a leaf to the blocks that it completes, and holds the result.

        The carried block is a right child where a bit of ``leaf`` is set. It is added to its left
        sibling if that is of the same device.
        """

        def has_sibling(level: tf.Tensor, *_: Any) -> tf.Tensor:
            shift = tf.bitwise.right_shift
            is_right = tf.equal(shift(leaf, level) & 1, 1)
            parent_start = tf.bitwise.left_shift(shift(leaf, level + 1), level + 1)
            return is_right & (parent_start >= start)

        def add_sibling(level: tf.Tensor, carried: list[tf.Tensor]) -> Any:
            siblings = [
                tf.ensure_shape(array.read(level), bucket.shape)
                for array, bucket in zip(held, carried, strict=True)
            ]
            return level + 1, add_buckets(siblings, carried)

        level, carried = tf.while_loop(
            has_sibling, add_sibling, (tf.constant(0), buckets), parallel_iterations=1
        )
        is_right = tf.bitwise.right_shift(leaf, level) & 1
        entry = level + is_right * count_levels(self._leaves)
        return [array.write(entry, bucket) for array, bucket in zip(held, carried, strict=True)]

    def _read_roots(
        self, held: list[tf.TensorArray], device_leaves: range
    ) -> list[list[tf.Tensor]]:
        """Returns the buckets of each root of a device."""
        assert self.packing is not None
        blocks: dict[Subtree, list[tf.Tensor]] = {}
        for block in list_blocks(device_leaves):
            entry = find_entry(self._leaves, block)
            blocks[block] = [
                tf.ensure_shape(array.read(entry), [bucket.size])
                for array, bucket in zip(held, self.packing.buckets, strict=True)
            ]
        roots = [
            add_up(root, blocks, add_buckets) for root in list_roots(self._leaves, device_leaves)
        ]
        # All replicas of a strategy have to return the same structure.
        while len(roots) < self._most_roots:
            roots.append([tf.zeros([0], bucket.dtype) for bucket in self.packing.buckets])
        return roots

    def _join_pieces(self, array: tf.TensorArray, spec: tf.TensorSpec, count: int) -> tf.Tensor:
        pieces = [tf.ensure_shape(array.read(index), spec.shape) for index in range(count)]
        return join(*pieces)

    def finish(
        self, strategy: tf.distribute.Strategy, run: Run, roots: list[list[PerReplica]]
    ) -> list[PerReplica]:
        """Finishes the tree on the first device; returns the sums on each device.

        Args:
            strategy: whose devices compute
            run: calls a function on each device, with that device's values
            roots: the roots of all devices, see ``DeviceResult``
        """
        assert self.packing is not None
        local_results = strategy.experimental_local_results
        devices = strategy.extended.worker_devices
        known: dict[Subtree, list[tf.Tensor]] = {}
        for device, device_leaves in enumerate(self._ranges):
            for index, root in enumerate(list_roots(self._leaves, device_leaves)):
                known[root] = [local_results(bucket)[device] for bucket in roots[index]]
        with tf.device(devices[0]):
            totals = add_up(Subtree(0, self._leaves), known, add_buckets)
        packed = [distribute(strategy, [total] * len(devices)) for total in totals]
        return run(self._unpack_on_device, packed)  # type: ignore[no-any-return]

    def _unpack_on_device(self, packed: list[tf.Tensor]) -> list[tf.Tensor]:
        """Unpacks the sums on one device.

        The graph of each device begins with a function that TensorFlow does not look into. If it
        saw that the sums were computed on the first device, it would simplify what that device does
        with them in another way, and the devices would drift apart.
        """
        assert self.packing is not None
        return self.packing.unpack([hidden_identity(bucket) for bucket in packed])


class LogicalReplicas:
    """Computes an update of logical replicas: forward and backward passes, and their sum."""

    def __init__(self, context: StepContext, run: Run) -> None:
        """Prepares an update.

        Args:
            context: of the step
            run: calls a function on each device, with that device's values
        """
        self._context = context
        self._components: Components = context.components
        self._run = run
        shape = self._components.shape
        self._loop = LeafLoop(shape.shares, shape.replicas)
        self._variables: VariablesByObjective = {}
        self._structure: Structure = None
        self._piece_structure: Structure = None

    def compute(
        self, share: Share, examples: int, kept: frozenset[str]
    ) -> tuple[Contribution, Contribution, VariablesByObjective]:
        """Computes all logical replicas.

        Args:
            share: for each device the rows of its logical replicas
            examples: the number of examples in the global batch
            kept: which of ``output`` and ``batch`` are needed afterwards

        Returns:
            The outputs and batches of each device; the losses and gradients, summed; and by
            objective the variables of the gradients.
        """
        strategy = self._components.strategy

        def run_on_device(share: Share) -> tuple[DeviceResult, list[tf.Tensor]]:
            return self._run_device(share.batch, examples, kept)

        result, before = self._run(run_on_device, share)
        totals = self._loop.finish(strategy, self._run, result.roots)
        differences = totals[len(totals) - len(self._list_added()) :]
        summed = tf.nest.pack_sequence_as(self._structure, totals[: len(totals) - len(differences)])
        self._check_equal(result)
        self._run(self._assign_written, before, differences)
        loss, gradients, weight = summed
        pieces = tf.nest.pack_sequence_as(
            self._piece_structure, result.pieces, expand_composites=True
        )
        contribution = Contribution(loss, gradients, weight, *pieces)
        return contribution, Contribution(loss, gradients, weight, [], []), self._variables

    def _list_added(self) -> list[WrittenVariable]:
        """Returns the written variables whose changes are added up or averaged."""
        return [written for written in self._components.written if not written.is_shared]

    def _list_compared(self) -> list[WrittenVariable]:
        """Returns the written variables that have to be equal on all logical replicas."""
        return [written for written in self._components.written if written.is_shared]

    def _run_device(
        self, batch: Batch, examples: int, kept: frozenset[str]
    ) -> tuple[DeviceResult, list[tf.Tensor]]:
        """Computes the logical replicas of one device; also returns the values before."""
        context = tf.distribute.get_replica_context()
        device = int(tf.get_static_value(context.replica_id_in_sync_group))
        written = self._components.written
        before = [entry.variable.read_value() for entry in written]
        shape = self._components.shape
        leaves = shape.shares
        first_leaf = self._loop.get_leaves(device).start
        first_row = find_fixed_start(first_leaf, examples, leaves)

        def compute(index: tf.Tensor) -> LeafResult:
            with (
                enter_logical_replica(index, leaves),
                mute_other_summaries(self._context.step, index),
                tf.name_scope(""),  # a summary's name begins with the name scope
            ):
                set_generators(self._context, index)
                for entry, value in zip(written, before, strict=True):
                    entry.variable.assign(value)
                if shape.by_rows:
                    share = take_leaf(batch, examples, index, leaves, first_row)
                else:
                    share = Share(unpack_element(batch[index - first_leaf], shape.element_spec))
                contribution, variables = forward_backward(self._context, examples, kept, share)
                gradients = check_gradients(contribution.gradients, variables)
                contribution = contribution._replace(gradients=gradients)
                self._variables = variables
                return self._collect(contribution, share, before, examples)

        return self._loop.run(device, compute), before

    def _collect(
        self, contribution: Contribution, share: Share, before: list[tf.Tensor], examples: int
    ) -> LeafResult:
        """Returns what a logical replica contributes, after it has run."""
        self._structure = (contribution.loss, contribution.gradients, contribution.weight)
        self._piece_structure = (contribution.output, contribution.batch)
        rows = share.rows
        if rows is None:
            rows = examples // self._components.shape.shares
        share_of_rows = tf.cast(rows, tf.float32) / tf.cast(examples, tf.float32)
        differences = []
        digests = []
        for written, value in zip(self._components.written, before, strict=True):
            after = written.variable.read_value()
            if written.is_shared:
                digests.append(digest_bits(after))
                continue
            difference = after - value
            if written.max_stretch is not None:  # a moving statistic, of which the mean is taken
                difference *= tf.cast(share_of_rows, difference.dtype)
            differences.append(difference)
        return LeafResult(
            [*tf.nest.flatten(self._structure), *differences],
            tf.stack(digests) if digests else tf.zeros([0], tf.int64),
            tf.nest.flatten(self._piece_structure, expand_composites=True),
        )

    def _assign_written(self, before: list[tf.Tensor], differences: list[tf.Tensor]) -> None:
        """Assigns on one device what all logical replicas together have written."""
        remaining = iter(differences)
        for written, value in zip(self._components.written, before, strict=True):
            if not written.is_shared:
                written.variable.assign(value + next(remaining))

    def _check_equal(self, result: DeviceResult) -> None:
        """Lets the step fail if logical replicas have written different values to a variable."""
        compared = self._list_compared()
        if not compared:
            return
        local_results = self._components.strategy.experimental_local_results
        with tf.device("CPU:0"):
            lowest = tf.reduce_min(tf.stack(local_results(result.lowest)), 0)
            highest = tf.reduce_max(tf.stack(local_results(result.highest)), 0)
            for index, written in enumerate(compared):
                name = name_variable(written.variable)
                message = (
                    f"logical_replicas: the forward pass writes different values to {name} on "
                    "different logical replicas; write what is the same on all of them"
                )
                tf.debugging.Assert(tf.equal(lowest[index], highest[index]), [message])


def set_generators(context: StepContext, index: int | tf.Tensor) -> None:
    """Sets all random generators for a logical replica, or for what all devices do alike."""
    assert context.step is not None
    assign_generators(context.components, TRAINING, context.step, context.turn or 0, index)


def assign_generators(
    components: Components, purpose: int, step: Count, turn: Count, index: Count
) -> None:
    """Assigns the states of all random generators, see ``derive_generator_states``."""
    generators = components.generators
    if not generators.variables:
        return
    states = derive_generator_states(generators.initial_states, purpose, step, turn, index)
    for variable, state in zip(generators.variables, states, strict=True):
        variable.assign(tf.cast(state, variable.dtype))


def take_leaf(batch: Batch, examples: int, index: tf.Tensor, leaves: int, first_row: int) -> Share:
    """Returns the rows of a logical replica out of those of its device.

    Args:
        batch: the rows of the device
        examples: the number of examples in the global batch
        index: of the logical replica
        leaves: the number of logical replicas
        first_row: the index of the first row of the device in the global batch
    """
    if examples % leaves == 0:
        size = examples // leaves
        return Share(take_batch_rows(batch, index * size - first_row, size))
    first = find_start(index, examples, leaves)
    rows = find_start(index + 1, examples, leaves) - first
    taken = take_batch_rows(batch, first - first_row, rows)
    return Share(taken, rows, None, tf.constant(examples))


def check_gradients(
    gradients: GradientsByObjective, variables: VariablesByObjective
) -> GradientsByObjective:
    """Returns dense gradients with the static shapes of their variables.

    Raises:
        SetupError: a gradient is sparse, so its rows have no fixed number; the message names the
            variable.
    """
    checked: GradientsByObjective = {}
    for name, objective_gradients in gradients.items():
        checked[name] = []
        for gradient, variable in zip(objective_gradients, variables[name], strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                raise SetupError(
                    f"logical_replicas: the gradient of {name_variable(variable)} is sparse, which "
                    "is not supported yet; leave out logical_replicas."
                )
            checked[name].append(tf.ensure_shape(gradient, variable.shape))
    return checked


def digest_bits(value: tf.Tensor) -> tf.Tensor:
    """Returns a checksum of the bits of a tensor, an int64 scalar; every NaN counts alike."""
    if value.dtype == tf.string:
        bits = tf.strings.to_hash_bucket_fast(value, 2**62)
    elif value.dtype.is_bool or value.dtype.is_integer:
        bits = tf.cast(value, tf.int64)
    else:
        if value.dtype.is_floating:
            nan = tf.constant(float("nan"), value.dtype)
            value = tf.where(tf.math.is_nan(value), nan, value)
        integers = {2: tf.int16, 4: tf.int32, 8: tf.int64, 16: tf.int64}
        bits = tf.cast(tf.bitcast(value, integers[value.dtype.size]), tf.int64)
    bits = tf.reshape(bits, [-1])
    factors = tf.range(tf.size(bits, tf.int64)) * 0x5851F42D4C957F2D * 2 + 1
    return tf.reduce_sum(bits * factors)
