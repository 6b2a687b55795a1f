"""Unit tests of sums over micro-batches, and of the flags that mark steps as finite."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.numerics.not_finite import NEVER, NonFinite, are_losses_finite, are_numbers
from ctl_core.numerics.reduction import PackedContribution, accumulate, join_for_host, join_pieces
from ctl_core.numerics.report import Report

EMBEDDING_SHAPE = (6, 2)


# What ``accumulate`` passes through.
LAYOUT: Any = object()


def contribute(index: Any) -> tuple[PackedContribution, Any]:
    """Returns a contribution that has ``index + 1`` rows and values that depend on the index."""
    number = tf.cast(index, tf.float32)
    rows = tf.range(index + 1)
    sparse = tf.IndexedSlices(
        tf.fill([index + 1, 2], number), rows, tf.constant(EMBEDDING_SHAPE, tf.int32)
    )
    contribution = PackedContribution(
        loss={"a": number},
        buckets=[tf.stack([number, 1.0, 0.5 + number]), sparse],
        output=[tf.fill([index + 1, 3], number)],
        batch=[(rows, tf.fill([index + 1], number))],
    )
    return contribution, LAYOUT


def run_directly(function, *values):  # type: ignore[no-untyped-def]
    return function(*values)


@pytest.mark.parametrize("micro_batches", [2, 3, 5])
def test_contributions_of_micro_batches_are_added_up(micro_batches: int) -> None:
    @tf.function(autograph=False)
    def run() -> PackedContribution:
        total, layout = accumulate(run_directly, micro_batches, contribute)
        assert layout is LAYOUT
        return total

    total = run()
    numbers = np.arange(micro_batches)
    dense, sparse = total.buckets
    assert isinstance(dense, tf.Tensor)
    assert total.loss["a"] == numbers.sum()
    weight = 0.5 * micro_batches + numbers.sum()
    assert dense.numpy().tolist() == [numbers.sum(), micro_batches, weight]
    expected = np.zeros(EMBEDDING_SHAPE)
    for number in numbers:
        expected[: number + 1] += number
    np.testing.assert_array_equal(tf.convert_to_tensor(sparse), expected)
    assert [output.shape for output in total.output] == [(n + 1, 3) for n in numbers]
    assert [rows.numpy().tolist() for rows, _ in total.batch] == [[*range(n + 1)] for n in numbers]


def test_graph_does_not_grow_with_the_micro_batches() -> None:
    """If nothing is listed for each micro-batch, thousands of them are traced quickly."""

    def contribute_dense(index: Any) -> tuple[PackedContribution, Any]:
        contribution, _ = contribute(index)
        dense = contribution.buckets[:1]
        return contribution._replace(buckets=dense, output=[], batch=[]), LAYOUT

    def count_ops(micro_batches: int) -> int:
        with tf.Graph().as_default() as graph:
            accumulate(run_directly, micro_batches, contribute_dense)
        return len(graph.get_operations())

    assert count_ops(1000) == count_ops(2)


def test_pieces_of_micro_batches_are_joined() -> None:
    assert join_pieces([{"x": tf.constant([1])}])["x"].numpy().tolist() == [1]
    joined = join_pieces([{"x": tf.constant([1])}, {"x": tf.constant([2, 3])}])
    assert joined["x"].numpy().tolist() == [1, 2, 3]
    scalars = join_for_host(tf.constant(1.0), tf.constant(2.0))
    assert scalars.numpy().tolist() == [1.0, 2.0]
    ragged = join_for_host(tf.ones([1, 2]), tf.ones([1, 3]))
    assert ragged.shape.as_list() == [2, None]


def test_flags_of_losses_and_gradients() -> None:
    assert are_losses_finite({"a": tf.constant(1.0), "b": tf.constant(2.0)})
    assert not are_losses_finite({"a": tf.constant(1.0), "b": tf.constant(np.inf)})
    assert not are_losses_finite({"a": tf.constant(np.nan)})
    sparse = tf.IndexedSlices(tf.constant([[np.nan]]), tf.constant([0]), tf.constant([1, 1]))
    assert are_numbers([])
    assert are_numbers([tf.constant([1.0, np.inf])])
    assert not are_numbers([tf.constant([1.0]), sparse])


def test_flags_are_true_if_they_are_true_everywhere() -> None:
    true, false = tf.constant(True), tf.constant(False)
    first = Report(true, false, tf.constant([True, True]))
    assert Report.combine([first]).pack().numpy().tolist() == [True, False, True, True]
    second = Report(true, true, tf.constant([True, False]))
    combined = Report.combine([first, second])
    assert combined.pack().numpy().tolist() == [True, False, True, False]
    unpacked = Report.unpack(combined.pack().numpy()[None])
    assert [flags.tolist() for flags in unpacked] == [[True], [False], [[True, False]]]


def test_steps_with_losses_that_are_not_finite_are_counted() -> None:
    rows = np.array([[True, True], [False, True], [True, False], [False, False], [True, True]])

    def note(first: int, end: int) -> NonFinite:
        """Returns the summary of some of the steps 20 to 24."""
        return NonFinite.from_report(Report.unpack(rows[first:end]), last=19 + end)

    assert note(0, 5) == NonFinite(21, 23, 2, zeroed=1)
    assert note(0, 1) == NonFinite(NEVER, 0, 0, 0)
    assert note(2, 3) == NonFinite(zeroed=1)
    assert note(0, 2).merge_later(note(2, 5)) == note(0, 5)
