"""What would make training wait less for its data, where it does."""

from __future__ import annotations

from ctl_core.compat import stages
from ctl_core.pipeline import Pipeline
from ctl_core.profile import Clock

# Of the time of a run that is long enough to tell (seconds).
_SHARE, _LONG = 0.25, 5.0


def advice(clock: Clock, pipeline: Pipeline) -> str | None:
    """Says which one change would help most; None where steps wait for little.

    Args:
        clock: of a run at its end
        pipeline: what it has read
    """
    waited, taken = clock.waited or 0.0, sum(clock.seconds.values())
    if taken < _LONG or waited < _SHARE * taken:
        return None
    start = f"steps waited for their data {waited / taken:.0%} of the time: {pipeline.name}"
    if pipeline.reader is not None:
        return f"{start} is read by one thread of Python; let the reader have threads or processes."
    names = [type(stage).__name__ for stage in stages(pipeline.dataset)]
    if any("Generator" in name or name == "_FlatMapDataset" for name in names):
        return (
            f"{start} reads a generator, or a dataset in a dataset, one after the other; write its "
            "examples to files, say by python -m ctl_core tfrecords."
        )
    for name, words in _ONE_BY_ONE.items():
        if name in names:
            return f"{start} has {words}"
    return (
        f"{start} works in parallel already; prepare its examples beforehand, or cache() them "
        "before what is random."
    )


_ONE_BY_ONE = {
    "_MapDataset": "a map that takes one element after the other; give it "
    "num_parallel_calls=tf.data.AUTOTUNE, which keeps their order.",
    "_InterleaveDataset": "an interleave that reads one file after the other; give it "
    "num_parallel_calls=tf.data.AUTOTUNE, which keeps their order.",
}
