"""Decides the order of the test files, and which tests are quick.

Whole files are distributed over the test processes. Files that take minutes come first; otherwise
one of them would run alone at the end. ``make check`` runs the quick tests, and ``make test`` all
tests except those marked ``slow``.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import lean
from tests.helpers.lean import sitecustomize  # noqa: F401  (before this process imports Keras)

LONGEST = """
    test_kills test_logical_replicas test_programs test_check test_processes test_any_batch
    test_documents test_mirror test_readers test_program_extras test_written_defaults test_cluster
    test_hooks test_reduction test_compilation test_logical_limits test_logical_processes
    test_initial_weights test_hidden_state test_mistakes test_downloads test_digits test_optimizers
    test_run_output test_evaluation test_checkpoint test_reading test_runs_in_hooks test_step
    test_runs test_state test_data_hooks test_numbers test_models test_tutorial test_schedule
    test_tfrecords test_load test_files test_detect_anomaly test_text test_render test_notebook
    test_sweep_file test_reported_values test_every_step test_run_files test_cache_files
    test_answers test_signals test_watch test_train_sh test_launch
"""
# The tests of ``make check``, and tests that ``make test`` leaves out, one node id per line.
QUICK = Path(__file__).with_name("quick.txt")
SLOW = Path(__file__).with_name("slow.txt")


@pytest.fixture(scope="session", autouse=True)
def lean_path() -> Iterator[None]:
    """Makes all processes that tests start import fewer modules, as this process does."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(lean.FOLDER), before]))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(autouse=True)
def short_collections() -> Iterator[None]:
    """Exempts the objects that a test leaves behind from garbage collection.

    TensorFlow keeps thousands of objects alive for each training run. The engine collects garbage
    in each run, and would otherwise scan the objects of all previous tests.
    """
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the tests by file, keeps their order within a file, and marks them quick or slow.

    Raises:
        pytest.UsageError: quick.txt or slow.txt names a test that does not exist, or a test is both
            quick and slow.
    """
    rank = {name: number for number, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    quick, slow = read_names(QUICK), read_names(SLOW)
    for item in items:
        if item.get_closest_marker("cluster") or item.nodeid in slow:
            item.add_marker("slow")
        if item.nodeid in quick:
            item.add_marker("quick")
            if item.get_closest_marker("slow"):
                raise pytest.UsageError(f"{QUICK.name}: {item.nodeid} is slow")
    if any("::" in argument for argument in config.args):
        return  # only some tests of a file were collected
    files = {item.nodeid.partition("::")[0] for item in items}
    existing = {item.nodeid for item in items}
    for path, names in ((QUICK, quick), (SLOW, slow)):
        for name in names:
            if name.partition("::")[0] in files and name not in existing:
                raise pytest.UsageError(f"{path.name}: there is no test {name}")


def read_names(path: Path) -> set[str]:
    """Returns the node ids that a file lists."""
    return {line for line in path.read_text().splitlines() if not line.startswith("#")}
