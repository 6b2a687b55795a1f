"""Where a process finds that it is, by its environment; and what is said where that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctl_core.__main__ import main
from ctl_core.cluster.place import find_place
from ctl_core.cluster.slurm import expand_hosts
from ctl_core.errors import SetupError
from ctl_core.settings import Config

HOSTS = ["a:1", "b:2", "c:3"]


def tf_config(job: str, index: int, **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


def vertex(pool: int, index: int) -> dict[str, str]:
    """As Vertex AI describes CLUSTER_SPEC."""
    cluster = {"workerpool0": ["a:1"], "workerpool1": ["b:2", "c:3"], "workerpool3": ["d:4"]}
    task = {"type": f"workerpool{pool}", "index": index, "trial": "TRIAL_ID"}
    whole = {"cluster": cluster, "environment": "cloud", "task": task, "job": "{}"}
    return {"CLUSTER_SPEC": json.dumps(whole)}


def slurm(index: int, node: int, local: int, **more: str) -> dict[str, str]:
    """As srun sets it for job 12, on nodes 9, 10 and 12 with 2, 2 and 1 tasks."""
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_NODELIST": "node[9-10,12]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_PROCID": str(index),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        **more,
    }


def kubernetes(index: int, **more: str) -> dict[str, str]:
    known = {"JOB_COMPLETION_INDEX": str(index), "JOB_SIZE": "2", "HOSTNAME": f"train-{index}"}
    return known | more


def skypilot(rank: int, ips: str = "10.0.0.1\n10.0.0.2") -> dict[str, str]:
    return {
        "SKYPILOT_NODE_IPS": ips,
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }


FIRST = 10_000 + 12 * 97 + 3 * 13
SLURM_ADDRESSES = [f"node{node}:{FIRST + index}" for index, node in enumerate([9, 9, 10, 10, 12])]


@pytest.mark.parametrize(
    ("environ", "kind", "index", "addresses"),
    [
        ({}, "none", 0, []),
        (tf_config("worker", 1, worker=HOSTS), "tf_config", 1, HOSTS),
        (tf_config("worker", 0, chief=["d:4"], worker=HOSTS), "tf_config", 1, ["d:4", *HOSTS]),
        (vertex(0, 0), "tf_config", 0, HOSTS),
        (vertex(1, 1), "tf_config", 2, HOSTS),
        ({"CLUSTER_SPEC": "somebody else's"}, "none", 0, []),
        (slurm(0, 0, 0), "slurm", 0, SLURM_ADDRESSES),
        (slurm(3, 1, 1), "slurm", 3, SLURM_ADDRESSES),
        (slurm(4, 2, 0), "slurm", 4, SLURM_ADDRESSES),
        (slurm(0, 0, 0, SLURM_STEP_NUM_TASKS="1"), "slurm", 0, []),  # of one task
        (slurm(0, 0, 0, SLURM_PTY_PORT="4242"), "none", 0, []),  # srun --pty bash
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "none", 0, []),  # sbatch
        (kubernetes(1), "kubernetes", 1, ["train-0.train:2222", "train-1.train:2222"]),
        (
            kubernetes(0, JOB_SERVICE="net", HOSTNAME="a-b-0"),
            "kubernetes",
            0,
            ["a-b-0.net:2222", "a-b-1.net:2222"],
        ),
        ({"JOB_COMPLETION_INDEX": "3"}, "none", 0, []),  # a sweep
        (skypilot(1), "skypilot", 1, ["10.0.0.1:2222", "10.0.0.2:2222"]),
        (skypilot(0, "fd00::1\nfd00::2\n"), "skypilot", 0, ["[fd00::1]:2222", "[fd00::2]:2222"]),
        (
            skypilot(1) | kubernetes(1),
            "kubernetes",
            1,
            ["train-0.train:2222", "train-1.train:2222"],
        ),
        # A step of one task that was started inside another place is not in the way of that one.
        (slurm(0, 0, 0, SLURM_STEP_NUM_TASKS="1") | skypilot(1), "skypilot", 1, None),
    ],
)
def test_the_place_of_a_process(
    environ: dict[str, str], kind: str, index: int, addresses: list[str] | None
) -> None:
    place = find_place(Config(), environ)
    assert (place.kind, place.task.index) == (kind, index)
    assert addresses is None or list(place.task.addresses) == addresses
    assert place.task.processes == max(1, len(place.task.addresses))
    assert not place.evaluates and place.gpus is None and not place.note


@pytest.mark.parametrize("kind", ["tf_config", "slurm", "kubernetes", "skypilot"])
def test_a_place_that_is_asked_for_has_to_be_there(kind: Any) -> None:
    with pytest.raises(SetupError, match=f"^cluster: {kind} needs .*not in the environment"):
        find_place(Config(cluster=kind), {"TPU_NAME": "local"})


@pytest.mark.parametrize(
    ("gpus", "on_node", "expected"),
    [
        ("0,1,2,3", "4", "2,3"),  # all tasks of the node see all of them
        ("2", "4", None),  # bound by Slurm
        ("2,3", "4", None),
        ("5", None, None),  # by the user
        ("", "4", None),  # to train on the CPU
    ],
)
def test_gpus_that_the_tasks_of_a_node_share(
    gpus: str, on_node: str | None, expected: str | None
) -> None:
    environ = slurm(3, 1, 1, CUDA_VISIBLE_DEVICES=gpus)
    place = find_place(Config(), environ | ({"SLURM_GPUS_ON_NODE": on_node} if on_node else {}))
    assert place.gpus == expected
    if expected:  # read again, with its own part
        again = {"CUDA_VISIBLE_DEVICES": expected, "SLURM_GPUS_ON_NODE": str(on_node)}
        assert find_place(Config(), environ | again).gpus is None


def test_lists_of_hosts() -> None:
    for text, hosts in {
        "a,b-1.cs.org": "a b-1.cs.org",
        "node[9-10,12]": "node9 node10 node12",  # in order, not as texts
        "n[008-010]x": "n008x n009x n010x",
        "rack[1-2]node[3-4]": "rack1node3 rack1node4 rack2node3 rack2node4",
        "a[1,3],b,c[07]": "a1 a3 b c07",
    }.items():
        assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize("environ", [tf_config("evaluator", 0, worker=HOSTS), vertex(3, 0)])
def test_an_evaluator_watches_the_run(
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    called: list[Any] = []

    def evaluate(_: object, config: Config, options: dict[str, Any]) -> None:
        called.append((config.run_name, config.workers, options))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ctl_core.tools.commands.evaluate", evaluate)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    Path("callbacks.py").touch()
    Path("config.yaml").write_text("steps: 3\nwait_for_workers: 1\n")
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("error: run_name: a cluster needs one")
    assert main(["train", "--run-name", "a"]) == 75
    assert "after 1 s, there is no run to evaluate: runs: no run" in capsys.readouterr().err
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text("steps: 3\nworkers: 2\n")
    assert main(["train", "--run-name", "a"]) == 0
    assert called == [("a", 1, {"checkpoint": None, "watch": True})]
    assert "this is its evaluator: evaluate --watch" in capsys.readouterr().out
