"""Each tracker.py works offline with the package of its service (``make test-trackers``).

A run of a rendered project is killed and resumed. The tool of the service then reads the run, which
is compared with metrics.jsonl. docs/experiment-trackers.md describes the results.
"""

import json
import os
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.project import EVALUATED
from tests.helpers.rendering import ROOT, Render, environment, render

__all__ = ["environment", "render"]
HOOKS = """
import time
from pathlib import Path


def look(step, loss):
    ctl_core.report(step, loss=loss if step != 7 else float("nan"))
    while step == 45 and Path("hold").exists():
        Path("held").touch()
        time.sleep(0.1)


every_steps = {1: look}
"""
STEPS, SAVED = 60, 20
TRAIN = f"train --run-name a --steps {STEPS} --ckpt-every {SAVED} --eval-every {SAVED} "
TRAIN += "--batch-size 8 --hparams.width 3"
Rows = Counter[tuple[str, int]]


def rows_of(folder: Path) -> Rows:
    """Returns how often each name and step is in metrics.jsonl, with the names of trackers."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    names = ((line.pop("split"), line.pop("step"), line) for line in lines)
    return Counter((f"{split}/{name}", step) for split, step, line in names for name in line)


def of_wandb(folder: Path, id: str) -> tuple[Rows, bytes]:
    rows, sent = Rows(), b""
    for file in folder.glob(f"wandb/offline-run-*/run-{id}.wandb"):
        tool = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json"]
        for line in subprocess.check_output([*tool, str(file)], text=True).splitlines():
            item = json.loads(line).get("history", {}).get("item", {})
            rows.update((name, int(item["_step"])) for name in item if name[0] != "_")
        sent += file.read_bytes()
    return rows, sent


def of_mlflow(folder: Path, id: str) -> tuple[Rows, bytes]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")
    run = client.get_run(id)
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    metrics = [
        metric for name in run.data.metrics for metric in client.get_metric_history(id, name)
    ]
    database = folder.parent / "mlflow.db"
    return Rows((point.key, point.step) for point in metrics), database.read_bytes()


def of_comet(folder: Path, id: str) -> tuple[Rows, bytes]:
    rows, sent = Rows(), b""
    for file in folder.glob(f"{id}*.zip"):
        with zipfile.ZipFile(file) as archive:
            sent += b"".join(map(archive.read, archive.namelist()))
            for line in archive.read("messages.json").splitlines():
                metric = json.loads(line)["payload"].get("metric") or {"metricName": ""}
                if "/" in metric["metricName"]:  # Comet adds a metric without a slash in its name
                    rows[metric["metricName"], metric["step"]] += 1
    return rows, sent


def of_trackio(_folder: Path, id: str) -> tuple[Rows, bytes]:
    def get(*words: str) -> Any:
        tool = str(Path(sys.executable).with_name("trackio"))
        there = ("--project", "fine", "--run", id, "--json")
        return json.loads(subprocess.check_output([tool, *words, *there], text=True))

    names = get("list", "metrics")["metrics"]
    values = {name: get("get", "metric", "--metric", name)["values"] for name in names}
    sent = Path(os.environ["TRACKIO_DIR"], "fine.db").read_bytes()
    return Rows((name, row["step"]) for name in names for row in values[name]), sent


# For each service: a function that reads a run from it, and whether the service keeps values that
# were logged by a killed process.
SERVICES: dict[str, tuple[Callable[[Path, str], tuple[Rows, bytes]], bool]] = {
    "wandb": (of_wandb, False),
    "mlflow": (of_mlflow, True),
    "comet": (of_comet, False),
    "trackio": (of_trackio, True),
}


@pytest.mark.parametrize("service", SERVICES)
def test_a_run_that_is_killed_goes_on_in_the_same_place(
    service: str, render: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = render(tmp_path, project_slug="fine", example="blank", tracker=service)
    (project / "callbacks.py").write_text(EVALUATED.replace("every_steps = {}\n", HOOKS))
    for name, value in {
        "COMET_START_ONLINE": "0",
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(project), str(ROOT)]),
        "SECRET": "a-secret-word",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_MODE": "offline",
    }.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "ctl_core", *TRAIN.split()]
    folder = project / "runs" / "a"
    (project / "hold").touch()
    process = subprocess.Popen(command, cwd=project)
    while not (project / "held").exists():
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(2)  # lets the tracker log in the background
    process.kill()
    (project / "hold").unlink()
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    assert f"resuming at step {2 * SAVED}" in done.stdout
    assert "warning: listener" not in done.stdout
    read, keeps = SERVICES[service]
    rows, sent = read(folder, (folder / "tracker_id").read_text())
    lines = rows_of(folder)
    assert lines.total() == STEPS + 6
    before = Rows({(name, step): 1 for name, step in lines if step <= 2 * SAVED})
    again = Rows({("train/loss", step): 1 for step in range(2 * SAVED + 1, 46)})
    assert rows == lines + again if keeps else lines - before <= rows <= lines
    assert b"width" in sent
    assert b"a-secret-word" not in sent
    assert b"--eval-every" not in sent
