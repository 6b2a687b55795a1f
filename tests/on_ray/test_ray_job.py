"""launch/ray_job.py on a real Ray of two nodes here: ``make test-ray`` installs Ray and runs it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ctl_core.checkpoint.record import list_saved_steps
from tests.golden.compare import assert_same_checkpoint
from tests.helpers.ckpt_files import (
    FAILING,
    assert_rounded_alike,
    find_training,
    train_here,
    trained_to,
    write_hooks,
)
from tests.helpers.rendering import ROOT, environment, render

cluster_utils = pytest.importorskip("ray.cluster_utils")

__all__ = ["environment", "render"]

Job = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def project(render: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated project with launch/ray_job.py."""
    return render(tmp_path_factory.mktemp("ray"), launch="ray")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and two nodes that take one worker each."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()


@pytest.fixture
def job(project: Path, cluster: Any) -> Iterator[Job]:
    """Starts launch/ray_job.py on the cluster."""
    started: list[subprocess.Popen[str]] = []

    def function(*settings: str, workers: int = 2) -> subprocess.Popen[str]:
        command = [sys.executable, "launch/ray_job.py", "--address", cluster.address]
        command += ["--num-workers", str(workers), "--", *settings]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=project, **pipes)  # type: ignore[call-overload]
        started.append(process)
        return process  # type: ignore[no-any-return]

    yield function
    for process in started:
        process.kill()


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """Returns what a job has printed, when it has ended with this exit code."""
    said = process.communicate(timeout=400)[0]
    assert process.returncode == code, said
    return said


STEPS = ("--steps", "1500", "--ckpt-every", "100", "--eval-every", "0")


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> Path:
    """The run of a cluster of two processes without Ray, and without a loss."""
    train_here(project, "--run-name", "undisturbed", "--workers", "2", *STEPS)
    return project / "runs" / "undisturbed"


def test_two_workers_train_what_one_process_does(project: Path, job: Job) -> None:
    said = ended(job("--run-name", "two", "--steps", "60"))
    assert "2 replicas" in said and "  eval_accuracy 0." in said
    assert said.count("step 60/60  loss") == 1  # of one worker, once
    train_here(project, "--run-name", "one", "--steps", "60")
    assert_rounded_alike(project / "runs" / "two", project / "runs" / "one", 60)


def test_a_worker_that_is_killed_changes_no_bit(project: Path, job: Job, undisturbed: Path) -> None:
    process = job("--run-name", "killed", *STEPS)
    trained_to(project / "runs" / "killed", 300)
    os.kill(find_training("killed"), signal.SIGKILL)
    ended(process)
    assert_same_checkpoint(project / "runs" / "killed", undisturbed, 1500)


def test_a_node_that_is_lost_changes_no_bit(
    project: Path, job: Job, cluster: Any, undisturbed: Path
) -> None:
    process = job("--run-name", "node", *STEPS)
    trained_to(project / "runs" / "node", 300)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    cluster.add_node(num_cpus=1)
    ended(process)
    assert_same_checkpoint(project / "runs" / "node", undisturbed, 1500)


def test_ctrl_c_lets_the_workers_save(project: Path, job: Job) -> None:
    process = job("--run-name", "stopped", *STEPS)
    trained_to(project / "runs" / "stopped", 300)
    process.send_signal(signal.SIGINT)
    said = ended(process, code=130)
    found = re.search(r"stopped by SIGINT, saved; .*: step (\d+); ", said)
    assert found, said
    assert list_saved_steps(project / "runs" / "stopped" / "ckpt")[0] == int(found[1])


def test_a_hook_that_fails_ends_the_job_and_is_not_tried_again(project: Path, job: Job) -> None:
    write_hooks(project, "failing.py", FAILING)
    said = ended(job("--run-name", "fails", "--callbacks", "failing.py", "--steps", "60"), code=1)
    assert "error: at_step[20] (failing.py:" in said
    assert said.count("training, to step 60") == 1


def test_ray_tune_searches(project: Path, cluster: Any) -> None:
    """By the file that docs/clusters.md shows, with fewer steps and cores."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.S)
    (search,) = (code for code in found if "tune.Tuner" in code)
    search = search.replace('"300"', '"20"').replace("num_workers=1", "cpus_per_worker=0.5")
    (project / "search.py").write_text(search)
    variables = {**os.environ, "RAY_ADDRESS": cluster.address}
    said = subprocess.check_output(
        [sys.executable, "search.py"], cwd=project, env=variables, text=True, timeout=500
    )
    assert "{'learning_rate': 0.01}" in said, said
