"""Whether a position in the data can be saved, and whether a saved one is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.compat import inputs_of
from ctl_core.numerics.randomness import random_ops
from ctl_core.pipeline import RESHUFFLING, Pipeline

# Stages that drain the one before them before their own pass ends: TensorFlow leaves the state of
# a drained stage that draws random numbers out of a checkpoint.
_DRAINING = {"_ShuffleDataset", "_ZipDataset", "_ConcatenateDataset"}


# Ops that draw from, or are, a state outside of the pipeline.
_STATEFUL = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless", "RngReadAndSkip"})


def why_not_saved(pipeline: Pipeline, overfit_batches: int) -> str | None:
    """Says why a saved position in what the hooks made would not be exact, or returns None."""
    if pipeline.stream is not None:
        return "overfit_batches keeps batches" if overfit_batches else pipeline.stream.why_not
    if pipeline.reader is not None:
        return "make_batches changes what a reader gives; batch and change it in the reader"
    return why_not_checkpointable(pipeline.dataset.repeat())


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


def holds_shuffles(position: Path, dataset: tf.data.Dataset) -> bool:
    """Whether a saved position holds the state of each shuffle of a dataset, so that it is exact.

    TensorFlow leaves out a shuffle that has been read to its end while a stage behind it, such as
    prefetch or a map that runs ahead, still holds elements; restored, it would begin with the
    order of the first pass again. So it is with a cache in memory, which then fills itself anew;
    what is in a cache is not shuffled again.

    The names of stages and of their states in the file are TensorFlow's own;
    tests/engine/test_inputs.py fails if they change.
    """

    def count(stage: Any) -> int:
        shuffles = sum(map(count, inputs_of(stage)))
        if type(stage).__name__ == "CacheDataset":
            return min(shuffles, 1) if stage._filename == "" else 0
        return shuffles + (type(stage).__name__ == "_ShuffleDataset")

    wanted = count(dataset)
    files = data_files(position) if wanted else ()
    content = b"".join(file.read_bytes() for file in files)
    return sum(map(content.count, (b"epoch_num_random_samples", b"cache_completed"))) >= wanted


def data_files(prefix: Path) -> list[Path]:
    """Returns the files with the values of a checkpoint that TensorFlow has written."""
    names = os.listdir(prefix.parent)  # pathlib's glob takes five times as long
    return [prefix.with_name(name) for name in names if name.startswith(f"{prefix.name}.data")]
