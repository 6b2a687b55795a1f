"""Combines the changes that the leaves of a step make to variables.

Each leaf begins with the variables as they were before the update, and everything that it writes in
its forward or backward pass is a change. The changes of all leaves are added up together with the
gradients; ``Combination`` says how. After an update, every variable therefore has the same value on
all devices, except for the parts of training metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from ctl_core.cluster.exchange import decode_sum, encode_for_sum
from ctl_core.hooks.recording import Recording
from ctl_core.input.batches import Share
from ctl_core.model.averages import find_moving_statistics
from ctl_core.model.components import Combination, Components, WrittenVariable
from ctl_core.model.forward import keep_if
from ctl_core.numerics.bits import are_all_equal
from ctl_core.numerics.reduction import ContributionLayout, PackedContribution, select
from ctl_core.numerics.variables import name_variable, unwrap
from ctl_core.types import Count, Gradient

_COMBINATIONS = {
    tf.VariableAggregation.MEAN: Combination.MEAN,
    tf.VariableAggregation.SUM: Combination.SUM,
    tf.VariableAggregation.ONLY_FIRST_REPLICA: Combination.FIRST,
}


def describe_written(
    recording: Recording, variables: Iterable[tf.Variable], averages_floats: bool = False
) -> list[WrittenVariable]:
    """Returns variables that leaves write, with the way in which their changes are combined.

    The aggregation with which a variable was created decides. Moving statistics of batch
    normalization are averaged.

    Args:
        recording: the recording of the run, which knows the aggregations and the layers
        variables: the variables
        averages_floats: whether floats without an aggregation are averaged rather than compared
    """
    statistics = set(map(id, find_moving_statistics(recording.layers)))
    written = []
    for variable in variables:
        aggregation = recording.aggregations.get(id(variable), variable.aggregation)
        combination = _COMBINATIONS.get(aggregation, Combination.EQUAL)
        is_float = variable.dtype.is_floating or variable.dtype.is_complex
        is_averaged = id(variable) in statistics or (averages_floats and is_float)
        if combination is Combination.EQUAL and is_averaged:
            combination = Combination.MEAN
        written.append(WrittenVariable(variable, combination))
    return written


def list_compared(components: Components) -> list[str]:
    """Returns the names of the variables whose values a step compares between leaves.

    Without the tree, the leaves of a device are compared. Devices are compared before each
    checkpoint.
    """
    shape = components.shape
    if shape.logical_replicas is None and shape.accumulate_steps == 1:
        return []
    return [
        name_variable(entry.variable)
        for entry in components.written
        if entry.combination is Combination.EQUAL
    ]


class LeafWeight(NamedTuple):
    """The weight of a leaf in means over the rows of a batch.

    Attributes:
        rows: the number of rows of the leaf
        examples: the number of rows of the batch
    """

    rows: Count
    examples: Count

    def compute(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the weight, a scalar of a floating-point dtype."""
        weight: tf.Tensor = tf.cast(self.rows, dtype) / tf.cast(self.examples, dtype)
        return weight


