"""A resumed run is the run that was never interrupted, bit for bit: separate processes, killed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import make_hooks, norm_model, regression_data
from tests.helpers.fixtures import Train
from tests.helpers.killed import Project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"), steps=100).make()


def when_at(project: Project, run: str, step: int, act: Callable[[], None]) -> None:
    """Waits until the run has reported ``step``, then acts."""
    limit = time.monotonic() + 600
    while not any(line["step"] >= step for line in project.lines(run)):
        assert time.monotonic() < limit, "the run does not get on"
        time.sleep(0.05)
    act()


@pytest.fixture(scope="module")
def whole(project: Project) -> str:
    assert project.start("whole").wait() == 0
    return "whole"


@pytest.mark.slow
def test_two_halves_equal_the_whole(project: Project, whole: str) -> None:
    assert project.start("halves", "--steps", "50").wait() == 0
    path = project.folder / "runs/halves/ckpt/engine/ckpt-50.json"
    halfway = json.loads(path.read_text())
    assert halfway["step"] == 50 and halfway["progress"]["done"] == [30]
    assert project.start("halves").wait() == 0
    # The first half also ends with an evaluation, which the whole has no reason for at step 50.
    expected = project.lines(whole)
    found = [x for x in project.lines("halves") if (x["step"], x["split"]) != (50, "eval")]
    assert found == expected
    assert project.tensors("halves") == project.tensors(whole)


@pytest.mark.slow
def test_killed_and_terminated_equal_the_whole(project: Project, whole: str) -> None:
    for at, number, code in (
        (25, signal.SIGKILL, -signal.SIGKILL),
        (47, signal.SIGTERM, 143),
        (72, signal.SIGINT, 130),
    ):
        process = project.start("killed", "--hparams.pause=0.02")
        when_at(project, "killed", at, partial(process.send_signal, number))
        assert process.wait() == code
    assert project.start("killed").wait() == 0
    assert project.compare("killed", whole) == "26 tensors and 105 lines of metrics"


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
