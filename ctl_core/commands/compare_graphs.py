"""Compares traced graphs op by op, for ``train --check``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf


def describe_op(op: tf.Operation) -> tuple[str, Any]:
    """Returns the type of an op and, if it is a constant, its value."""
    if op.type == "Const":
        return op.type, op.get_attr("value")
    return op.type, None


def describe_with_attributes(op: tf.Operation) -> tuple[str, Any]:
    """Returns the type of an op and its attributes, except those that differ in every trace.

    Functions, for example, get a new name in every trace.
    """
    attributes = {
        name: value.SerializeToString()
        for name, value in op.node_def.attr.items()
        if not (name.startswith("_") or value.HasField("func") or value.list.func)
    }
    return op.type, attributes


def find_difference(
    first: Iterable[tf.Operation],
    second: Iterable[tf.Operation],
    describe: Callable[[tf.Operation], tuple[str, Any]] = describe_op,
) -> tf.Operation | None:
    """Returns the first op that differs between two graphs; None if all ops agree.

    Args:
        first: the ops of one graph, in order
        second: the ops of the other graph, in order
        describe: returns the properties of an op that are compared
    """
    for op, counterpart in itertools.zip_longest(first, second):
        if op is None:
            return counterpart
        if counterpart is None or describe(op) != describe(counterpart):
            return op
    return None
