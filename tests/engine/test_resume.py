"""A resumed run is the run that was never interrupted, bit for bit: separate processes, killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import make_hooks, norm_model, regression_data
from tests.helpers.fixtures import Train
from tests.helpers.killed import Project


@pytest.mark.slow
def test_two_halves_equal_the_whole(tmp_path: Path) -> None:
    project = Project(tmp_path, steps=100).make()
    assert project.start("whole").wait() == 0
    assert project.start("halves", "--steps", "50").wait() == 0
    assert project.start("halves").wait() == 0
    # The first half also ends with an evaluation, which the whole has no reason for at step 50.
    expected = project.lines("whole")
    found = [x for x in project.lines("halves") if (x["step"], x["split"]) != (50, "eval")]
    assert found == expected
    assert project.tensors("halves") == project.tensors("whole")


def test_an_extra_checkpoint_changes_no_bit_of_batch_statistics(train: Train) -> None:
    """Each replica goes on with its own moving statistics, not with their mean."""

    def trained(name: str, *cuts: int) -> list[np.ndarray]:
        hooks = make_hooks(create_dataset=unbatched_shuffle, create_model=norm_model)
        for steps in cuts:
            state = train(hooks, steps=steps, virtual_devices=2, run_name=name, ckpt_every=8)
        return state.train_model.get_weights()  # type: ignore[no-any-return]

    for one, other in zip(trained("whole", 17), trained("parts", 5, 11, 17), strict=True):
        np.testing.assert_array_equal(one, other)


def unbatched_shuffle(per_replica_batch_size: int) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(regression_data())
    return dataset.shuffle(40, seed=3).batch(per_replica_batch_size)


def test_a_changed_learning_rate_replaces_the_one_in_the_checkpoint(train: Train) -> None:
    assert float(train(make_hooks(), steps=2, learning_rate=0.01).lr) == pytest.approx(0.01)
    assert float(train(make_hooks(), steps=4, learning_rate=0.01).lr) == pytest.approx(0.01)
    assert float(train(make_hooks(), steps=6, learning_rate=0.5).lr) == pytest.approx(0.5)
