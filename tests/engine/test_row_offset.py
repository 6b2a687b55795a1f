"""Tests of ``ctl.row_offset``, the index of a replica's first row in a gathered tensor."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.cluster.collectives import find_offset_in_share, place_rows
from tests.golden import small
from tests.helpers.cases import make_hooks
from tests.helpers.project import Train

REPLICAS = 3


def find_offsets(rows_of_all: int) -> list[int]:
    """Returns the offsets of three replicas that share ``rows_of_all`` rows."""
    devices = [f"CPU:{index}" for index in range(REPLICAS)]
    strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())

    def on_replica() -> tf.Tensor:
        with place_rows(lambda: find_offset_in_share(0, rows_of_all)):
            return ctl_core.row_offset()

    offsets = strategy.experimental_local_results(strategy.run(on_replica))
    return [int(offset) for offset in offsets]


@pytest.mark.parametrize("rows_of_all", [3, 4, 5, 6, 64])
def test_offsets_follow_the_rows_of_the_replicas_before(rows_of_all: int) -> None:
    shares = np.array_split(np.arange(rows_of_all), REPLICAS)
    assert find_offsets(rows_of_all) == [share[0] for share in shares]


def test_replicas_without_rows_have_a_placeholder_of_one_row() -> None:
    assert find_offsets(2) == [0, 1, 2]


def test_row_offset_of_one_device_is_zero() -> None:
    assert int(ctl_core.row_offset()) == 0
    with place_rows(lambda: tf.constant(5)):
        assert int(ctl_core.row_offset()) == 0


def test_row_offset_outside_of_a_step_is_zero() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    offsets = strategy.experimental_local_results(strategy.run(ctl_core.row_offset))
    assert [int(offset) for offset in offsets] == [0, 0]


@pytest.mark.parametrize(
    ("devices", "offsets"),
    [
        # Two devices have 4 and 3 rows of the first batch, and 1 row each of the second batch.
        *small.slow_but(of=[(1, 0), (2, 4 + 1)]),
        # Three devices have 3, 2 and 2 rows of the first batch, and 1, 1 and 0 of the second batch.
        (3, (3 + 5) + 1),
    ],
)
def test_batches_of_an_evaluation_that_do_not_divide(
    train: Train, devices: int, offsets: int
) -> None:
    """Nine examples are evaluated in batches of seven, so that the last batch has two rows."""

    def find_own_rows(output: Any) -> dict[str, Any]:
        offset = ctl_core.row_offset()
        places = offset + tf.range(tf.shape(output)[0])
        others = tf.gather(ctl_core.all_gather(output), places) - output
        return {"offsets": tf.cast(offset, tf.float32), "errors": tf.abs(others)}

    hooks = make_hooks(
        create_eval_dataset=small.slices(small.data(9)),
        create_metrics=lambda: {"offsets": keras.metrics.Sum(), "errors": keras.metrics.Sum()},
        metric_pre=find_own_rows,
    )
    state = train(hooks, steps=1, eval_batch_size=7, virtual_devices=devices)
    assert state.metrics["offsets"] == offsets
    assert state.metrics["errors"] == 0.0
