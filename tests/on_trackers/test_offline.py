"""Our trackers with their own packages, offline: ``make test-trackers`` installs and runs them.

A run is killed and started again; what each has is read back by its own tool, and compared with
metrics.jsonl.
"""

from __future__ import annotations

import http.server
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ctl_core.run_process import held
from ctl_core.trackers.base import PACKAGES, Status, Tracked, find_tracker
from tests.helpers.project import source_of

ROOT = Path(__file__).parents[2]
HOOKS = """\
import time
from pathlib import Path


def look(step, loss):
    while step == 75 and Path("hold").exists():
        time.sleep(0.05)
    time.sleep(0.04 if Path("hold").exists() else 0)
    odd = {"acc@1 (%)": step} if step == 9 else {}
    ctl_core.report(step, loss=loss if step != 7 else float("nan"), **odd)


def draw(step):
    ctl_core.image(step, "made", np.full((8, 8, 3), step % 256, np.uint8))


every_steps = {1: look, 25: draw}


def create_eval_dataset(per_replica_batch_size):
    return data.batch(per_replica_batch_size)
"""
STEPS = 100
TRAIN = f"train --run-name a --steps {STEPS} --ckpt-every 40 --eval-every 20 --batch-size 8".split()
# Of a tracker: (name, step, value), in the order of the steps; and (name, step) of pictures.
Found = tuple[list[tuple[str, int, float]], list[tuple[str, int]]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that trains for seconds, whose trackers stay on this machine."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "callbacks.py").write_text(source_of(every_steps=HOOKS))
    for name, value in {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "COMET_START_ONLINE": "0",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }.items():
        monkeypatch.setenv(name, value)
    return folder


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ctl_core", *words]
    with Path("output.log").open("a") as out:
        return subprocess.Popen(command, text=True, stdout=out, stderr=subprocess.STDOUT)


def run(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ctl_core", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines() -> list[dict[str, Any]]:
    path = Path("runs/a/metrics.jsonl")
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def truth() -> list[tuple[str, int, float]]:
    """What metrics.jsonl has, as trackers name it."""
    found = []
    for line in lines():
        step, split = line.pop("step"), line.pop("split")
        for name, value in line.items():
            found.append((f"{split}/{name}", step, math.nan if value is None else value))
    return sorted(found)


def until(condition: Callable[[], Any], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, Path("output.log").read_text()
        time.sleep(0.05)


def senders() -> list[Any]:
    """The processes that send this project's run, and theirs."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if "ctl_core.trackers.follow" in words and process.info["cwd"] == os.getcwd():
            found += [process, *process.children(recursive=True)]
    return found


def of_wandb() -> Found:
    """Of one id, from all folders that were written."""
    values, pictures = [], []
    files = sorted(Path("runs/a/trackers/wandb").glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1
    for file in files:
        command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json"]
        text = subprocess.check_output([*command, str(file)], text=True, stderr=subprocess.DEVNULL)
        for record in map(json.loads, text.splitlines()):
            item = record.get("history", {}).get("item", {}) if "history" in record else {}
            for name, value in item.items():
                if name.startswith(("train/made",)):
                    pictures.append((name.split(".")[0], int(item["_step"])))
                elif not name.startswith("_"):
                    values.append((name, int(item["_step"]), float(value)))
    return values, sorted(set(pictures))


def of_mlflow() -> Found:
    from mlflow import MlflowClient

    client = MlflowClient("sqlite:///runs/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "project"]
    (one,) = client.search_runs([experiment.experiment_id])
    assert one.info.status == "FINISHED" and one.data.params["hparams"] == "{}"
    assert one.data.tags["mlflow.note.content"] == "goes well"
    assert one.data.params["steps"] == str(STEPS) and one.data.tags["env.host"]
    assert one.data.metrics["final/loss"] == lines()[-1]["loss"]
    values = [
        (metric.key, metric.step, metric.value)
        for name in one.data.metrics
        if not name.startswith("final/")
        for metric in client.get_metric_history(one.info.run_id, name)
    ]
    files = client.list_artifacts(one.info.run_id, "pictures/train/made")
    return values, [("train/made", int(Path(file.path).stem)) for file in files]


def of_comet() -> Found:
    values, pictures = [], []
    keys = set()
    for file in Path("runs/a/trackers/comet").glob("*.zip"):
        with zipfile.ZipFile(file) as archive:
            keys.add(json.loads(archive.read("experiment.json"))["offline_id"])
            for line in archive.read("messages.json").decode().splitlines():
                message = json.loads(line)["payload"]
                metric = message.get("metric") or {}
                if metric.get("metricName", "").startswith(("train/", "eval/", "progress/")):
                    value = float(metric["metricValue"])
                    values.append((metric["metricName"], metric["step"], value))
                elif message.get("upload_type") == "visualization":
                    about = message["additional_params"]
                    pictures.append((about["figName"], about["step"]))
    assert len(keys) == 1
    return values, sorted(pictures)


def of_trackio() -> Found:
    def get(*words: str) -> Any:
        tool = str(Path(sys.executable).with_name("trackio"))
        return json.loads(subprocess.check_output([tool, *words, "--json"], text=True))

    there = ("--project", "project", "--run", "a")
    names = get("list", "metrics", *there)["metrics"]
    values, pictures = [], []
    for name in names:
        for point in get("get", "metric", *there, "--metric", name)["values"]:
            if name == "train/made":
                pictures.append((name, point["step"]))
            elif not name.startswith("final/"):
                values.append((name, point["step"], float(point["value"])))
    return values, pictures


FIND: dict[str, Callable[[], Found]] = {
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "comet": of_comet,
    "trackio": of_trackio,
}


def same(name: str) -> None:
    """Checks that a tracker has what metrics.jsonl has, each value once; and the pictures."""
    values, pictures = FIND[name]()
    progress = [(one, step) for one, step, _ in values if one.startswith("progress/")]
    values = [value for value in values if not value[0].startswith("progress/")]
    assert ("progress/learning_rate", 1) in progress
    assert len(set(progress)) == len(progress)
    expected = truth()
    assert len(expected) == STEPS + 6
    if name == "mlflow":
        expected = sorted((re.sub("[@(%)]", "_", key), step, x) for key, step, x in expected)
    assert sorted((name, step) for name, step, _ in values) == [e[:2] for e in expected]
    by_name = {(name, step): value for name, step, value in values}
    for key, step, value in expected:
        assert by_name[key, step] == value or (math.isnan(value) and step == 7), (key, step)
    assert pictures == [("train/made", step) for step in range(25, STEPS + 1, 25)]


@pytest.fixture(params=list(FIND))
def tracker(request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.param)
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    yield name


@pytest.mark.parametrize("everything", [False, True], ids=["training", "everything"])
def test_a_run_that_is_killed_goes_on_in_the_same_place(
    project: Path, tracker: str, everything: bool
) -> None:
    """Killed beyond the checkpoint of step 40: the training alone, or with it what sends."""
    Path("hold").touch()
    words = [*TRAIN, "--trackers", tracker, "--note", "goes well"]
    process = start(*words)
    until(lambda: any(line["step"] > 45 for line in lines()) or process.poll() is not None)
    time.sleep(1.5)  # let it come to the tracker
    others = senders()
    os.kill(process.pid, signal.SIGKILL)
    for other in others if everything else ():
        other.kill()
    process.wait()
    assert 45 < max(line["step"] for line in lines()) <= 75
    Path("hold").unlink()
    until(lambda: not held(project / "runs" / "a"))
    output = run(*words)
    assert "resuming at step 40" in output and "warning" not in output, output
    until(lambda: not senders())
    same(tracker)


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_takes_other_settings_and_all_names(project: Path) -> None:
    """Its own rule, which tests/engine/test_trackers.py has by a stand-in."""
    from mlflow import MlflowClient

    folder = project / "runs" / "a"
    folder.mkdir(parents=True)
    names = ("loss (train)", "acc@1", "acc#1", "a//b", "..", "x" * 300, "/y/", "größe")
    for step, id in ((0, None), (300, "")):
        client = MlflowClient(f"sqlite:///{project}/runs/mlflow.db")
        found = None if id is None else client.search_runs(["1"])[0].info.run_id
        tracker: Any = find_tracker("mlflow")
        settings = {"steps": step + 300, "hparams": dict.fromkeys(names, 1)}
        run_there = Tracked("a", folder, "p", found, False, step, "", {"a+b": 1})
        tracker.start(settings, run_there)
        tracker.log(step, "train", dict.fromkeys(names, 1.0))
        tracker.flush()
        for name in names:
            tracker.image(step, f"train/{name}", b"png")
        tracker.finish(Status("done", "", step, {}))
        assert tracker.missed == ""
    (one,) = client.search_runs(["1"])
    assert one.info.status == "FINISHED" and one.data.tags["steps at 300"] == "600"
    assert len(one.data.metrics) == len(names) and len(one.data.params) == len(names) + 1


class Denying(http.server.BaseHTTPRequestHandler):
    """A service that takes no key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        answer = {"error_code": "UNAUTHENTICATED", "errors": [{"message": "no such key"}]}
        text = json.dumps(answer | {"code": 401, "msg": "no such key"}).encode()
        self.send_response(401)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


def test_a_wrong_key_is_refused_and_a_service_that_is_away_is_a_warning(
    project: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a key is asked for at the start: Trackio finds out later."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Denying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        for name, value in {
            "WANDB_MODE": "online",
            "WANDB_BASE_URL": url,
            "WANDB_API_KEY": "0123456789" * 4,
            "COMET_START_ONLINE": "1",
            "COMET_URL_OVERRIDE": f"{url}/",
            "COMET_API_KEY": "0123456789" * 3,
            "MLFLOW_TRACKING_URI": url,
            "TRACKIO_SERVER_URL": url,
        }.items():
            monkeypatch.setenv(name, value)
        words = ["train", "--run-name", "a", "--steps", "10", "--batch-size", "8"]
        words += ["--trackers", tracker]
        said = run(*words, code=2)
        server.shutdown()
    assert said.startswith(f"error: trackers: {tracker}: ") and said.count("\n") == 1, said
    assert not Path("runs/a/metrics.jsonl").exists()
    if tracker == "mlflow":  # the others take longer to find out
        said = run(*words)
        assert said.count("warning: mlflow") == 2 and "sends the rest" in said, said


def test_a_run_is_logged_afterwards(project: Path, tracker: str) -> None:
    run(*TRAIN, "--note", "goes well")
    output = run("track", "--to", tracker)
    assert output.endswith(f"{tracker}: {STEPS + 5} lines and 4 pictures sent.\n")
    same(tracker)
    assert "has everything already" in run("track", "--to", tracker)
    same(tracker)
