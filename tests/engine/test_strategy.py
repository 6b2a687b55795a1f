"""Which place in a cluster TF_CONFIG gives a process, and what is wrong with it otherwise."""

from __future__ import annotations

import json

import pytest

from ctl_core.config import Config
from ctl_core.errors import SetupError
from ctl_core.strategy import Task, read_task

HOSTS = ["a:1", "b:2", "c:3"]


def task_of(cluster: object, job: str, index: int, **settings: object) -> Task:
    config = Config(run_name="run", **settings)  # type: ignore[arg-type]
    place = {"cluster": cluster, "task": {"type": job, "index": index}}
    return read_task(config, {"TF_CONFIG": json.dumps(place)})


def test_without_tf_config_a_process_is_alone() -> None:
    assert read_task(Config(), {}) == Task(1, 0) and Task().chief
    assert read_task(Config(), {"TF_CONFIG": " "}) == Task(1, 0)


def test_the_first_worker_is_the_chief_unless_there_is_one() -> None:
    assert task_of({"worker": HOSTS}, "worker", 0) == Task(3, 0, ("a:1", "b:2", "c:3"))
    assert task_of({"worker": HOSTS}, "worker", 2) == Task(3, 2, ("a:1", "b:2", "c:3"))
    with_chief = {"worker": HOSTS, "chief": ["d:4"]}
    assert task_of(with_chief, "chief", 0) == Task(4, 0, ("d:4", "a:1", "b:2", "c:3"))
    assert task_of(with_chief, "worker", 0) == Task(4, 1, ("d:4", "a:1", "b:2", "c:3"))


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_other_strategies_leave_tf_config_alone(strategy: str) -> None:
    assert task_of({"worker": HOSTS}, "worker", 1, strategy=strategy) == Task()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "3",
        "{}",
        '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "x"}}',
        '{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}',
    ],
)
def test_a_tf_config_that_names_no_place_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match=r"TF_CONFIG: expected .*got"):
        read_task(Config(run_name="run"), {"TF_CONFIG": text})


def test_a_cluster_needs_a_run_name() -> None:
    place = {"cluster": {"worker": HOSTS}, "task": {"type": "worker", "index": 1}}
    with pytest.raises(SetupError, match="run_name: a cluster needs one"):
        read_task(Config(), {"TF_CONFIG": json.dumps(place)})


def test_multi_worker_needs_tf_config() -> None:
    with pytest.raises(SetupError, match=r"multi_worker needs TF_CONFIG .* --workers K"):
        read_task(Config(strategy="multi_worker"), {})
