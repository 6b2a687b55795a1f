"""After ``own_rows``, the processes of a cluster train like one that prepares every example."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ctl_core
from tests.golden import compare, engine
from tests.golden.own_rows import (
    BATCH,
    CASES,
    LAST_SAVED,
    PREPARED_TOGETHER,
    RESUMED,
    STEPS,
    describe,
    train_case,
)

# tf.data may read this many batches ahead.
AHEAD = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the runs on clusters."""
    folder = tmp_path_factory.mktemp("rows")
    for processes in (3, 2):
        runs = [f"whole-{name}" for name, case in CASES.items() if case.processes == processes]
        if processes == 2:
            runs.append(f"killed-{RESUMED}")
        engine.run_cluster(folder, "tests.golden.own_rows", str(folder), *runs, processes=processes)
    return folder


def read_results(folder: Path, run: str) -> list[dict[str, Any]]:
    """Returns the results of each process of a run."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{run}-?.json"))]


def assert_as_in_a_process(results: dict[str, Any], name: str, plain: ctl_core.State) -> None:
    """Asserts that the results of a process of a cluster are those of a single process."""
    weights = [np.array(weight, np.float32) for weight in results["weights"]]
    if CASES[name].is_logical:
        compare.assert_same(weights, plain.train_model.weights)
        assert results["metrics"] == plain.metrics
    else:
        compare.assert_close(weights, plain.train_model.weights)
        assert results["metrics"] == pytest.approx(plain.metrics, rel=1e-5)


@pytest.mark.parametrize("name", ["index", "drop_1"])
def test_a_single_process_reads_as_without_the_mark(tmp_path: Path, name: str) -> None:
    plain, _ = train_case(tmp_path, f"whole-{name}", is_marked=False)
    for run in (f"marked-{name}", f"alone-{name}"):
        marked, _ = train_case(tmp_path, run)
        compare.assert_same(marked.train_model.weights, plain.train_model.weights)


@pytest.mark.cluster
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.processes])
def test_weights_and_bits_are_those_of_one_process(
    trained: Path, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    plain, _ = train_case(tmp_path, f"whole-{name}", is_marked=False)
    assert set(plain.metrics) == ({"loss", "error"} if case.has_evaluation else set())
    all_results = read_results(trained, f"whole-{name}")
    assert len(all_results) == case.processes
    for results in all_results:
        assert_as_in_a_process(results, name, plain)
        # With four logical replicas, one of three processes has half of the rows.
        most = BATCH // 2 if case.is_logical else BATCH // case.processes
        assert 0 < results["prepared"] <= (STEPS + AHEAD) * most + PREPARED_TOGETHER


@pytest.mark.cluster
def test_killed_and_resumed_on_other_numbers_of_processes(trained: Path, tmp_path: Path) -> None:
    """No example of the steps before the kill is prepared again."""
    plain, _ = train_case(tmp_path, f"whole-{RESUMED}", is_marked=False)
    resumed, _ = train_case(trained, f"alone-{RESUMED}")
    assert_as_in_a_process(describe(resumed), RESUMED, plain)
    all_results = read_results(trained, f"killed-{RESUMED}")
    assert len(all_results) == 2
    for results in all_results:
        assert_as_in_a_process(results, RESUMED, plain)
        most = (STEPS - LAST_SAVED + AHEAD) * BATCH / 2 + PREPARED_TOGETHER
        assert 0 < results["prepared"] <= most < STEPS * BATCH
    for run in ("alone", "killed"):
        log = (trained / f"{run}-{RESUMED}/train.log").read_text()
        assert f"resuming at step {LAST_SAVED}" in log
        assert "examples before ctl.data.own_rows; none of them is prepared again" in log
        assert "prepares every example" not in log
