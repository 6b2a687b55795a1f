"""Two processes train as one: what they tell each other, and what must be the same on both.

One cluster is started, and runs all cases (tests/helpers/cluster_program.py), for a start costs
more than a case. Weights of programs on two processes are in tests/golden.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import cases
from tests.helpers.fixtures import Train
from tests.helpers.steered import STEERED, steered_hooks

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_cluster(processes: int, folder: Path, *names: str) -> Path:
    """Runs cases on a cluster, and returns the folder with what they wrote."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(processes)]
    command = [sys.executable, "-m", "tests.helpers.cluster_program", str(folder), *names]
    started = []
    for index in range(processes):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environ = {**os.environ, "TF_CONFIG": json.dumps(task)}
        log = (folder / f"process-{index}.log").open("wb")
        started.append(subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log))
    codes = [process.wait(timeout=1500) for process in started]
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("process-*.log")))
    assert codes == [0] * processes, logs
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cluster(
        2,
        tmp_path_factory.mktemp("two"),
        "random_numbers",
        "drift",
        "decisions",
        "not_finite",
        "steered",
        "settings_differ",
        "data_differs",
        "folders_differ",
        "layers_frozen_unalike",
        "hook_state",
        "inner_optimizer",
    )


def kept(folder: Path, name: str, processes: int) -> list[dict[str, Any]]:
    """What each process wrote."""
    found = []
    for index in range(processes):
        with np.load(folder / f"{name}-{index}.npz") as file:
            found.append({key: file[key] for key in file.files})
    return found


def assert_equal_weights(found: Any, plain: Any, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    for weight, reference in zip(found, plain, strict=True):
        np.testing.assert_allclose(weight, reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", ["dropout", "generator"])
def test_random_layers_differ_between_processes_and_go_on_after_a_resume(
    two: Path, kind: str
) -> None:
    whole, parts = (
        [found["seen"] for found in kept(two, f"{kind}-{name}", 2)] for name in ("whole", "parts")
    )
    assert (whole[0] != whole[1]).any()
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)
        assert (one[0] != one[1]).any(), "a step must not repeat the one before"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("drift", ("after step 3, sequential", "out/bias", "on all replicas (replica 1 differs")),
        ("stopped", ("the loss of step 3 is not finite",)),
        ("settings", ("learning_rate: not the same on every process",)),
        ("data", ("create_dataset (cases.py:", "different data")),
        ("apart", ("runs_dir: ", "has other checkpoints on another process")),
        ("frozen", ("after step 2, the frozen layers differ",)),
    ],
)
def test_what_differs_between_processes_or_ends_one_ends_all(
    two: Path, name: str, words: tuple[str, ...]
) -> None:
    for message in (str(values["message"]) for values in kept(two, name, 2)):
        assert message.startswith(words[0])
        for word in words[1:]:
            assert word in message
    saved = {path.name for path in (two / f"runs/{name}/ckpt/engine").glob("*.json")}
    assert saved == ({"ckpt-2.json"} if name == "stopped" else set())


def test_what_one_process_asks_for_happens_on_all(two: Path) -> None:
    for values in kept(two, "decisions", 2):
        assert int(values["step"]) == int(values["again"]) == 7  # and the run stays ended
    folder = two / "runs/decisions/ckpt/engine"
    assert {path.name for path in folder.glob("*.json")} == {"ckpt-3.json", "ckpt-7.json"}
    run = two / "runs" / "decisions"
    assert (run / "train.log").exists() and (run / "worker-1.log").exists()


def test_a_loss_that_one_process_has_is_known_to_all(two: Path) -> None:
    for values in kept(two, "warned", 2):
        assert values["noted"].tolist() == [3, 4, 2, 1]


def test_what_evaluations_decide_and_what_follows_an_update(train: Train, two: Path) -> None:
    """The same as in one process; there the one that ends training is the only one."""
    hooks = steered_hooks(lambda step: step == 20)
    state = train(hooks, run_name="alone", **{**STEERED, "batch_size": 24})
    assert state.ended and state.step == 20
    for values in kept(two, "steered", 2):
        found = values.pop("found").tolist()
        assert found == [20, 20, *state.hook_state["losses"]]
        assert_equal_weights(values.values(), state.train_model.get_weights())
    folder = two / "runs/steered"
    assert logged(folder) == logged(state.run_dir) and len(logged(folder)) == 9
    saved = [path.name for path in (folder / "ckpt/best/engine").glob("*.json")]
    assert saved == [path.name for path in (state.run_dir / "ckpt/best/engine").glob("*.json")]
    assert {"ckpt-10.json", "ckpt-20.json"} <= {
        path.name for path in (folder / "ckpt/engine").glob("*.json")
    }


def logged(folder: Path) -> list[tuple[int, str, float]]:
    """Evaluations and train metrics, rounded."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        (line["step"], line["split"], round(line.get("mean", line.get("a/loss")), 3))
        for line in lines
    ]


def test_a_hooks_own_optimizer_gets_the_sum_and_the_chief_writes_its_summary(two: Path) -> None:
    target = cases.regression_data()[1][:24]
    for values in kept(two, "inner", 2):
        np.testing.assert_allclose(
            values["value"], 1.0 - 0.1 * target.sum(keepdims=True)[0] / 24, rtol=1e-5
        )
    (file,) = (two / "runs/inner/tb/train").glob("events.out.tfevents.*")
    events = tf.compat.v1.train.summary_iterator(str(file))
    seen = {v.tag: tf.make_ndarray(v.tensor) for event in events for v in event.summary.value}
    np.testing.assert_allclose(seen["seen"], target[:12].sum(), rtol=1e-5)


def test_hooks_run_in_every_process_and_go_on_with_what_the_chief_kept(two: Path) -> None:
    chief, other = (found["seen"].tolist() for found in kept(two, "state", 2))
    assert chief == [[1, -1], [1, 0], [1, 0]]
    assert other == [[0, -1], [0, 1], [0, 0]]
