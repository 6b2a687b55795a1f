"""launch/slurm.sh works on a real Slurm cluster with two local nodes (``make test-slurm``)."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.compare import assert_same_checkpoint, read_checkpoint
from tests.helpers.ckpt_files import (
    FAILING,
    assert_rounded_alike,
    find_training,
    train_here,
    trained_to,
    write_hooks,
)
from tests.helpers.rendering import environment, render
from tests.on_slurm.slurm import Slurm, missing

__all__ = ["environment", "render"]

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no Slurm here: {missing()}")

# The hooks of the digits example, slowed down so that there is time to disturb a run.
SLOW = """

import time

every_steps = {10: lambda: time.sleep(0.1)}
"""
RESUMED = r"resuming at step (\d+)"
STEPS = ("--callbacks", "slow.py", "--steps", "1200", "--ckpt-every", "100", "--eval-every", "0")
SMALL = ("--cpus-per-task=1", "--time=10")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Returns a Slurm cluster with two nodes, each of which accepts one process."""
    started = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def project(render: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a generated project with launch/slurm.sh."""
    folder = render(tmp_path_factory.mktemp("project"), launch="slurm")
    for name, more in (("slow.py", SLOW), ("failing.py", FAILING)):
        write_hooks(folder, name, more)
    return folder  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> Path:
    """Returns the run of two processes without Slurm, and without an interruption."""
    train_here(project, "--run-name", "undisturbed", "--workers", "2", *STEPS)
    return project / "runs" / "undisturbed"


def printed(project: Path, number: str) -> str:
    """Returns the output of the job's script."""
    return (project / f"slurm-{number}.out").read_text()


def test_two_nodes_train_what_one_process_does(project: Path, slurm: Slurm) -> None:
    job = slurm.submit(project, *SMALL, "launch/slurm.sh", "--run-name", "two", "--steps", "60")
    slurm.wait(job)
    log = (project / "runs" / "two" / "slurm.log").read_text()
    assert "cluster: process 0 at node9:" in log
    assert "cluster: process 1 at node10:" in log
    assert log.count("step 60/60  eval: loss") == 1  # printed by one process only
    assert f"job {job} is done" in printed(project, job)
    train_here(project, "--run-name", "one", "--steps", "60")
    assert_rounded_alike(project / "runs" / "two", project / "runs" / "one", 60)


def test_preemption_and_kills_change_no_bit(project: Path, slurm: Slurm, undisturbed: Path) -> None:
    run = project / "runs" / "a"
    job = slurm.submit(project, *SMALL, "launch/slurm.sh", "--run-name", "a", *STEPS)
    trained_to(run, 200)
    os.kill(find_training("a", "SLURM_PROCID=1"), signal.SIGKILL)
    trained_to(run, 500)
    assert slurm.job(job)["Restarts"] == "1"
    urgent = slurm.submit(project, "-N2", "--exclusive", "--wrap", "sleep 2", partition="urgent")
    slurm.wait(urgent)
    assert slurm.wait(job)["Restarts"] == "2"
    assert_same_checkpoint(run, undisturbed, 1200)
    resumed = [int(step) for step in re.findall(RESUMED, log_of(run))]
    assert len(resumed) == 2
    assert resumed[0] % 100 == 0  # the step of the last checkpoint before the kill
    assert log_of(run).count("stopped by SIGTERM, saved") == 1


# The number of threads is fixed, because Slurm may give a process only some of the cores.
LOGICAL = ("--logical-replicas=4", "--intra-op-threads=1")


@pytest.mark.parametrize("logical", [(), LOGICAL], ids=["rounded", "same_bits"])
def test_job_takes_the_nodes_that_are_there(
    project: Path, slurm: Slurm, logical: tuple[str, ...]
) -> None:
    """The job restarts with one node while the other is drained, and with two nodes after that."""
    steps = (*STEPS, "--steps=300", "--ckpt-every=50", *logical)
    name = f"elastic-{len(logical)}"
    run = project / "runs" / name
    settings = ("launch/slurm.sh", "--run-name", name, *steps)
    job = slurm.submit(project, "--nodes=1-2", *SMALL, *settings)
    trained_to(run, 50)
    slurm.call("scontrol", "update", "NodeName=node10", "State=drain", "Reason=test")
    os.kill(find_training(name, "SLURM_PROCID=0"), signal.SIGKILL)
    trained_to(run, 150)
    slurm.call("scontrol", "update", "NodeName=node10", "State=resume")
    slurm.call("scontrol", "requeue", job)
    assert slurm.wait(job)["Restarts"] == "2"
    nodes = re.findall(rf"job {job} on (\S+), start", printed(project, job))
    assert nodes == ["node[9-10]", "node9", "node[9-10]"]
    alone = f"alone-{len(logical)}"
    train_here(project, "--run-name", alone, *steps)
    if logical:
        assert_same_checkpoint(run, project / "runs" / alone, 300)
    else:
        assert_rounded_alike(run, project / "runs" / alone, 300)


def test_a_hook_that_fails_ends_the_job(project: Path, slurm: Slurm) -> None:
    settings = ("--run-name", "fails", "--callbacks", "failing.py", "--steps", "60")
    job = slurm.submit(project, *SMALL, "launch/slurm.sh", *settings)
    description = slurm.wait(job, "FAILED")
    assert (description["Restarts"], description["ExitCode"]) == ("0", "1:0")
    assert "error: at_step[20] (failing.py:" in log_of(project / "runs" / "fails")
    assert "has failed with exit code 1: runs/fails/slurm.log says why" in printed(project, job)


def test_array_of_two_tasks_trains_two_runs(project: Path, slurm: Slurm) -> None:
    """Each task of the array is a run with its own seed, and a killed task restarts by itself."""
    options = ("-N1", "--array=3-4", *SMALL, "launch/slurm.sh", "--run-name", "array")
    job = slurm.submit(project, *options, *STEPS, "--steps", "400")
    trained_to(project / "runs" / "array-4", 100)
    os.kill(find_training("array-4"), signal.SIGKILL)
    for task, restarts in ((3, "0"), (4, "1")):
        assert slurm.wait(f"{job}_{task}")["Restarts"] == restarts
        run = project / "runs" / f"array-{task}"
        assert f"\nseed: {task}\n" in (run / "config.yaml").read_text()
        assert f"job {job}_{task} is done" in printed(project, f"{job}_{task}")
        assert read_checkpoint(run, 400)


def log_of(run: Path) -> str:
    """Returns the output of the processes of a run."""
    log = run / "slurm.log"
    return log.read_text() if log.exists() else ""
