"""What is found out about the data before a run reads them: sizes, length, what is left out.

Iterators of one dataset share the state of its shuffles, so a second one would not read what the
first did. Whatever is found out by reading is found out on a pipeline that the run does not read;
inputs.py has the hooks make that one anew.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ctl_core.ahead import without_tuner
from ctl_core.checks.examples import checked_count, examples_in
from ctl_core.cluster.sync import Cluster
from ctl_core.compat import stages
from ctl_core.console import Console
from ctl_core.errors import SetupError, one_line
from ctl_core.hooks import Hook, describe
from ctl_core.pipeline import (
    EMPTY,
    RESHUFFLING,
    Found,
    Pipeline,
    Sizes,
    checked_size,
    elements_together,
    known,
    uneven,
)

# So many elements, or elements of so many steps, are looked at where not all sizes are fixed.
_LOOK = 4


def look(
    pipeline: Pipeline,
    sizes: Sizes,
    cluster: Cluster | None,
    counting: bool,
    console: Console | None,
    keep: bool = False,
) -> Found:
    """Reads some elements, or a whole pass, of a pipeline that the run does not read.

    Args:
        pipeline: which is of no use afterwards
        sizes: what its elements should hold
        cluster: whose processes have to read the same, if they take their parts of it
        counting: whether to count the elements of a pass
        console: for warnings
        keep: whether the last batch of a pass is kept, so that it may be the only one

    Raises:
        SetupError: reading fails; an element has another size, or it is not clear which; or the
            processes of the cluster read different data.
    """
    found = known(pipeline, sizes)
    iterator = iter(without_tuner(pipeline.dataset, for_long=False))
    with reading(pipeline.hook):
        elements = [first_of(iterator, pipeline.hook)]
        counts = [examples_in(pipeline.count_examples, elements[0])]
        another = counts[0] not in (None, sizes.per_replica, sizes.batch)
        if another and (second := next(iterator, None)) is not None:
            elements.append(second)
            counts.append(examples_in(pipeline.count_examples, second))
        few = another and len(elements) == 1 and 0 < (counts[0] or 0) < sizes.batch
        if few and keep:
            size = sizes.per_replica if counts[0] <= sizes.per_replica else sizes.batch
        else:
            if few:
                _check_enough(pipeline, counts[0], sizes)
            size = checked_size(pipeline, counts[0], sizes)
        if cluster is not None:
            _check_same(pipeline, cluster, elements[0])
        together = elements_together(pipeline, size, sizes)
        several = _LOOK * together if uneven(pipeline, together) else _LOOK
        while len(elements) < several and not (found and several == _LOOK):
            element = next(iterator, None)
            if element is None:
                if not keep and counts.count(size) < together:
                    _check_enough(pipeline, sum(counts), sizes)
                break
            elements.append(element)
            counts.append(examples_in(pipeline.count_examples, element))
        if console is not None and uneven(pipeline, together):
            _warn_of_shapes(pipeline, elements, together, console)
        if console is not None and pipeline.reader is not None:
            for note in pipeline.reader.looked.notes:
                console.warn(note)
        if found is not None or not counting:
            return found or Found(size, together)
        if pipeline.stream and (batches := pipeline.stream.batches()) is not None:
            number, last = batches
            odd = int(last != size)
            left_out = odd, last * odd, (number - odd) % together * size
            if not keep:
                _check_enough(pipeline, (number - odd) * size + last * odd, sizes)
            return Found(size, together, number - odd, left_out, int(last > size))
        if console is not None:
            console.say(f"{pipeline.name}: reading the data once, to count the steps of a pass.")
        alone = together == 1 and not pipeline.sharded
        totals = tf.zeros([5], tf.int64)
        for count in counts:
            totals = _with(totals, tf.constant(count, tf.int64), size, alone)
        whole, odd, odd_examples, misfits, _ = _count(iterator, pipeline, size, alone, totals)
    if not keep and whole < together:
        _check_enough(pipeline, whole * size + odd_examples, sizes)
    left_out = odd, odd_examples, whole % together * size
    return Found(size, together, whole, left_out, misfits)


@contextlib.contextmanager
def reading(hook: Hook) -> Iterator[None]:
    """Turns a failure of reading into one line that names the hook."""
    try:
        yield
    except tf.errors.OpError as error:
        raise hook.reject(f"reading the data failed: {one_line(error)}") from error


def first_of(iterator: Any, hook: Hook, empty: str = EMPTY) -> Any:
    """Returns the next element.

    Raises:
        SetupError: there is none, as ``empty`` says.
    """
    for element in iterator:
        return element
    raise SetupError(f"{hook}: {empty}") if empty == EMPTY else hook.reject(empty)


def check_made_anew(first: Pipeline, second: Pipeline) -> None:
    """Refuses pipelines that share a shuffle, of which the second would not start at its start.

    Raises:
        SetupError: they do.
    """
    before = {id(stage) for stage in stages(first.dataset)}
    for stage in stages(second.dataset):
        if id(stage) in before and type(stage).__name__ in RESHUFFLING:
            raise SetupError(
                f"{second.name}: uses a dataset made outside of it that is shuffled, and reading "
                "some of it, to find out its sizes, has moved the shuffle on; make the dataset, "
                "or shuffle it, inside the function."
            )


def _check_enough(pipeline: Pipeline, examples: int, sizes: Sizes) -> None:
    """Refuses a pass that holds so many examples, too few for a step."""
    own, needed = "", sizes.batch
    if pipeline.sharded and sizes.processes > 1:
        own, needed = " for this process", sizes.batch // sizes.processes
    if examples < needed:
        raise SetupError(
            f"{pipeline.name}: the dataset has {examples} example{'s' * (examples != 1)}{own}, "
            f"fewer than the {needed} of a global batch{own}; take a smaller --batch-size, keep "
            "them with --last-batch keep, add data, or call repeat() before batch()."
        )


def _check_same(pipeline: Pipeline, cluster: Cluster, element: Any) -> None:
    digest = hashlib.sha256()
    for tensor in tf.nest.flatten(element, expand_composites=True):
        digest.update(repr(tensor.numpy().tolist()).encode())
    digests = cluster.gather([int.from_bytes(digest.digest()[:7], "big")])
    if (digests != digests[0]).any():
        raise SetupError(
            f"{pipeline.name}: the processes of the cluster read different data, or in a different "
            "order, but each takes its part of it; sort lists of files, seed what is random, or "
            "name input_context and shard there."
        )


def _warn_of_shapes(
    pipeline: Pipeline, elements: list[Any], together: int, console: Console
) -> None:
    """Warns if the shares of a step differ in shape: one global batch has one shape."""

    def shape(element: Any) -> list[Any]:
        tensors = [t for t in tf.nest.flatten(element) if isinstance(t, tf.Tensor)]
        return [tensor.shape[1:].as_list() for tensor in tensors]

    for start in range(0, len(elements), together):
        one, *others = elements[start : start + together]
        if different := [other for other in others if shape(other) != shape(one)]:
            console.warn(
                f"{pipeline.name}: batches of one step have different shapes, such as "
                f"{describe(one)} and {describe(different[0])}: what is grouped or padded for each "
                "replica on its own trains otherwise on another number of them. Make batches of "
                "global_batch_size, which the hook may name and the engine shares out, "
                "or use ctl_core.data.bucket_by_length."
            )
            return


def _with(totals: tf.Tensor, number: tf.Tensor, size: int, alone: bool) -> tf.Tensor:
    """Counts one element more.

    Args:
        totals: elements of that size, others, examples in those others, ``Found.misfits``, and
            whether the last element was smaller
        number: of examples in the element
        size: that it should hold
        alone: whether each element is a step, so that a smaller one may be anywhere
    """
    whole, larger, smaller = (
        tf.cast(is_so, tf.int64) for is_so in (number == size, number > size, number < size)
    )
    misfit = larger if alone else larger + totals[4]
    more = tf.stack([whole, 1 - whole, (1 - whole) * number, misfit])
    return tf.concat([totals[:4] + more, [smaller]], 0)


def _count(
    iterator: Any, pipeline: Pipeline, size: int, alone: bool, totals: tf.Tensor
) -> list[int]:
    """Reads the rest of a pass, and returns the totals with it; see ``_with``."""

    @tf.function(autograph=False)
    def count(iterator: Any) -> tf.Tensor:
        def add(element: Any, totals: tf.Tensor) -> tf.Tensor:
            number = checked_count(pipeline.count_examples, element)
            return _with(totals, number, size, alone)

        def body(_: tf.Tensor, totals: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            element = iterator.get_next_as_optional()
            there = element.has_value()
            return there, tf.cond(there, lambda: add(element.get_value(), totals), lambda: totals)

        return tf.while_loop(lambda more, _: more, body, (tf.constant(True), totals))[1]

    return count(iterator).numpy().tolist()  # type: ignore[no-any-return]
