"""Tests of two processes that train together: exchanged decisions and required agreement.

One cluster runs all cases of tests/helpers/cluster_program.py, because starting a cluster takes
longer than a case. The weights of programs on two processes are compared in tests/golden.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.cluster.facts import describe_differences
from ctl_core.cluster.supervisor import find_free_ports
from ctl_core.cluster.task import Task
from ctl_core.run.settings import Config
from ctl_core.session.facts import compare_processes
from tests.golden import engine, small
from tests.helpers import lean

pytestmark = pytest.mark.cluster

CASES = """
    terminated_while_joining random_numbers drift decisions not_finite settings_differ
    kernels_differ data_differs rows_differ programs_differ folders_differ layers_frozen_unalike
    hook_state variables_differ
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that contains the results of two processes that ran all cases."""
    folder = tmp_path_factory.mktemp("two")
    engine.run_cluster(folder, "tests.helpers.cluster_program", str(folder), *CASES.split())
    return folder


def kept(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns the arrays that each process has saved under a name."""
    files = [np.load(folder / f"{name}-{index}.npz") for index in range(2)]
    return [{key: file[key] for key in file.files} for file in files]


def test_random_layers_differ_between_processes_and_go_on_after_a_resume(two: Path) -> None:
    whole, resumed = (
        [arrays["seen"] for arrays in kept(two, f"dropout-{name}")] for name in ("whole", "parts")
    )
    assert (whole[0] != whole[1]).any()
    for expected, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(expected, other)
        assert (expected[0] != expected[1]).any(), "a step must not repeat the one before"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("drift", ("after step 3, sequential", "out/bias", "between replicas 0 and 1")),
        ("stopped", ("the loss of step 3 is not finite",)),
        ("settings", ("the settings differ between the processes", "has learning_rate 0.2")),
        ("kernels", ("the processes choose different", "has TF_ENABLE_ONEDNN_OPTS '0' instead of")),
        (
            "activation",
            ("the forward pass is not the same", "op Relu of create_model (cluster_program.py:"),
        ),
        (
            "loss",
            ("the forward pass is not the same", "op Const 2.0 of cluster_program.py:"),
        ),
        ("optimizer", ("the processes", "has the optimizer's momentum 0.6 instead of 0.5;")),
        ("hooks", ("the processes of the cluster differ: process 1 at", "has callbacks.py")),
        (
            "module",
            ("the processes of the cluster differ", "has helper_of_a_project.py sha"),
        ),
        ("data", ("create_dataset (small.py:", "different data")),
        ("rows", ("create_dataset (small.py:", "different data")),
        ("later", ("create_dataset (small.py:", "different data")),
        ("fewer", ("create_dataset (small.py:", "different data")),
        ("evaluated", ("create_eval_dataset (small.py:", "different data")),
        ("exchanged", ("create_eval_dataset (small.py:", "different data")),
        ("apart", ("runs_dir: ", "contains different checkpoints on another process")),
        ("written", ("logical_replicas: in step 1,", "different values to sequential", "/total")),
        ("frozen", ("after step 2, the frozen layers differ",)),
    ],
)
def test_what_differs_between_processes_or_ends_one_ends_all(
    two: Path, name: str, words: tuple[str, ...]
) -> None:
    for message in (str(values["message"]) for values in kept(two, name)):
        assert message.startswith(words[0])
        for word in words[1:]:
            assert word in message
    saved = {path.name for path in (two / f"runs/{name}/ckpt/engine").glob("*.json")}
    assert saved == ({"ckpt-2.json"} if name == "stopped" else set())


def test_another_number_of_threads_than_the_chiefs_is_refused(tmp_path: Path) -> None:
    """A process must use as many threads as the chief.

    This case has a separate cluster, because TensorFlow sets these numbers when it starts.
    """
    engine.run_cluster(tmp_path, "tests.helpers.cluster_program", str(tmp_path), "threads_differ")
    for message in (str(values["message"]) for values in kept(tmp_path, "threads")):
        assert message.startswith("the processes use different numbers of threads")
        assert "has intra_op_threads 2 instead of 1; " in message
        assert "pass --intra-op-threads N to each process." in message


def test_sigterm_while_tensorflow_joins_the_cluster_stops_the_run(two: Path) -> None:
    """TensorFlow's own handler takes the signal, and ours is installed only after joining."""
    for values in kept(two, "joining"):
        assert values["steps"].tolist() == [0, 4]
        assert values["stopped_by"] == signal.SIGTERM


def test_decisions_of_one_process_hold_on_all(two: Path) -> None:
    for values in kept(two, "decisions"):
        assert int(values["step"]) == int(values["again"]) == 7  # The ended run does not resume.
    folder = two / "runs/decisions/ckpt/engine"
    assert {path.name for path in folder.glob("*.json")} == {"ckpt-3.json", "ckpt-7.json"}
    run = two / "runs" / "decisions"
    assert (run / "train.log").exists()
    assert (run / "worker-1.log").exists()


def test_a_loss_that_one_process_has_is_known_to_all(two: Path) -> None:
    for values in kept(two, "warned"):
        assert values["noted"].tolist() == [3, 4, 2, 1]


def test_hooks_run_in_every_process_and_go_on_with_what_the_chief_kept(two: Path) -> None:
    chief, other = (arrays["seen"].tolist() for arrays in kept(two, "state"))
    assert chief == [[1, -1], [1, 0], [1, 0]]
    assert other == [[0, -1], [0, 1], [0, 0]]


def test_other_numbers_of_devices_are_refused_before_any_collective(tmp_path: Path) -> None:
    """Otherwise, the first collective would fail with a TensorFlow error about group sizes."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    addresses = [f"127.0.0.1:{port}" for port in find_free_ports(2)]
    processes = []
    for index in range(2):
        place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        words = ["--run-name=a", "--steps=2", f"--virtual-devices={1 + index}"]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "ctl_core", "train", *words],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "TF_CONFIG": json.dumps(place),
                    "PYTHONPATH": lean.PYTHONPATH,
                },
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 2
        assert f"process 1 at {addresses[1]} has virtual_devices 2 instead of 1;" in errors


def test_a_setting_of_one_process_does_not_change_the_order_of_comparisons() -> None:
    """Processes that compare something else would take the one for the other."""
    numbers = []
    for config in (Config(steps=1), Config(steps=1, logical_replicas=2)):
        cluster = MagicMock()
        cluster.task.processes = 2
        compare_processes(cluster, tf.distribute.OneDeviceStrategy("CPU:0"), config, None)
        tables = [call.args[0] for call in cluster.compare.call_args_list]
        numbers.append([index for index, table in enumerate(tables) if "batch_size" in table])
    assert numbers == [[1], [1]]


def test_differences_name_the_process_that_is_unlike_the_others() -> None:
    task = Task(3, 0, ("a:1", "b:2", "c:3"))
    usual = {"devices": "2 GPU", "Keras": "3.15", "helper.py": "1"}
    unusual = {"devices": "1 GPU", "Keras": "3.15"}
    assert describe_differences(task, [usual, usual, usual], None) is None
    assert describe_differences(task, [unusual, usual, usual], None) == (
        "process 0 at a:1 has devices 1 GPU instead of 2 GPU"
    )
    assert describe_differences(task, [usual, usual, unusual], "nothing") == (
        "process 2 at c:3 has devices 1 GPU instead of 2 GPU, helper.py nothing instead of 1"
    )
    many = [{str(number): str(index) for number in range(9)} for index in (0, 0, 1)]
    assert str(describe_differences(task, many, None)).endswith("3 1 instead of 0, and 5 more")
