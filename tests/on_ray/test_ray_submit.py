"""``ray job submit`` of launch/ray_job.py, on a real Ray here: it runs in a copy of the project."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ckpt_files import assert_rounded_alike, train_here
from tests.helpers.rendering import environment, render

cluster_utils = pytest.importorskip("ray.cluster_utils")
job_submission = pytest.importorskip("ray.job_submission")

__all__ = ["environment", "render"]


@pytest.fixture
def client() -> Iterator[Any]:
    """What submits jobs to a head with a dashboard. It is the only node.

    Several on one machine would share the folder of the copies, and remove each other's.
    """
    os.environ["RAY_AUTH_MODE"] = "disabled"
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": 0}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    yield job_submission.JobSubmissionClient(f"http://{cluster.webui_url}")
    cluster.shutdown()


def test_a_submitted_job_trains_outside_of_the_copy_that_ray_removes(
    render: Any, client: Any, tmp_path: Path
) -> None:
    project = render(tmp_path / "here", launch="ray")

    def submitted(*settings: str) -> tuple[Any, str]:
        command = " ".join([f"{sys.executable} launch/ray_job.py --num-workers 2 --", *settings])
        environ = {"working_dir": str(project)}
        number = client.submit_job(entrypoint=command, runtime_env=environ)
        while not client.get_job_status(number).is_terminal():
            time.sleep(0.5)
        return client.get_job_status(number), client.get_job_logs(number)

    settings = ("--run-name", "a", "--steps", "60")
    status, said = submitted(*settings)
    assert status == "FAILED" and "error: runs_dir: Ray removes this copy" in said
    status, said = submitted(*settings, "--runs-dir", str(tmp_path / "shared"))
    assert status == "SUCCEEDED", said
    train_here(project, *settings)
    assert_rounded_alike(tmp_path / "shared" / "a", project / "runs" / "a", 60)
