"""What each worker of the command line gets: GPUs, settings, or one line where it cannot start."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ctl_core
from ctl_core.__main__ import main
from ctl_core.cluster import supervisor
from ctl_core.cluster.gpus import share_gpus, visible_gpus
from ctl_core.cluster.supervisor import supervise
from ctl_core.commands import check, use
from ctl_core.errors import SetupError
from ctl_core.settings import Config
from tests.helpers.workers import RUN, fake, folder

__all__ = ["folder"]

PLACE = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")


def test_gpus_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for named, found in {
        "0,1": ["0", "1"],
        " 2 , 3": ["2", "3"],
        "GPU-ab,MIG-cd": ["GPU-ab", "MIG-cd"],
        "1,-1,2": ["1"],
        "": [],
    }.items():
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}) == found
    nvidia_smi(folder, monkeypatch, "echo $1 >asked; echo No devices were found; exit 6")
    assert visible_gpus({}) == []
    assert Path("asked").read_text() == "--list-gpus\n"
    listed = r"GPU 0: A100 (UUID: GPU-1)\n  MIG 1g Device  0: (UUID: MIG-2)\nGPU 1: A100 (U)\n"
    nvidia_smi(folder, monkeypatch, f"printf '{listed}'")
    assert visible_gpus({}) == ["0", "1"]
    monkeypatch.setenv("PATH", str(folder))
    assert visible_gpus({}) == []


def test_gpus_are_shared_out() -> None:
    assert share_gpus(["0", "1", "2", "3"], 2) == ["0,1", "2,3"]
    with pytest.raises(SetupError, match=r"workers: 3 workers cannot share 4 GPUs evenly; take a"):
        share_gpus(["0", "1", "2", "3"], 3)


def test_workers_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match=r"the command line: ./train.sh --workers 2$"):
        ctl_core.train(SimpleNamespace(), Config(steps=1, workers=2))
    monkeypatch.setenv("TF_CONFIG", json.dumps(PLACE))
    with pytest.raises(SetupError, match=r"workers: 2 .* to join the cluster of TF_CONFIG"):
        supervisor.start_cluster([], Config(workers=2, run_name="a"))


@pytest.mark.parametrize(
    ("gpus", "devices", "shares"),
    [(4, 1, ["0,1", "2,3"]), (3, 2, ["", ""])],
)
def test_each_worker_sees_its_gpus(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    devices: int,
    shares: list[str | None],
) -> None:
    nvidia_smi(folder, monkeypatch, "".join(f"echo 'GPU {i}: A100'\n" for i in range(gpus)))
    command = fake(
        "Path(f'gpus-{index}').write_text(json.dumps(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    )
    monkeypatch.setattr(sys, "executable", "unused")
    monkeypatch.setattr(
        supervisor, "supervise", lambda _, *rest, **more: supervise(command, *rest, **more)
    )
    config = Config(workers=2, virtual_devices=devices, run_name="a")
    assert supervisor.start_cluster(["train"], config) == 0
    assert [json.loads(Path(f"gpus-{i}").read_text()) for i in (0, 1)] == shares


def test_a_trained_run_is_used_and_one_checked_in_no_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def evaluate(_: object, config: Config, **_options: object) -> SimpleNamespace:
        assert config.workers == 1 and "TF_CONFIG" not in os.environ
        return SimpleNamespace(diverged=False, stopped_by=None)

    RUN.mkdir(parents=True)
    (RUN / "config.yaml").write_text("steps: 1\nworkers: 3\n")
    Path("callbacks.py").write_text("")
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setattr(use, "evaluate", evaluate)
    assert main(["evaluate", "--run-name", "a"]) == 0
    monkeypatch.setenv("TF_CONFIG", json.dumps(PLACE))
    monkeypatch.setattr(check, "check", evaluate)
    assert main(["train", "--check", "--run-name", "a", "--workers", "2"]) == 0
