"""Several processes train as one: real clusters on loopback, against a plain loop and NumPy.

Two clusters are started, once: of two processes with first two devices each and then one, and of
three processes. Each runs several cases (tests/helpers/cluster_program.py), for the starts cost
more than the cases.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import cases
from tests.helpers.fixtures import Train
from tests.helpers.readers import Loader, passes
from tests.helpers.steered import STEERED, steered_hooks

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
InputContext = tf.distribute.InputContext


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
        "weights_on_two_devices",
        "exchanges",
        "weights_of_micro_batches",
        "weights_compiled",
        "weights_of_whole_batches",
        "kept_batches",
        "readers",
        "random_numbers",
        "batch_norm",
        "drift",
        "decisions",
        "not_finite",
        "steered",
        "settings_differ",
        "data_differs",
        "layers_frozen_unalike",
        "hook_state",
        "inner_optimizer",
    )


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cluster(3, tmp_path_factory.mktemp("three"), "weights")


def kept(folder: Path, name: str, processes: int) -> list[dict[str, Any]]:
    """What each process wrote."""
    found = []
    for index in range(processes):
        with np.load(folder / f"{name}-{index}.npz") as file:
            found.append({key: file[key] for key in file.files})
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, list[np.ndarray]]:
    return {kind: cases.by_hand(kind, 40, 24, 0.01) for kind in ("sgd", "nadam")}


def assert_equal_weights(found: Any, plain: Any, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    for weight, reference in zip(found, plain, strict=True):
        np.testing.assert_allclose(weight, reference, rtol=rtol, atol=atol)


def test_readers_in_python_of_two_processes(two: Path) -> None:
    """Global batches shared out, as one process reads them; and parts that the hook takes."""
    for kind, batch_size in (("engine", 24), ("hook", 12)):
        parts = [None] if kind == "engine" else [InputContext(2, index) for index in range(2)]
        streams = [passes(partial(Loader, batch_size, part=part)) for part in parts]
        model = cases.small_model()
        for _ in range(11):
            drawn = [next(b for b in one if len(b[0]) == batch_size) for one in streams]
            inputs, target = (np.concatenate(arrays) for arrays in zip(*drawn, strict=True))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(cases.squared_error((model(inputs), target)))
            found = tape.gradient(loss, model.trainable_variables)
            for gradient, variable in zip(found, model.trainable_variables, strict=True):
                variable.assign_sub(0.01 * gradient)
        for whole, in_parts in zip(
            kept(two, f"readers-{kind}-whole", 2),
            kept(two, f"readers-{kind}-parts", 2),
            strict=True,
        ):
            assert_equal_weights(whole.values(), model.get_weights())
            for name, weight in whole.items():
                np.testing.assert_array_equal(weight, in_parts[name])


@pytest.mark.parametrize("kind", ["sgd", "nadam"])
@pytest.mark.parametrize(("cluster", "name"), [("two", "-on-two"), ("three", "")])
def test_weights_on_several_processes(
    request: pytest.FixtureRequest,
    plain: dict[str, list[np.ndarray]],
    kind: str,
    cluster: str,
    name: str,
) -> None:
    """Those of two processes with a device each are in tests/golden."""
    for values in kept(request.getfixturevalue(cluster), kind + name, 2 + (cluster == "three")):
        assert_equal_weights(values.values(), plain[kind])


@pytest.mark.parametrize("name", ["sgd-accumulated", "sgd-cut", "sgd-compiled", "nadam-compiled"])
def test_micro_batches_cut_batches_and_compiled_steps_of_two_processes(
    two: Path, plain: dict[str, list[np.ndarray]], name: str
) -> None:
    bound = 1e-5 if "compiled" in name else 1e-6
    for values in kept(two, name, 2):
        assert_equal_weights(values.values(), plain[name.split("-")[0]], bound, bound)


def test_hooks_exchange_values_between_processes(two: Path) -> None:
    """In the evaluation, some replicas have no examples left, and each example counts once."""
    weights = cases.exchange_by_hand(6, 24, 0.02).get_weights()
    for kind in ("gather", "merge"):
        for values in kept(two, f"exchange-{kind}", 2):
            assert_equal_weights(values.values(), weights, 1e-5)
    for size in (1, 25):
        expected = cases.exchange_evaluated_by_hand(cases.small_model(), size, 24)
        for values in kept(two, f"exchange-{size}", 2):
            assert values.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(values[name], value, rtol=1e-5, err_msg=name)


def test_a_last_batch_that_one_process_has_no_example_of(train: Train, two: Path) -> None:
    settings = {"steps": None, "epochs": 3, "batch_size": 24, "learning_rate": 0.1}
    expected = train(cases.kept_hooks("plain"), **settings, last_batch="keep")
    for kind in ("engine", "hook"):
        for values in kept(two, f"kept-{kind}", 2):
            assert int(values.pop("examples")) == 75 == expected.progress.examples
            assert_equal_weights(values.values(), expected.train_model.get_weights(), 1e-4, 1e-5)


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


def test_batch_normalisation_has_one_set_of_moving_statistics(two: Path) -> None:
    first, second = kept(two, "batch_norm", 2)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kept-gather", ("last_batch: with keep, replicas may have batches of diff",)),
        ("drift", ("after step 3, sequential", "out/bias", "on all replicas (replica 1 differs")),
        ("stopped", ("the loss of step 3 is not finite",)),
        ("settings", ("learning_rate: not the same on every process",)),
        ("data", ("create_dataset (cases.py:", "different data")),
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
    assert len(list(folder.glob("input-3-*.index"))) == 2


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


def test_only_the_chief_writes(two: Path) -> None:
    run = two / "runs" / "exchange-25"
    assert (run / "train.log").exists() and (run / "worker-1.log").exists()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["split"]) for line in lines] == [(0, "eval")]


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
