"""Whether a position in the data can be saved, and whether a saved one is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.compat import inputs_of
from ctl_core.numerics.randomness import random_ops

# Stages that draw random numbers, others in each pass.
RESHUFFLING = {"_ShuffleDataset", "_ShuffleAndRepeatDataset", "_RandomDataset"}
# Stages that drain the one before them before their own pass ends: TensorFlow leaves the state of
# a drained stage that draws random numbers out of a checkpoint.
_DRAINING = {"_ShuffleDataset", "_ZipDataset", "_ConcatenateDataset"}


# Ops that draw from, or are, a state outside of the pipeline.
_STATEFUL = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless", "RngReadAndSkip"})


def why_not_checkpointable(dataset: tf.data.Dataset) -> str | None:
    """Says why a saved position of this pipeline would not be exact, or returns None.

    TensorFlow refuses to save a stage with outside state, but only while that stage is at work,
    and forgets how often an earlier stage has reshuffled once a later one has drained it. So the
    stages are looked at here, by ``_functions`` too, which has no public form;
    tests/engine/test_inputs.py fails if TensorFlow changes them.
    """

    def search(stage: Any, drained: bool) -> str | None:
        name = type(stage).__name__
        for function in stage._functions():
            if found := random_ops(function.function.graph, _STATEFUL):
                return f"it runs {', '.join(found)}, which has a state of its own"
        if drained and name in RESHUFFLING:
            return (
                "a stage that draws random numbers is followed by a shuffle, zip or concatenate; "
                "with repeat() between the two, it can be"
            )
        if name == "_RepeatDataset" and stage.cardinality() == tf.data.INFINITE_CARDINALITY:
            drained = False
        drained = drained or name in _DRAINING
        return next(filter(None, (search(part, drained) for part in inputs_of(stage))), None)

    return search(dataset, drained=False)


def data_files(prefix: Path) -> list[Path]:
    """Returns the files with the values of a checkpoint that TensorFlow has written."""
    names = os.listdir(prefix.parent)  # pathlib's glob takes five times as long
    return [prefix.with_name(name) for name in names if name.startswith(f"{prefix.name}.data")]
