"""Which files come first, and which are quick.

Whole files are handed to the processes that test: those that take minutes first, or one would run
alone at the end. ``make check`` runs the quick ones, ``make test`` all but those marked ``slow``.
"""

from __future__ import annotations

import pytest

LONGEST = (
    "test_kills.py",
    "test_cluster.py",
    "test_documents.py",
    "test_reading.py",
    "test_errors.py",
    "test_freezing.py",
    "test_signals.py",
    "test_train_sh.py",
    "test_processes.py",
    "test_hosts.py",
    "test_numbers.py",
    "test_render.py",
    "test_accumulate.py",
)
# Less than some ten seconds each, imports aside, and no process of their own.
QUICK = (
    "test_architecture.py",
    "test_compat.py",
    "test_console.py",
    "test_digits_data.py",
    "test_golden.py",
    "test_jit.py",
    "test_pythons.py",
    "test_settings.py",
    "test_settings_of_runs.py",
    "test_settings_refused.py",
    "test_sharing.py",
    "test_strategy.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by file; the rest stays in its order. Marks the quick, and clusters as slow."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker("slow")
        elif item.path.name in QUICK:
            item.add_marker("quick")