class LeafVariables:
    """The variables that leaves write; each method handles those of one device.

    Attributes:
        exchanged: the variables about which the leaves exchange something
    """

    def __init__(self, written: Sequence[WrittenVariable], takes_first: bool = False) -> None:
        """Prepares to combine the changes of leaves.

        Args:
            written: the variables
            takes_first: whether the leaves also exchange the value that leaf 0 writes to variables
                that are equal in all leaves. A device whose leaves have no rows needs this value,
                because it computes on a placeholder. Strings, and values whose shape may differ,
                cannot be exchanged
        """
        self._written = written
        self._indices = [
            index
            for index, entry in enumerate(written)
            if entry.combination is not Combination.EQUAL
            or (takes_first and _has_fixed_size(entry.variable))
        ]
        self.exchanged = [written[index] for index in self._indices]

    def read(self) -> list[tf.Tensor]:
        """Returns the current values of all variables."""
        return [entry.variable.read_value() for entry in self._written]

    def begin_leaf(self, before: Sequence[tf.Tensor]) -> None:
        """Gives all variables the values with which a leaf begins.

        Args:
            before: the values before all leaves, see ``read``
        """
        for entry, value in zip(self._written, before, strict=True):
            if entry.combination is Combination.PART:
                value = tf.zeros_like(value)
            entry.variable.assign(value)

    def read_compared(self) -> list[tf.Tensor]:
        """Returns the current values of the variables that are equal in all leaves."""
        return [
            entry.variable.read_value()
            for entry in self._written
            if entry.combination is Combination.EQUAL
        ]

    def find_changes(
        self, before: Sequence[tf.Tensor], share: Share, weight: LeafWeight
    ) -> list[tf.Tensor]:
        """Returns the tensor that a leaf adds to the exchange for each variable of ``exchanged``.

        This is the change of the variable, or its value if the variable takes the value of leaf 0.
        The sums over all leaves are passed to ``apply_changes``.

        Args:
            before: the values before the leaf, see ``read``
            share: the rows of the leaf
            weight: the weight of the leaf in means
        """
        is_first = tf.equal(share.leaf, 0)
        changes = []
        for index, entry in zip(self._indices, self.exchanged, strict=True):
            change = _find_change(entry, before[index], is_first, weight)
            changes.append(keep_if(share.present, change))
        return changes

    def apply_changes(
        self,
        before: Sequence[tf.Tensor],
        totals: Sequence[tf.Tensor],
        present: tf.Tensor | None = None,
    ) -> None:
        """Assigns the combined changes of all leaves to the variables of ``exchanged``.

        Args:
            before: the values before the leaves, see ``read``
            totals: the sums of the results of ``find_changes``
            present: whether a leaf of the device has rows. If so, variables that are equal in all
                leaves keep the value that this leaf has written. None: they take that of leaf 0
        """
        for index, entry, total in zip(self._indices, self.exchanged, totals, strict=True):
            after = _apply_change(entry, before[index], total)
            if entry.combination is Combination.EQUAL and present is not None:
                after = select(present, entry.variable.read_value(), after)
            entry.variable.assign(after)

    def drop_if_absent(self, previous: Sequence[tf.Tensor], present: tf.Tensor) -> None:
        """Undoes the writes of a leaf without rows to variables that are equal in all leaves.

        Args:
            previous: the values that the previous leaf of the device has written, see ``read``
            present: whether the leaf has rows
        """
        for entry, value in zip(self._written, previous, strict=True):
            if entry.combination is Combination.EQUAL:
                after = entry.variable.read_value()
                entry.variable.assign(select(present, after, value))

    def count_differences(
        self, previous: Sequence[tf.Tensor], micro_batch: Count, present: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Compares the values that a leaf has written with those of the previous leaf.

        Args:
            previous: the values that the previous leaf of the device has written, see ``read``
            micro_batch: the index of the leaf among those of its device
            present: whether the leaf has rows; None if every leaf has rows

        Returns:
            For each variable that is equal in all leaves, a float32 scalar: 1 if its values differ,
            otherwise 0.
        """
        is_compared = tf.convert_to_tensor(micro_batch) > 0
        if present is not None:
            is_compared &= present
        differences = []
        for entry, value in zip(self._written, previous, strict=True):
            if entry.combination is Combination.EQUAL:
                is_equal = are_all_equal([value, entry.variable.read_value()])
                differences.append(tf.cast(is_compared & ~is_equal, tf.float32))
        return differences


def _has_fixed_size(variable: tf.Variable) -> bool:
    """Returns whether all values of a variable have the same size in memory."""
    return bool(variable.shape.is_fully_defined()) and variable.dtype != tf.string


def _find_change(
    entry: WrittenVariable, before: tf.Tensor, is_first: tf.Tensor, weight: LeafWeight
) -> tf.Tensor:
    """Returns the change of one variable; see ``LeafVariables.find_changes``."""
    after = encode_for_sum(entry.variable.read_value())
    if entry.combination is Combination.PART:
        return after
    if entry.combination in (Combination.FIRST, Combination.EQUAL):
        return keep_if(is_first, after)
    change = after - encode_for_sum(before)
    if entry.combination is Combination.SUM:
        return change
    if not change.dtype.is_floating:
        change = tf.cast(change, tf.float64)
    return change * weight.compute(change.dtype)


def _apply_change(entry: WrittenVariable, before: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Returns the value of one variable after all leaves; see ``LeafVariables.apply_changes``."""
    if entry.combination in (Combination.FIRST, Combination.EQUAL):
        return decode_sum(total, before.dtype)
    value = encode_for_sum(before)
    after = tf.cast(value, total.dtype) + total
    if value.dtype != total.dtype:  # the mean of integers
        after = tf.cast(tf.round(after), value.dtype)
    return decode_sum(after, before.dtype)


def list_parts(metrics: Iterable[keras.Metric]) -> list[WrittenVariable]:
    """Returns the variables of metrics, whose states are sums over the examples."""
    return [
        WrittenVariable(unwrap(variable), Combination.PART)
        for metric in metrics
        for variable in metric.variables
    ]


class Sums(NamedTuple):
    """The sums over all leaves of a batch; tensors have a value for each replica.

    Attributes:
        local: the contribution of each replica, which has the replica's own output and batch
        total: the sums in the buckets of ``layout``, the same on all replicas
        layout: the layout of the sums
        written: the variables whose changes were added up
        before: the values of these variables before the leaves
        states: the states of the random generators in the update; None if they are not set
        are_equal: see ``Report``; None if the sums contain the differences between leaves
    """

    local: PackedContribution
    total: list[Gradient]
    layout: ContributionLayout
    written: LeafVariables
    before: list[tf.Tensor]
    states: tf.Tensor | None
    are_equal: tf.Tensor | None


def weigh_leaf(share: Share, examples: Count, leaves: int) -> LeafWeight:
    """Returns the weight of a leaf in means over the rows of a batch.

    Args:
        share: the rows of the leaf
        examples: the number of examples in the batch
        leaves: the number of leaves
    """
    rows: Count | None = share.rows
    if rows is None:
        rows = examples // leaves
    return LeafWeight(rows, examples)
