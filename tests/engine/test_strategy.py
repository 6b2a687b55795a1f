"""Which place in a cluster TF_CONFIG gives a process, and what is wrong with it otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tensorflow as tf

from ctl_core.cluster.place import read_task
from ctl_core.cluster.strategy import prepare
from ctl_core.cluster.task import Task
from ctl_core.errors import SetupError
from ctl_core.settings import Config

HOSTS = ["a:1", "b:2", "c:3"]


def task_of(cluster: object, job: str, index: int, **settings: object) -> Task:
    config = Config(**{"run_name": "run", "batch_size": 24, **settings})  # type: ignore[arg-type]
    place = {"cluster": cluster, "task": {"type": job, "index": index}}
    return read_task(config, {"TF_CONFIG": json.dumps(place)})


def test_without_tf_config_a_process_is_alone() -> None:
    assert read_task(Config(), {}) == Task(1, 0) and Task().chief
    assert read_task(Config(), {"TF_CONFIG": " "}) == Task(1, 0)


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_other_strategies_leave_tf_config_alone(strategy: str) -> None:
    assert task_of({"worker": HOSTS}, "worker", 1, strategy=strategy) == Task()


@pytest.mark.parametrize(
    ("cluster", "job", "index", "words"),
    [
        # As Estimators had it.
        ({"master": ["m:1"], "worker": HOSTS}, "worker", 0, "has the job 'master', .*'chief'"),
        ({"worker": HOSTS, "ps": ["e:5"]}, "worker", 1, "has the job 'ps', expected 'worker'"),
        ({"worker": HOSTS}, "evaluator", 0, "has the type 'evaluator', which trains nothing"),
        ({"worker": HOSTS}, "worker", 3, "is worker 3, but the cluster has 3 of that type"),
        ({"chief": ["d:4", "e:5"]}, "chief", 1, "2 addresses of a chief, d:4, e:5; expected one"),
        ({"chief": ["b:2"], "worker": HOSTS}, "chief", 0, "'b:2' is the address of 2 processes"),
        ({"worker": ["a:1", "b"]}, "worker", 0, "expected addresses as host:port, got 'b'"),
    ],
)
def test_a_cluster_that_cannot_train_is_refused(
    cluster: object, job: Any, index: int, words: str
) -> None:
    with pytest.raises(SetupError, match=rf"^TF_CONFIG: .*{words}") as told:
        task_of(cluster, job, index)
    assert "\n" not in str(told.value)


def test_a_cluster_of_one_is_one_process() -> None:
    """Whatever its address: nobody is to connect to it."""
    config = Config()
    for job in ("worker", "chief"):
        place = {"cluster": {job: ["here"]}, "task": {"type": job, "index": "0"}}
        assert read_task(config, {"TF_CONFIG": json.dumps(place)}) == Task(1, 0, ("here",))


def test_an_evaluator_beside_the_workers_is_none_of_them() -> None:
    cluster = {"worker": HOSTS, "evaluator": ["e:5"], "ps": []}
    assert task_of(cluster, "worker", 1) == Task(3, 1, ("a:1", "b:2", "c:3"))


def test_a_cluster_needs_a_run_name() -> None:
    place = {"cluster": {"worker": HOSTS}, "task": {"type": "worker", "index": 1}}
    with pytest.raises(SetupError, match="run_name: a cluster needs one"):
        read_task(Config(), {"TF_CONFIG": json.dumps(place)})


def test_multi_worker_needs_tf_config() -> None:
    with pytest.raises(SetupError, match=r"multi_worker needs TF_CONFIG .* --workers K"):
        read_task(Config(strategy="multi_worker"), {})


@pytest.mark.parametrize("limit", [None, 512])
def test_gpu_memory_is_asked_of_tensorflow(
    monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """No GPU is here: what TensorFlow is asked for."""
    asked: list[Any] = []
    gpus = ["gpu 0", "gpu 1"]
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: gpus if kind == "GPU" else []
    )
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, grows: asked.append((gpu, grows))
    )

    def configure(gpu: str, parts: list[Any]) -> None:
        asked.append((gpu, [part.memory_limit for part in parts]))

    monkeypatch.setattr(tf.config, "set_logical_device_configuration", configure)
    prepare(Config(steps=1, gpu_memory_limit=limit))
    assert asked == [(gpu, True if limit is None else [512]) for gpu in gpus]
