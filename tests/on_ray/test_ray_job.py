"""launch/ray_job.py works on a real Ray cluster with two local nodes (``make test-ray``)."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.compare import assert_same_checkpoint
from tests.helpers.ckpt_files import (
    FAILING,
    assert_rounded_alike,
    find_training,
    train_here,
    trained_to,
    write_hooks,
)
from tests.helpers.rendering import environment, render

cluster_utils = pytest.importorskip("ray.cluster_utils")

__all__ = ["environment", "render"]

Job = Callable[..., "subprocess.Popen[str]"]
STEPS = ("--steps", "1500", "--ckpt-every", "100", "--eval-every", "0")
# The steps are slow, and few enough that rounding errors stay small.
SLOW_STEPS = ("--callbacks", "slow.py", "--steps", "150", "--ckpt-every", "10")
SLOW = """
import time


def wait(step):
    time.sleep(0.1)


every_steps = {1: wait}
"""
# A Ray callback that writes down the metrics that reach Ray.
RECORDER = """
import json
from ray.train.v2._internal.execution.callback import ReportCallback


class Recorder(ReportCallback):
    def after_report(self, training_report, metrics):
        with open("PROJECT/reports", "a") as file:
            file.write(json.dumps(metrics) + "\\n")
"""


@pytest.fixture(scope="module")
def project(render: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a generated project with launch/ray_job.py."""
    folder = render(tmp_path_factory.mktemp("ray"), launch="ray")
    (folder / "launch" / "recorder.py").write_text(RECORDER.replace("PROJECT", str(folder)))
    return folder  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Returns a Ray cluster with a head and two nodes, each of which accepts one worker."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray_cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        ray_cluster.add_node(num_cpus=1)
    ray_cluster.wait_for_nodes()
    yield ray_cluster
    ray_cluster.shutdown()


@pytest.fixture
def job(project: Path, cluster: Any) -> Iterator[Job]:
    """Returns a function that starts launch/ray_job.py on the cluster."""
    started: list[subprocess.Popen[str]] = []

    def function(*settings: str, workers: str = "2") -> subprocess.Popen[str]:
        command = [sys.executable, "launch/ray_job.py", "--num-workers", workers, "--", *settings]
        environ = {**os.environ, "RAY_ADDRESS": cluster.address}
        environ["RAY_TRAIN_CALLBACKS"] = "recorder.Recorder"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=project, env=environ, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield function
    for process in started:
        process.kill()


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """Waits for a job to end with this exit code, and returns its output."""
    printed = process.communicate(timeout=400)[0]
    assert process.returncode == code, printed
    return printed


def test_two_workers_train_what_one_process_does(project: Path, job: Job) -> None:
    printed = ended(job("--run-name", "two", "--steps", "60"))
    assert "2 replicas" in printed
    assert printed.count("step 60/60  eval: loss") == 1
    train_here(project, "--run-name", "one", "--steps", "60")
    assert_rounded_alike(project / "runs" / "two", project / "runs" / "one", 60)
    metrics = (project / "runs" / "two" / "metrics.jsonl").read_text().splitlines()
    (evaluation,) = (line for line in map(json.loads, metrics) if line["split"] == "eval")
    reported = [json.loads(line) for line in (project / "reports").read_text().splitlines()]
    assert reported == [[evaluation, evaluation]]  # each of the two workers reports the evaluation


def test_a_worker_that_is_killed_changes_no_bit(project: Path, job: Job) -> None:
    process = job("--run-name", "killed", *STEPS)
    trained_to(project / "runs" / "killed", 300)
    os.kill(find_training("killed"), signal.SIGKILL)
    ended(process)
    train_here(project, "--run-name", "undisturbed", "--workers", "2", *STEPS)
    runs = project / "runs"
    assert_same_checkpoint(runs / "killed", runs / "undisturbed", 1500)


@pytest.mark.parametrize("logical", [(), ("--logical-replicas=4",)], ids=["rounded", "same_bits"])
def test_a_run_goes_on_with_the_nodes_that_are_left(
    project: Path, job: Job, cluster: Any, logical: tuple[str, ...]
) -> None:
    write_hooks(project, "slow.py", SLOW)
    steps = (*SLOW_STEPS, *logical)
    run = project / "runs" / f"node-{len(logical)}"
    process = job("--run-name", run.name, *steps, workers="1-2")
    trained_to(run, 30)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    trained_to(run, 80)
    cluster.add_node(num_cpus=1)
    printed = ended(process)
    assert re.search("training, to step 150, batch size 64.*, 2 replicas", printed), printed
    assert re.search("resuming at step .*, 1 replica ", printed), printed
    alone = project / "runs" / f"alone-{len(logical)}"
    train_here(project, "--run-name", alone.name, *steps)
    if logical:
        assert_same_checkpoint(run, alone, 150)
    else:
        assert_rounded_alike(run, alone, 150)


def test_a_hook_that_fails_ends_the_job_and_is_not_tried_again(project: Path, job: Job) -> None:
    write_hooks(project, "failing.py", FAILING)
    printed = ended(
        job("--run-name", "fails", "--callbacks", "failing.py", "--steps", "60"), code=1
    )
    assert "error: at_step[20] (failing.py:" in printed
    assert printed.count("training, to step 60") == 1


def test_a_wrong_setting_is_refused_before_any_worker_starts(job: Job) -> None:
    assert "did you mean '--steps'?" in ended(job("--stps", "60"), code=2)
