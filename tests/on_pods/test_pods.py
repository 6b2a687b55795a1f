"""launch/kubernetes.yaml: what it says is valid, and its rules bring a run through a loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.golden.compare import assert_same_checkpoint
from tests.helpers.ckpt_files import FAILING, write_hooks
from tests.helpers.rendering import environment, render
from tests.on_pods.pods import Job, missing

__all__ = ["environment", "render"]
STEPS = ("--steps", "600", "--ckpt-every", "100", "--eval-every", "0")


@pytest.fixture(scope="module")
def project(render: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated project with launch/kubernetes.yaml."""
    made = render(tmp_path_factory.mktemp("pods"), launch="kubernetes")
    write_hooks(made, "failing.py", FAILING)
    return made  # type: ignore[no-any-return]


@pytest.fixture
def job(project: Path, tmp_path: Path) -> Iterator[Job]:
    """The manifest's job, with a network for its pods."""
    if lacks := missing():
        pytest.skip(f"no pods here: {lacks}")
    job = Job(project / "launch" / "kubernetes.yaml", project, tmp_path)
    with job.networks():
        yield job


def test_the_manifest_is_valid_and_says_the_same_everywhere(project: Path) -> None:
    documents = list(yaml.safe_load_all((project / "launch/kubernetes.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    job = documents[-1]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    index, place = container["env"]
    place = json.loads(place["value"].replace(f"$({index['name']})", "1"))
    hosts = [f"train-{number}.train:2222" for number in range(job["completions"])]
    assert place == {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": 1}}
    assert job["completions"] == job["parallelism"]
    documents[-1]["spec"]["parallelsim"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[-1], "1.31", strict=True)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_pod_that_is_killed_changes_no_bit(project: Path, job: Job) -> None:
    undisturbed, disturbed = (project / "runs" / name for name in ("undisturbed", "disturbed"))
    assert job.run("--run-name", "undisturbed", *STEPS) == "Complete", job.said()
    assert "cluster: process 1 at train-1.train:2222, of 2" in job.said()
    assert job.restarts == [0, 0]
    seen = disturbed / "ckpt" / "engine" / "ckpt-200.json"
    assert job.run("--run-name", "disturbed", *STEPS, kill_when=seen.exists) == "Complete"
    assert job.restarts == [1, 1], job.said()
    assert_same_checkpoint(disturbed, undisturbed, 600)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_hook_that_fails_ends_the_job(job: Job) -> None:
    arguments = ("--run-name", "fails", "--callbacks", "failing.py", *STEPS)
    assert job.run(*arguments) == "Failed"
    assert "error: at_step[20] (failing.py:" in job.said()
