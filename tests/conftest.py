"""The order of the files: those that take minutes first, or one would run alone at the end.

``make test`` hands whole files to its workers, in this order.
"""

from __future__ import annotations

import pytest

LONGEST = (
    "test_kills.py",
    "test_cluster.py",
    "test_errors.py",
    "test_train_sh.py",
    "test_processes.py",
    "test_launch.py",
    "test_hosts.py",
    "test_numbers.py",
    "test_render.py",
    "test_accumulate.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by file; the rest stays in its order."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
