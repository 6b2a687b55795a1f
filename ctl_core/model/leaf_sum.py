"""Adds up the results of logical replicas along a tree that does not depend on the devices.

Each device computes a contiguous range of logical replicas, one after another, and adds up their
contributions along the tree of numerics/summation_tree.py. For each bucket of gradients, all
devices then send the roots of their subtrees to one device, which finishes the tree and sends the
sum back. In a cluster, all devices send their roots to all devices of all processes, and each
device finishes the tree by itself.

A logical replica is a graph function that TensorFlow does not inline. TensorFlow therefore
simplifies it separately, in the same way on each device, regardless of the surrounding ops. If a
model were inlined next to other ops, TensorFlow could simplify it differently, and the results
would be rounded differently. For the same reason, each addition is a function, too: TensorFlow
would merge inlined additions into AddN, which adds in a different order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from ctl_core.cluster.collectives import distribute, has_peers
from ctl_core.input.batches import take_rows
from ctl_core.model.logical_exchange import gather, gather_sparse
from ctl_core.model.shared_functions import hide
from ctl_core.numerics.bits import are_all_equal
from ctl_core.numerics.packing import GradientPacking, find_length
from ctl_core.numerics.reduction import join, merge_rows
from ctl_core.numerics.summation_tree import Subtree, add_up, list_roots, split_leaves
from ctl_core.types import AnyTensor, Gradient, PerReplica

Run = Callable[..., PerReplica]
# The sums of a subtree are packed into buckets. A bucket is a vector of dense sums, or the sum of a
# sparse gradient, in which each index occurs once.
Bucket: TypeAlias = Gradient
Buckets: TypeAlias = list[Bucket]

_NOT_INLINED = {"_noinline": True}


def _add(left: Bucket, right: Bucket) -> Bucket:
    """Adds two buckets.

    The sum of two sparse gradients has the indices of both, in an order that depends only on these
    two gradients. The sum has the same values as if both gradients were dense.
    """
    if isinstance(left, tf.IndexedSlices):
        merged: Bucket = merge_rows(join(left, right), compiled=False)
        return merged
    return left + right


hidden_add = tf.function(_add, autograph=False, experimental_attributes=_NOT_INLINED)
hidden_identity = tf.function(tf.identity, autograph=False, experimental_attributes=_NOT_INLINED)


def add_buckets(left: Buckets, right: Buckets) -> Buckets:
    """Adds each bucket of one subtree to the same bucket of another subtree.

    The additions are functions that TensorFlow does not inline.
    """
    return [hidden_add(*pair) for pair in zip(left, right, strict=True)]


class LeafResult(NamedTuple):
    """The results of one logical replica.

    Attributes:
        buckets: the sums over the examples of the logical replica, see ``BucketLayout``; in a
            sparse gradient, each index occurs once
        compared: the values that have to be equal on all logical replicas
        pieces: the tensors of this logical replica that are passed to host hooks; they may be
            ragged or sparse
    """

    buckets: Buckets
    compared: list[tf.Tensor]
    pieces: list[AnyTensor]


# Computes the logical replica with a given index, an int32 scalar.
ComputeLeaf: TypeAlias = Callable[[tf.Tensor], tuple[LeafResult, "BucketLayout"]]


class DeviceResult(NamedTuple):
    """The results of the logical replicas of one device.

    Attributes:
        roots: for each subtree that the device adds up, the buckets of its sum; padded with empty
            buckets if other devices have more roots
        compared: the values of the device's first logical replica that have to be equal on all
            logical replicas
        are_equal: for each value in ``compared``, a bool scalar: whether the value is the same on
            all logical replicas of the device
        pieces: for each logical replica of the device, its pieces; padded with pieces without rows
            if other devices have more logical replicas
    """

    roots: list[Buckets]
    compared: list[tf.Tensor]
    are_equal: list[tf.Tensor]
    pieces: list[list[AnyTensor]]


class BucketLayout(NamedTuple):
    """The layout of the sums of a logical replica in buckets, which is the same on all devices.

    Attributes:
        packing: the assignment of the tensors to buckets
        sparse_rows: for each sparse gradient in order, the maximum number of rows that it can have
            in one logical replica in any step, and the number of rows of its variable
    """

    packing: GradientPacking
    sparse_rows: Sequence[tuple[int, int]] = ()


class LeafSum:
    """Computes the logical replicas, which are the leaves of the tree, and adds them up.

    Attributes:
        layout: the layout of the sums in buckets; None until the first leaf has been computed
        ranges: for each device of all processes, the indices of its logical replicas
    """

    def __init__(self, leaves: int, devices: int) -> None:
        """Prepares a sum.

        Args:
            leaves: the number of logical replicas
            devices: the number of devices of all processes
        """
        self.layout: BucketLayout | None = None
        self.ranges = split_leaves(leaves, devices)
        self._leaves = leaves
        self._most_leaves = max(map(len, self.ranges))
        self._most_roots = max(
            len(list_roots(leaves, device_leaves)) for device_leaves in self.ranges
        )

    def add_up_device(self, device: int, compute: ComputeLeaf) -> DeviceResult:
        """Computes the logical replicas of one device, and adds them up as far as possible.

        Args:
            device: the index of the device
            compute: computes the logical replica with a given index, in a graph function that is
                not inlined
        """

        def compute_leaf(index: tf.Tensor) -> LeafResult:
            result, self.layout = compute(index)
            return result

        walk = DeviceWalk(compute_leaf)
        roots = [
            add_up(root, walk.compute_if_leaf, walk.add)
            for root in list_roots(self._leaves, self.ranges[device])
        ]
        # Pad the roots, because all replicas of a strategy have to return the same structure.
        while len(roots) < self._most_roots:
            roots.append([make_empty(bucket) for bucket in roots[0]])
        pieces = [[make_vector(piece) for piece in leaf_pieces] for leaf_pieces in walk.pieces]
        while len(pieces) < self._most_leaves:
            pieces.append([take_rows(piece, 0, 0) for piece in pieces[0]])
        return DeviceResult(
            roots,
            walk.compared[0],
            [are_all_equal(values) for values in zip(*walk.compared, strict=True)],
            pieces,
        )

    def finish(
        self, strategy: tf.distribute.Strategy, run: Run, roots: list[list[PerReplica]]
    ) -> list[PerReplica]:
        """Adds up the roots of all devices, and returns the buckets of the sums on each device.

        In a single process, each bucket is added up on one device, and the devices take turns. In a
        cluster, each device adds up all buckets. A device receives the roots of its next bucket
        only after its previous bucket has been added up, so the roots of only one bucket take up
        memory at a time.

        Args:
            strategy: the strategy whose devices compute
            run: a function that calls another function on each device, with that device's values
            roots: the roots of all devices, see ``DeviceResult``
        """
        if has_peers(strategy):
            summed: list[PerReplica] = run(self._finish_on_each_device, roots)
            return summed
        devices = strategy.extended.worker_devices
        totals: Buckets = []
        for bucket in range(len(roots[0])):
            earlier = []
            if bucket >= len(devices):  # wait for the previous bucket of this device
                earlier.append(totals[bucket - len(devices)])
            bucket_roots = [root[bucket] for root in roots]
            known = self._release_roots(strategy, bucket_roots, earlier)
            with tf.device(devices[bucket % len(devices)]):
                totals.append(add_up(Subtree(0, self._leaves), known.get, hidden_add))
        packed = [distribute(strategy, [total] * len(devices)) for total in totals]
        received: list[PerReplica] = run(receive, packed)
        return received

    def _release_roots(
        self, strategy: tf.distribute.Strategy, roots: list[PerReplica], after: Buckets
    ) -> dict[Subtree, tf.Tensor]:
        """Returns the sums of a bucket by subtree.

        Each device sends its sums only after the tensors ``after`` have been computed.

        Args:
            strategy: the strategy whose devices have the sums
            roots: the sums, see ``DeviceResult``
            after: tensors that have to be computed before the sums are sent
        """
        released = {}
        for device, device_leaves in enumerate(self.ranges):
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

    def _finish_on_each_device(self, roots: list[Buckets]) -> Buckets:
        """Adds up the roots of all processes, and returns the sums. Runs on each device.

        Args:
            roots: the roots of this device, see ``DeviceResult``
        """
        assert self.layout is not None
        totals: Buckets = []
        roots_by_bucket = list(zip(*roots, strict=True))
        dense_buckets = self.layout.packing.dense.buckets
        dense_roots = roots_by_bucket[: len(dense_buckets)]
        sparse_roots = roots_by_bucket[len(dense_buckets) :]
        for bucket, bucket_roots in zip(dense_buckets, dense_roots, strict=True):
            with tf.control_dependencies(totals[-1:]):  # wait for the previous bucket
                joined = tf.concat(bucket_roots, 0)
            totals.append(self._add_up_roots(self._gather_dense(joined, bucket.size)))
        rows = self.layout.sparse_rows
        for (leaf_rows, table_rows), bucket_roots in zip(rows, sparse_roots, strict=True):
            most_rows = min(table_rows, leaf_rows * self._most_leaves)
            totals.append(self._add_up_roots(gather_sparse(bucket_roots, most_rows)))
        return receive(totals)

    def _gather_dense(self, joined: tf.Tensor, size: int) -> tf.Tensor:
        """Returns the roots of a bucket of dense tensors from all devices.

        Args:
            joined: the roots of this device, joined to one vector
            size: the number of elements of a root

        Returns:
            A tensor of the shape [devices, roots, size]. If a device has fewer roots than other
            devices, its last roots are 0, because devices exchange tensors of the same shape.
        """
        missing = self._most_roots * size - find_length(joined)
        padded = tf.pad(joined, [[0, missing]])
        return tf.reshape(gather(padded), [-1, self._most_roots, size])

    def _add_up_roots(self, gathered: Sequence[Sequence[Bucket]] | tf.Tensor) -> Bucket:
        """Returns the sum of a bucket.

        Args:
            gathered: for each device, the sums of its roots in this bucket, in the order of the
                roots
        """
        known = {
            subtree: gathered[device][index]
            for device, device_leaves in enumerate(self.ranges)
            for index, subtree in enumerate(list_roots(self._leaves, device_leaves))
        }
        return add_up(Subtree(0, self._leaves), known.get, hidden_add)


def receive(buckets: Buckets) -> Buckets:
    """Returns the sums on one device.

    Each device, including the device that computed the sum, first passes the sum through an
    identity function that is placed on this device and is not inlined. Otherwise,
    ``tf.clip_by_global_norm``, which places its products next to the gradients, would place the
    products of all devices on the device that computed the sum. The stage MinimizeBroadcasts of
    Grappler's arithmetic optimizer reorders the products of gradient, clipping factor and learning
    rate if all of them are on one device, but not if they are on two devices. The weights on
    different devices would then be rounded differently, and drift apart.

    All other values that one device computes for others are exact: the states of random generators,
    numbers of steps, and flags.
    """
    return [hidden_identity(bucket) for bucket in buckets]


class DeviceWalk:
    """Computes the logical replicas of a device in order, and adds them up as soon as possible.

    Each call waits for the previous call. The device therefore stores the activations of only one
    logical replica at a time, and one partial sum for each level of the tree.

    Attributes:
        compared: for each logical replica computed so far, the values that have to be equal on all
            logical replicas
        pieces: for each logical replica computed so far, its pieces, see ``LeafResult``
    """

    def __init__(self, function: Callable[[tf.Tensor], LeafResult]) -> None:
        """Stores the function that computes the logical replica with a given index."""
        self.compared: list[list[tf.Tensor]] = []
        self.pieces: list[list[AnyTensor]] = []
        self._function = function
        self._last: Buckets = []

    def compute_if_leaf(self, subtree: Subtree) -> Buckets | None:
        """Computes a logical replica and returns its buckets; returns None for a larger subtree."""
        if subtree.size > 1:
            return None
        with tf.control_dependencies(self._last):
            result = self._function(hide(subtree.start))
        self.compared.append(result.compared)
        self.pieces.append(result.pieces)
        self._last = result.buckets
        return result.buckets

    def add(self, left: Buckets, right: Buckets) -> Buckets:
        """Adds the sums of two subtrees."""
        self._last = add_buckets(left, right)
        return self._last


def make_vector(piece: AnyTensor) -> AnyTensor:
    """Returns a scalar as a vector with one element, and any other tensor unchanged."""
    if isinstance(piece, tf.Tensor) and piece.shape.rank == 0:
        return tf.reshape(piece, [1])
    return piece


def make_empty(bucket: Bucket) -> Bucket:
    """Returns a bucket without elements, or without rows if it is sparse."""
    if isinstance(bucket, tf.IndexedSlices):
        return tf.IndexedSlices(bucket.values[:0], bucket.indices[:0], bucket.dense_shape)
    return tf.zeros([0], bucket.dtype)
