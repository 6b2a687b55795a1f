"""launch/ray_job.py on a real Ray of two nodes here: ``make test-ray`` installs Ray and runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctl_core.run_state.record import saved_steps
from tests.helpers.ckpt_files import (
    assert_rounded_alike,
    assert_same_bits,
    train_here,
    trained_to,
    weights,
)
from tests.helpers.rendering import environment, render

psutil = pytest.importorskip("psutil")
cluster_utils = pytest.importorskip("ray.cluster_utils")

__all__ = ["environment", "render"]

Job = Callable[..., "subprocess.Popen[str]"]
FAILING = """

def fail(step):
    raise ValueError("a hook that fails")


at_step = {20: fail}
"""
SEARCH = """
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from launch.ray_job import train


def trial(config):
    rate = config["learning_rate"]
    settings = ["--run-name", f"rate-{rate}", "--steps", "20", "--learning-rate", str(rate)]
    train(settings, cpus_per_worker=0.5, callbacks=[TuneReportCallback()])


results = tune.Tuner(
    tune.with_resources(trial, {"CPU": 0.1}),
    param_space={"learning_rate": tune.grid_search([1e-6, 1e-4, 1e-3, 1e-2])},
    tune_config=tune.TuneConfig(max_concurrent_trials=2),
).fit()
best = results.get_best_result("eval_loss", "min")
print("best:", best.config["learning_rate"], len(results))
"""


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


def workers_of(name: str) -> list[Any]:
    """The processes that train a run, by their rank."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "ctl_core" in words and name in words:
            found.append(process)
    return sorted(found, key=lambda one: one.environ()["TF_CONFIG"].split("index")[-1])


STEPS = ("--steps", "1500", "--ckpt-every", "100", "--eval-every", "0")


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> dict[str, np.ndarray]:
    """What a cluster of two processes trains without Ray, and without a loss."""
    train_here(project, "--run-name", "undisturbed", "--workers", "2", *STEPS)
    return weights(project / "runs" / "undisturbed", 1500)


def test_two_workers_train_what_one_process_does(project: Path, job: Job) -> None:
    said = ended(job("--run-name", "two", "--steps", "60"))
    assert "2 replicas" in said and "  eval_accuracy 0." in said
    assert said.count("step 60/60  loss") == 1  # of one worker, once
    train_here(project, "--run-name", "one", "--steps", "60")
    found, expected = (weights(project / "runs" / name, 60) for name in ("two", "one"))
    assert_rounded_alike(found, expected)


def test_a_worker_that_is_killed_changes_no_bit(
    project: Path, job: Job, undisturbed: dict[str, np.ndarray]
) -> None:
    process = job("--run-name", "killed", *STEPS)
    trained_to(project / "runs" / "killed", 300)
    workers_of("killed")[1].kill()
    ended(process)
    found = weights(project / "runs" / "killed", 1500)
    assert_same_bits(found, undisturbed)


def test_a_node_that_is_lost_changes_no_bit(
    project: Path, job: Job, cluster: Any, undisturbed: dict[str, np.ndarray]
) -> None:
    process = job("--run-name", "node", *STEPS)
    trained_to(project / "runs" / "node", 300)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    cluster.add_node(num_cpus=1)
    ended(process)
    found = weights(project / "runs" / "node", 1500)
    assert_same_bits(found, undisturbed)


def test_ctrl_c_lets_the_workers_save(project: Path, job: Job) -> None:
    process = job("--run-name", "stopped", *STEPS)
    trained_to(project / "runs" / "stopped", 300)
    process.send_signal(signal.SIGINT)
    said = ended(process, code=130)
    found = re.search(r"stopped by SIGINT, saved; .*: step (\d+); ", said)
    assert found, said
    assert saved_steps(project / "runs" / "stopped" / "ckpt" / "engine")[0] == int(found[1])


def test_a_hook_that_fails_ends_the_job_and_is_not_tried_again(project: Path, job: Job) -> None:
    (project / "failing.py").write_text((project / "callbacks.py").read_text() + FAILING)
    said = ended(job("--run-name", "fails", "--callbacks", "failing.py", "--steps", "60"), code=1)
    assert "error: at_step[20] (failing.py:" in said
    assert said.count("training, to step 60") == 1


def test_a_wrong_setting_is_one_line_before_anything_starts(job: Job) -> None:
    process = job("--run-name", "wrong", "--step", "60")
    said = ended(process, code=2)
    assert [line for line in said.splitlines() if line.startswith("error: ")] and "--steps" in said


def test_ray_tune_searches(project: Path, cluster: Any) -> None:
    (project / "search.py").write_text(SEARCH)
    variables = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [sys.executable, "search.py"],
        cwd=project,
        env=variables,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert "best: 0.01 4" in done.stdout, done.stdout + done.stderr
