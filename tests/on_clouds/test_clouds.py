"""The clouds' own packages accept launch/skypilot.yaml and vertex.yaml (``make test-clouds``).

Nothing is started, because no cloud is available here.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.rendering import environment, render

sky = pytest.importorskip("sky")
vertex = pytest.importorskip("google.cloud.aiplatform_v1.types")

__all__ = ["environment", "render"]


@pytest.fixture(params=["auto", "cpu", "gpu"])
def launch(request: Any, render: Any, tmp_path: Path) -> Path:
    """Returns the folder launch/ of a project with the files for all launchers."""
    choices = {"launch": "all", "accelerator": request.param}
    folder = render(tmp_path, project_name="Überlange Project 2", **choices)
    return folder / "launch"  # type: ignore[no-any-return]


def test_skypilot_takes_its_file(launch: Path) -> None:
    """The task uses spot machines and recovers when they are lost. A typo is refused."""
    file = launch / "skypilot.yaml"
    task = sky.Task.from_yaml(str(file))
    (resources,) = task.resources
    assert task.num_nodes == 1
    assert resources.use_spot
    assert resources.job_recovery["recover_on_exit_codes"] == [75]
    assert list(task.storage_mounts) == ["/runs"]
    assert "--runs-dir /runs" in task.run
    wrong = yaml.safe_load(file.read_text())
    wrong["num_node"] = wrong.pop("num_nodes")
    with pytest.raises(sky.exceptions.InvalidSkyPilotConfigError, match="did you mean 'num_nodes'"):
        sky.Task.from_yaml_config(wrong)


def test_skypilot_tells_each_machine_of_the_others(launch: Path) -> None:
    run = yaml.safe_load((launch / "skypilot.yaml").read_text())["run"]
    (launch / "train.sh").write_text("#!/bin/sh\necho $TF_CONFIG\n")
    (launch / "train.sh").chmod(0o755)
    environ = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1"}
    printed = subprocess.check_output(["bash", "-c", run], cwd=launch, env=os.environ | environ)
    hosts = ["10.0.0.1:2222", "10.0.0.2:2222"]
    place = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": 1}}
    assert json.loads(printed) == place


def test_vertex_ai_takes_its_file(launch: Path) -> None:
    """Both worker pools have the same machines, command and storage. A typo is refused."""
    specification = yaml.safe_load((launch / "vertex.yaml").read_text())
    spec = vertex.CustomJobSpec.from_json(json.dumps(specification))
    chief, workers = spec.worker_pool_specs
    assert chief.replica_count == 1
    assert workers.container_spec == chief.container_spec
    assert workers.machine_spec == chief.machine_spec
    assert workers.nfs_mounts == chief.nfs_mounts
    assert f"/mnt/nfs/{chief.nfs_mounts[0].mount_point}" in chief.container_spec.args
    assert spec.scheduling.restart_job_on_worker_restart
    specification["workerPoolSpecs"][0]["replicaCuont"] = specification["workerPoolSpecs"][0].pop(
        "replicaCount"
    )
    with pytest.raises(Exception, match='no field named "replicaCuont"'):
        vertex.CustomJobSpec.from_json(json.dumps(specification))
