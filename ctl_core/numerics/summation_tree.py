"""Adds up the values of logical replicas along a fixed binary tree.

Floating-point addition is not associative, so a sum has the same bits on any number of devices only
if its additions are always grouped in the same way. Here, the additions follow one binary tree
whose n leaves are the logical replicas. The number of leaves in the left subtree is the largest
power of two below n. Each device computes a contiguous range of leaves and adds up the subtrees
inside its range. The roots of these subtrees are then added up along the rest of the tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Subtree(NamedTuple):
    """A subtree, given by its range of leaves.

    Attributes:
        start: the index of the first leaf
        size: the number of leaves
    """

    start: int
    size: int

    @property
    def end(self) -> int:
        """The index after the last leaf."""
        return self.start + self.size

    def split(self) -> tuple[Subtree, Subtree]:
        """Returns the left and right children of this subtree of two or more leaves."""
        left_size = 1 << ((self.size - 1).bit_length() - 1)
        return (
            Subtree(self.start, left_size),
            Subtree(self.start + left_size, self.size - left_size),
        )


def split_leaves(leaves: int, devices: int) -> list[range]:
    """Returns a contiguous range of leaves for each device; sizes differ by at most one.

    Args:
        leaves: the number of leaves, at least the number of devices
        devices: the number of devices
    """
    bounds = [leaves * device // devices for device in range(devices + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def list_roots(leaves: int, device_leaves: range) -> list[Subtree]:
    """Returns the largest subtrees that lie inside a range of leaves, from left to right.

    Args:
        leaves: the number of leaves of the whole tree
        device_leaves: the range of leaves
    """
    return list(_walk_roots(Subtree(0, leaves), device_leaves))


def _walk_roots(subtree: Subtree, device_leaves: range) -> Iterator[Subtree]:
    start, end = device_leaves.start, device_leaves.stop
    if end <= subtree.start or subtree.end <= start:
        return
    if start <= subtree.start and subtree.end <= end:
        yield subtree
        return
    for child in subtree.split():
        yield from _walk_roots(child, device_leaves)


def add_up(root: Subtree, find: Callable[[Subtree], T | None], add: Callable[[T, T], T]) -> T:
    """Returns the sum of a subtree, adding from left to right.

    Args:
        root: the subtree
        find: a function that returns the sum of a subtree if it is already known, and None if the
            sums of its children have to be added
        add: a function that adds two values
    """
    known = find(root)
    if known is not None:
        return known
    left, right = root.split()
    return add(add_up(left, find, add), add_up(right, find, add))
