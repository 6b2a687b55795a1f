"""overfit_batches: the first global batches of a pass, over and over."""

from __future__ import annotations

from tests.golden import small
from tests.helpers.cases import assert_weights
from tests.helpers.fixtures import Train


def test_more_than_there_are_goes_on_into_the_next_pass(train: Train) -> None:
    settings = {"batch_size": small.BATCH, "learning_rate": small.RATE, "virtual_devices": 2}
    state = train(small.hooks(), steps=20, overfit_batches=7, accumulate_steps=2, **settings)
    batches = small.create_dataset(small.BATCH)
    assert_weights(state, small.plain(20, batches=batches.concatenate(batches.take(1))), 1e-5)
