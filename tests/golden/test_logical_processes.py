"""Runs with ``logical_replicas`` on several processes save the bits of a run on one device."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.golden import compare, engine
from tests.golden.logical_cluster import PROGRAMS, train_program

STEPS = 9


class Cluster(NamedTuple):
    """A cluster whose devices have different numbers of logical replicas.

    Attributes:
        name: the prefix of its runs
        processes: the number of processes
        devices: the number of devices per process
        killed: the step after which the runs are killed
        programs: the programs that it trains
    """

    name: str
    processes: int
    devices: int
    killed: int
    programs: tuple[str, ...]


CLUSTERS = (
    Cluster("two_by_two", 2, 2, 3, ("cnn", "all")),
    Cluster("three", 3, 1, 6, ("observed", "compiled")),
)
QUICK = "elements"


def assert_same_run(run: Path, expected: Path, step: int) -> None:
    """Asserts that two runs have saved the same bits at a step, and all the same evaluations."""
    compared = 0
    for subfolder in ("", "engine"):
        saved, others = (read_saved(folder, step, subfolder) for folder in (run, expected))
        assert saved.keys() == others.keys()
        compared += len(saved)
        for key, value in others.items():
            assert saved[key].tobytes() == value.tobytes(), key
    assert compared > 5
    assert list_evaluations(run) == list_evaluations(expected)
    record, expected_record = (
        json.loads((folder / f"ckpt/engine/ckpt-{step}.json").read_text())
        for folder in (run, expected)
    )
    assert record["progress"]["hook_state"] == expected_record["progress"]["hook_state"]
    assert record["generators"] == expected_record["generators"]


def read_saved(run: Path, step: int, subfolder: str) -> dict[str, Any]:
    """Returns the variables of a checkpoint, without the checksum of the data in a cluster."""
    saved = compare.read_checkpoint(run, step, subfolder)
    return {key: value for key, value in saved.items() if "create_dataset.Sdigest" not in key}


def list_evaluations(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    timed = ("time", "seconds", "examples_per_second")
    return [
        {name: line[name] for name in line if name not in timed}
        for line in lines
        if line["split"] == "eval"
    ]


def test_two_processes_end_with_the_bits_of_one_device_and_resumed_on_three(
    tmp_path: Path,
) -> None:
    words = (str(tmp_path), "two", "killed", "1", "3", "4", QUICK)
    engine.run_cluster(tmp_path, "tests.golden.logical_cluster", *words)
    train_program(tmp_path, "one", QUICK, steps=4)
    train_program(tmp_path, "killed", QUICK, steps=4, virtual_devices=3)
    for start in ("two", "killed"):
        assert_same_run(tmp_path / f"{start}-{QUICK}", tmp_path / f"one-{QUICK}", 4)


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of runs on a cluster, on one device, and on two devices.

    The runs on two devices resume from the state that a kill of the cluster would leave.
    """
    folder = tmp_path_factory.mktemp("changing")
    for name, processes, devices, killed, programs in CLUSTERS:
        words = (str(folder), name, "resumed", str(devices), str(killed), str(STEPS), *programs)
        engine.run_cluster(folder, "tests.golden.logical_cluster", *words, processes=processes)
        for program in programs:
            train_program(folder, "one", program, steps=STEPS)
            train_program(folder, "resumed", program, steps=STEPS, virtual_devices=2)
    return folder


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("cluster", "program"),
    [(cluster.name, program) for cluster in CLUSTERS for program in cluster.programs],
)
def test_any_number_of_processes_ends_with_the_same_bits(
    changing: Path, cluster: str, program: str
) -> None:
    """The bits are the same although Adam amplifies differences."""
    log = (changing / f"resumed-{program}" / "train.log").read_text()
    assert "resuming at step" in log
    for start in (cluster, "resumed"):
        assert_same_run(changing / f"{start}-{program}", changing / f"one-{program}", STEPS)


def test_every_program_is_trained() -> None:
    trained = {QUICK, *(program for cluster in CLUSTERS for program in cluster.programs)}
    assert trained == {*PROGRAMS}
