"""Unit tests of logical replicas: the summation tree, buckets and random states."""

from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ctl_core.model.leaf_sum import add_buckets
from ctl_core.numerics import summation_tree
from ctl_core.numerics.packing import Packing
from ctl_core.numerics.randomness import derive_generator_states
from ctl_core.numerics.reduction import merge_rows
from ctl_core.numerics.summation_tree import Subtree

many = settings(max_examples=200, deadline=None, derandomize=True)
few = settings(max_examples=25, deadline=None, derandomize=True)
leaf_counts = st.integers(1, 70)


def bracket(left: str, right: str) -> str:
    return f"({left} {right})"


@many
@given(leaf_counts, st.integers(1, 12))
def test_a_sum_has_the_same_brackets_on_any_number_of_devices(leaves: int, devices: int) -> None:
    tree = Subtree(0, leaves)
    names = {Subtree(leaf, 1): str(leaf) for leaf in range(leaves)}
    expected = summation_tree.add_up(tree, names.get, bracket)
    sums: dict[Subtree, str] = {}
    for device_leaves in summation_tree.split_leaves(leaves, min(devices, leaves)):
        for root in summation_tree.list_roots(leaves, device_leaves):
            assert device_leaves.start <= root.start
            assert root.end <= device_leaves.stop
            sums[root] = summation_tree.add_up(root, names.get, bracket)
    assert summation_tree.add_up(tree, sums.get, bracket) == expected


@many
@given(leaf_counts)
def test_leaves_are_added_up_in_their_order_with_one_sum_held_for_each_level(leaves: int) -> None:
    order = []
    held = 0
    most = 0

    def compute(subtree: Subtree) -> str | None:
        nonlocal held, most
        if subtree.size > 1:
            return None
        order.append(subtree.start)
        held += 1
        most = max(most, held)
        return str(subtree.start)

    def add(left: str, right: str) -> str:
        nonlocal held
        held -= 1
        return bracket(left, right)

    summation_tree.add_up(Subtree(0, leaves), compute, add)
    assert order == list(range(leaves))
    assert most <= leaves.bit_length() + 1


@many
@given(leaf_counts, st.integers(1, 70))
def test_devices_have_ranges_that_differ_by_one_leaf_at_most(leaves: int, devices: int) -> None:
    ranges = summation_tree.split_leaves(leaves, min(devices, leaves))
    assert [leaf for device_leaves in ranges for leaf in device_leaves] == list(range(leaves))
    sizes = [len(device_leaves) for device_leaves in ranges]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_the_left_subtree_has_the_largest_power_of_two() -> None:
    names = {Subtree(leaf, 1): str(leaf) for leaf in range(7)}
    added = summation_tree.add_up(Subtree(0, 7), names.get, bracket)
    assert added == "(((0 1) (2 3)) ((4 5) 6))"


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8)


@few
@given(shapes, st.sampled_from([1, 16, 64, 4096]), st.integers(0, 2**16))
def test_packed_tensors_come_back_bit_for_bit(shapes: Any, limit: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    dtypes = [random.choice(["float32", "float64", "int64"]) for _ in shapes]
    tensors = [
        tf.constant(random.integers(-9, 9, shape), dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    packing = Packing([tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors], limit)
    for bucket in packing.buckets:
        assert len(bucket.indices) == 1 or bucket.size * bucket.dtype.size <= limit
    unpacked = packing.unpack(packing.pack(tensors))
    for tensor, other in zip(tensors, unpacked, strict=True):
        assert tensor.dtype == other.dtype
        np.testing.assert_array_equal(tensor, other)


def test_states_of_generators_depend_on_every_argument_and_on_the_initial_state() -> None:
    initial = [np.array([7, 0]), np.array([8, 0]), np.array([1, 2, 3])]
    states: set[tuple[int, ...]] = set()
    keys = [(0, 5, 0), (1, 5, 0), (0, 6, 0), (0, 5, 1)]
    for purpose, step, turn in keys:
        derived = derive_generator_states(initial, purpose, step, turn, 3).numpy()
        assert derived.shape == (3 + 2, 3, 3)
        states.update(map(tuple, derived[:, :2, :2].reshape(-1, 2).tolist()))
        states.update(map(tuple, derived[:, 2].tolist()))
        again = derive_generator_states(initial, purpose, tf.constant(step, tf.int64), turn, 3)
        np.testing.assert_array_equal(derived, again)
        more = derive_generator_states(initial, purpose, step, turn, 7)
        np.testing.assert_array_equal(derived[:3], more[:3])
    assert len(states) == 3 * 5 * len(keys)


@few
@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_sparse_gradients_have_the_sum_of_the_dense_ones_bit_for_bit(
    leaves: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    gradients: dict[Subtree, Any] = {}
    for leaf in range(leaves):
        rows = random.integers(1, 12)
        values = tf.constant(random.normal(size=(rows, 3)).astype("float32"))
        indices = tf.constant(random.integers(0, 10, rows))
        gradient = tf.IndexedSlices(values, indices, tf.constant([10, 3]))
        gradients[Subtree(leaf, 1)] = [merge_rows(gradient, compiled=False)]
    (total,) = summation_tree.add_up(Subtree(0, leaves), gradients.get, add_buckets)
    dense: dict[Subtree, Any] = {
        leaf: [tf.convert_to_tensor(rows[0])] for leaf, rows in gradients.items()
    }
    (expected,) = summation_tree.add_up(Subtree(0, leaves), dense.get, add_buckets)
    assert len(set(total.indices.numpy())) == len(total.indices)
    np.testing.assert_array_equal(tf.convert_to_tensor(total), expected)
