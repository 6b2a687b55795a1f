"""A supervisor whose workers are a few lines of plain Python."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctl_core.cluster.supervisor import supervise
from tests.helpers import lean

RUN = Path("runs/a")

# What every fake worker begins with. `start` counts from 1; `pids/` has a file per process.
PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from ctl_core.cluster.supervisor import die_with_supervisor

die_with_supervisor()
place = json.loads(os.environ["TF_CONFIG"])
index = place["task"]["index"]
start = len(list(Path("pids").glob(f"{index}-*"))) + 1
(Path("pids") / f"{index}-{os.getpid()}").touch()


def wait_for(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)


"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder, in which workers find the engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", lean.PYTHONPATH)
    for name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pids").mkdir()
    return tmp_path


def fake(body: str) -> list[str]:
    """Returns the command of a worker that does this."""
    Path("fake.py").write_text(PREAMBLE + body)
    return [sys.executable, "fake.py"]


def run(body: str, workers: int = 2, **settings: Any) -> int:
    return supervise(fake(body), RUN, workers, **{"peer_grace": 60, **settings})


def start(body: str, workers: int = 2, **how: Any) -> subprocess.Popen[bytes]:
    """Starts a supervisor of its own process."""
    program = (
        "import sys; from pathlib import Path; from ctl_core.cluster.supervisor import supervise; "
        f"sys.exit(supervise({fake(body)!r}, Path({str(RUN)!r}), {workers}, peer_grace=0.3))"
    )
    return subprocess.Popen([sys.executable, "-c", program], **how)


def log(worker: int) -> str:
    return (RUN / (f"worker-{worker}.log" if worker else "train.log")).read_text()


def pids() -> list[int]:
    return [int(path.name.split("-")[1]) for path in Path("pids").iterdir()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")  # one that nobody waits for is not alive
        return not stat.parents[1].joinpath("self").exists() or (
            stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
        )
    except (ProcessLookupError, FileNotFoundError):
        return False


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)
