"""Describes how the processes of a cluster differ.

A fact is a property that must be the same on all processes before they train together, such as the
version of TensorFlow. ``Cluster.compare`` in sync.py exchanges the facts of all processes.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TypeAlias

from ctl_core.cluster.task import Task
from ctl_core.run.errors import make_line

# The values of facts by name; messages show the names.
Facts: TypeAlias = dict[str, str]

# The maximum number of differences of a process that a message lists.
_MOST_LISTED = 4


def describe_differences(task: Task, tables: Sequence[Facts], absent: str | None) -> str | None:
    """Returns which processes differ, and in which facts; None if no process differs.

    A process differs if its value is not the most frequent one. If there are two processes, process
    1 differs from process 0.

    Args:
        task: this process in its cluster
        tables: the facts of each process
        absent: the value to assume if a process lacks a fact; with None, the fact of this process
            is not compared
    """
    names = dict.fromkeys(name for table in tables for name in table)
    differences: dict[int, list[str]] = collections.defaultdict(list)
    for name in names:
        values = [table.get(name, absent) for table in tables]
        usual = collections.Counter(value for value in values if value is not None).most_common(1)
        for index, value in enumerate(values):
            if value not in (None, usual[0][0]):
                differences[index].append(f"{name} {value} instead of {usual[0][0]}")
    if not differences:
        return None
    descriptions = [
        f"{task.describe(index)} has {_list(differences[index])}" for index in sorted(differences)
    ]
    return make_line("; ".join(descriptions))


def _list(differences: Sequence[str]) -> str:
    """Returns the first differences of a process, and the number of omitted differences."""
    text = ", ".join(differences[:_MOST_LISTED])
    left_out = len(differences) - _MOST_LISTED
    if left_out > 0:
        text += f", and {left_out} more"
    return text
