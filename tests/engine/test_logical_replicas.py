"""The pure pieces of logical replicas: the tree of sums, buckets, random numbers."""

from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ctl_core.numerics import summation_tree
from ctl_core.numerics.packing import Packing
from ctl_core.numerics.randomness import derive_generator_states
from ctl_core.numerics.summation_tree import Subtree

many = settings(max_examples=200, deadline=None, derandomize=True)
few = settings(max_examples=25, deadline=None, derandomize=True)
leaf_counts = st.integers(1, 70)


def bracket(left: str, right: str) -> str:
    return f"({left} {right})"


def walk_leaves(leaves: int, device_leaves: range) -> dict[int, str]:
    """Adds up blocks as a device does, leaf by leaf; returns what it holds at the end."""
    levels = summation_tree.count_levels(leaves)
    held: dict[int, str] = {}
    for leaf in device_leaves:
        level = 0
        carried = str(leaf)
        while (leaf >> level) & 1 and (leaf >> (level + 1)) << (level + 1) >= device_leaves.start:
            carried = bracket(held[level], carried)
            level += 1
        held[level + levels * ((leaf >> level) & 1)] = carried
    return held


@many
@given(leaf_counts, st.integers(1, 12))
def test_a_sum_has_the_same_brackets_on_any_number_of_devices(leaves: int, devices: int) -> None:
    tree = Subtree(0, leaves)
    names = {Subtree(leaf, 1): str(leaf) for leaf in range(leaves)}
    expected = summation_tree.add_up(tree, names, bracket)
    sums: dict[Subtree, str] = {}
    for device_leaves in summation_tree.split_leaves(leaves, min(devices, leaves)):
        held = walk_leaves(leaves, device_leaves)
        blocks = {
            block: held[summation_tree.find_entry(leaves, block)]
            for block in summation_tree.list_blocks(device_leaves)
        }
        for root in summation_tree.list_roots(leaves, device_leaves):
            sums[root] = summation_tree.add_up(root, blocks, bracket)
    assert summation_tree.add_up(tree, sums, bracket) == expected


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
    added = summation_tree.add_up(Subtree(0, 7), names, bracket)
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
    keys = [(0, 5, 0, 1), (1, 5, 0, 1), (0, 6, 0, 1), (0, 5, 1, 1), (0, 5, 0, 2), (0, 5, 0, -1)]
    for purpose, step, turn, index in keys:
        derived = derive_generator_states(initial, purpose, step, turn, index)
        assert [state.shape[0] for state in derived] == [2, 2, 3]
        assert all(state.dtype == tf.int64 for state in derived)
        states.update(tuple(state.numpy().tolist()) for state in derived)
        again = derive_generator_states(initial, purpose, tf.constant(step, tf.int64), turn, index)
        for state, other in zip(derived, again, strict=True):
            np.testing.assert_array_equal(state, other)
    assert len(states) == 3 * len(keys)
