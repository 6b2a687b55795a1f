"""launch/kubernetes.yaml is valid, pods find each other, and exit codes have consequences.

Tests in tests/golden and tests/engine check that the engine ends with these codes, and that runs
resume after them.
"""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.helpers.rendering import Render


@pytest.fixture(scope="module")
def documents(render: Render, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the documents of the manifest by their kinds."""
    project = render(tmp_path_factory.mktemp("pods"), launch="kubernetes")
    manifest: Path = project / "launch" / "kubernetes.yaml"
    return {document["kind"]: document for document in yaml.safe_load_all(manifest.read_text())}


def test_the_manifest_is_valid(documents: dict[str, Any]) -> None:
    for document in documents.values():
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_pods_find_each_other(documents: dict[str, Any]) -> None:
    """Pods use the host names that Kubernetes gives to an Indexed Job behind a Service."""
    name, job = documents["Job"]["metadata"]["name"], documents["Job"]["spec"]
    pod, service = job["template"]["spec"], documents["Service"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    (container,) = pod["containers"]
    index, place = container["env"]
    task = json.loads(place["value"].replace(f"$({index['name']})", "1"))
    hosts = [f"{name}-{number}.{pod['subdomain']}:2222" for number in range(job["completions"])]
    assert task == {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": 1}}
    assert job["completions"] == job["parallelism"] == len(hosts)
    assert job["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never"


def test_mistakes_end_the_job_and_losses_do_not(documents: dict[str, Any]) -> None:
    """Exit codes 1 and 2 mean that a hook or a setting is wrong, so that the job fails.

    After 75 (lost peers), 137 (SIGKILL) and 143 (SIGTERM), a new pod is started.
    """
    rules = documents["Job"]["spec"]["podFailurePolicy"]["rules"]
    train = {"containerName": "train", "operator": "In"}
    for action, codes in (("FailJob", [1, 2]), ("Ignore", [75, 137, 143])):
        assert {"action": action, "onExitCodes": {**train, "values": codes}} in rules
    lost = [{"type": "DisruptionTarget", "status": "True"}]
    assert {"action": "Ignore", "onPodConditions": lost} in rules


def test_a_pod_has_no_more_rights_than_it_needs(documents: dict[str, Any]) -> None:
    pod = documents["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    name, _, tag = container["image"].rpartition(":")
    assert name == "REGISTRY/my_training"
    assert tag not in ("", "latest")


def test_only_the_pods_of_the_job_reach_its_ports(documents: dict[str, Any]) -> None:
    """A policy that selects a pod allows only the connections that it lists."""
    pods = {"matchLabels": documents["Service"]["spec"]["selector"]}
    assert documents["NetworkPolicy"]["spec"] == {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": pods}]}],
    }
