"""Which files come first, and which are quick.

Whole files are handed to the processes that test: those that take minutes first, or one would run
alone at the end. ``make check`` runs the quick ones, ``make test`` all but those marked ``slow``.
"""

from __future__ import annotations

import pytest

LONGEST = (
    "test_kills.py",
    "test_cluster.py",
    "test_programs.py",
    "test_program_ways.py",
    "test_documents.py",
    "test_reading.py",
    "test_state.py",
    "test_resume.py",
    "test_notebook.py",
    "test_signals.py",
    "test_stderr.py",
    "test_eval_sets.py",
    "test_eval_model.py",
    "test_callbacks_file.py",
    "test_snapshot.py",
    "test_stretches.py",
    "test_precision.py",
    "test_hosts.py",
    "test_freezing.py",
    "test_train_sh.py",
    "test_render.py",
    "test_processes.py",
)
# They start no process, and take less than half a minute of one core each.
QUICK = (
    "test_architecture.py",
    "test_compat.py",
    "test_console.py",
    "test_digits_data.py",
    "test_errors.py",
    "test_hook_state.py",
    "test_losses.py",
    "test_profile.py",
    "test_pythons.py",
    "test_randomness.py",
    "test_rate.py",
    "test_reduction.py",
    "test_settings.py",
    "test_layout.py",
    "test_splits.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by file; the rest stays in its order. Marks what is quick or slow as a whole."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker("slow")
        elif item.path.name in QUICK:
            item.add_marker("quick")
