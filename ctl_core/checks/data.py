"""What is found out about the data before a run reads them: sizes, length, what is left out.

Iterators of one dataset share the state of its shuffles, so a second one would not read what the
first did. Whatever is found out by reading is found out on a pipeline that the run does not read;
inputs.py has the hooks make that one anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ctl_core.checks.examples import checked_count, examples_in, packed, read_by
from ctl_core.cluster.sync import Cluster
from ctl_core.compat import stages
from ctl_core.console import Console
from ctl_core.data.manifest import opened
from ctl_core.errors import SetupError, explained, one_line
from ctl_core.hooks import Hook, Hooks, describe
from ctl_core.readers.stream import Stream

EMPTY = (
    "returned an empty dataset, or one with fewer examples than one global batch; lower batch_size."
)

_BATCHES = (
    "batches of global_batch_size in the reader, which the hook may name and the engine shares out."
)

# So many elements, or elements of so many steps, are looked at where not all sizes are fixed.
_LOOK = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How a global batch is shared out.

    Attributes:
        batch: examples in a global batch, B
        replicas: N, over all processes
        accumulate_steps: A
        processes: P
    """

    batch: int
    replicas: int
    accumulate_steps: int
    processes: int

    @property
    def shares(self) -> int:
        """N A, into which a global batch is cut."""
        return self.replicas * self.accumulate_steps

    @property
    def per_replica(self) -> int:
        """B / (N A), what a replica takes at once."""
        return self.batch // self.shares


@dataclasses.dataclass(frozen=True)
class Kept:
    """A pass whose last global batch may be smaller.

    Attributes:
        elements: how many elements a pass has, of this process or of all if they share them
        own: how many examples those hold
        examples: the same of each process that shards for itself; otherwise one number
        steps: in a pass
    """

    elements: int
    own: int
    examples: tuple[int, ...]
    steps: int


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found out about the training data.

    Attributes:
        size: examples in an element: B / (N A), or B
        together: how many elements fill a step: of this process, or of all if they share them
        elements: of the right size in a pass; None if it has no end, or nobody has counted
        left_out: of a pass: elements of another size, examples in them, and examples in the
            elements at its end that fill no step; None if that is not known yet
        misfits: elements that cannot be kept, since they are larger, or smaller before the end
        kept: what is known where the last batch of a pass is kept, and smaller
    """

    size: int
    together: int
    elements: int | None = None
    left_out: tuple[int, int, int] | None = None
    misfits: int = 0
    kept: Kept | None = None

    @property
    def steps(self) -> int | None:
        """Global batches in a pass, or None: it has no end, or nobody has counted."""
        if self.kept is not None:
            return self.kept.steps
        return None if self.elements is None else self.elements // self.together


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What the hooks made: one pass, or an endless dataset; and the hook to name in messages.

    ``reader`` is what ``create_dataset`` returned if that is a reader in Python; ``records`` are
    the TFRecord files that the hooks read by their manifest, as ``manifest.opened`` has them.
    """

    hook: Hook
    count_examples: Hook
    dataset: tf.data.Dataset
    endless: bool
    sharded: bool
    reader: Stream | None = None
    records: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The hook and where it is."""
        return f"{self.hook.name} ({self.hook.where})"

    @property
    def stream(self) -> Stream | None:
        """The reader, if steps are made of what it gives, as it is."""
        return None if self.hook.name == "make_batches" else self.reader

    def static_size(self) -> int | None:
        """Returns how many examples each element holds, if the dataset's description fixes it."""
        found: list[Any] = []

        @tf.autograph.experimental.do_not_convert
        def trace(*parts: Any) -> tf.Tensor:
            found.append(examples_in(self.count_examples, packed(self.dataset, parts)))
            return tf.constant(0)

        self.dataset.map(trace)
        return found[0] if isinstance(found[0], int) else None


def create_pipeline(
    hooks: Hooks,
    sizes: Sizes,
    context: tf.distribute.InputContext,
    before: Pipeline | None = None,
) -> Pipeline:
    """Calls ``create_dataset`` and ``make_batches``.

    Args:
        hooks: those two
        sizes: how a global batch is shared out
        context: of this process
        before: what they made before; readers are looked at once

    Raises:
        SetupError: one of them returns no dataset, or an empty one; or ``make_batches`` one that
            ends; or a reader cannot be read, or not from where it was.
    """
    values = {
        "per_replica_batch_size": sizes.per_replica,
        "global_batch_size": sizes.batch,
        "input_context": context,
    }
    sharded = any(
        "input_context" in hook.arguments for hook in (hooks.create_dataset, hooks.make_batches)
    )
    if before is not None and before.reader is not None:
        before.reader.close()
    hook, reader = hooks.create_dataset, None
    with opened() as records:
        dataset = hook(**values)
    if not isinstance(dataset, tf.data.Dataset):
        looked = None if before is None or before.reader is None else before.reader.looked
        seed = hook.common["config"].seed

        def again() -> Any:
            return hook(**values)

        reader = read_by(hook, dataset, hooks.count_examples, again, looked, seed)
        dataset = checked_dataset(hook, dataset if reader is None else reader.one_pass())
    if dataset.cardinality() == 0:
        raise hook.reject(EMPTY)
    endless = bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)
    endless = endless or (reader is not None and reader.reader.endless)
    repeated = dataset.repeat()
    made = checked_dataset(hooks.make_batches, hooks.make_batches(dataset=repeated, **values))
    if made is not repeated:
        dataset, hook, endless = made, hooks.make_batches, True
        if made.cardinality() >= 0:
            raise hook.reject(
                f"ends after {int(made.cardinality())} elements; it "
                "gets the repeated dataset and must not end."
            )
    return Pipeline(hook, hooks.count_examples, dataset, endless, sharded, reader, records)


def checked_dataset(hook: Hook, dataset: Any) -> tf.data.Dataset:
    """Returns what a hook returned.

    Raises:
        SetupError: it is no dataset.
    """
    if not isinstance(dataset, tf.data.Dataset):
        kind = "nothing" if dataset is None else f"a {type(dataset).__name__}"
        readers = " or a reader, such as a PyDataset" * (hook.name == "create_dataset")
        batches = "; of a list of batches, return iter(batches)"
        batches *= isinstance(dataset, list | tuple) and bool(readers)
        raise hook.reject(f"returned {kind}, expected a tf.data.Dataset{readers}{batches}.")
    return dataset


def known(pipeline: Pipeline, sizes: Sizes) -> Found | None:
    """Returns what the dataset's own description says, if it fixes size and length."""
    size, elements = pipeline.static_size(), int(pipeline.dataset.cardinality())
    if size is not None:
        _check_size(pipeline, size, sizes)
    if size is None or elements == tf.data.UNKNOWN_CARDINALITY:
        return None
    together = _together(pipeline, size, sizes)
    if pipeline.endless:
        return Found(size, together, None, (0, 0, 0))
    return Found(size, together, elements, (0, 0, elements % together * size))


def uneven(pipeline: Pipeline, together: int) -> bool:
    """Whether the shares of a step may differ in shape, apart from their first dimension."""
    return together > 1 and any(
        isinstance(spec, tf.TensorSpec) and not spec.shape[1:].is_fully_defined()
        for spec in tf.nest.flatten(pipeline.dataset.element_spec)
    )


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
    iterator = iter(pipeline.dataset)
    with reading(pipeline.hook):
        elements = [first_of(iterator, pipeline.hook)]
        counts = [examples_in(pipeline.count_examples, elements[0])]
        another = keep and counts[0] not in (None, sizes.per_replica, sizes.batch)
        if another and (second := next(iterator, None)) is not None:
            elements.append(second)
            counts.append(examples_in(pipeline.count_examples, second))
        if len(elements) == 1 and keep and 0 < (counts[0] or 0) < sizes.batch:
            size = sizes.per_replica if counts[0] <= sizes.per_replica else sizes.batch
        else:
            size = _check_size(pipeline, counts[0], sizes)
        if cluster is not None:
            _check_same(pipeline, cluster, elements[0])
        together = _together(pipeline, size, sizes)
        several = _LOOK * together if uneven(pipeline, together) else _LOOK
        while len(elements) < several and not (found and several == _LOOK):
            element = next(iterator, None)
            if element is None:
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
            return Found(size, together, number - odd, left_out, int(last > size))
        if console is not None:
            console.say(f"{pipeline.name}: reading the data once, to count the steps of a pass.")
        alone = together == 1 and not pipeline.sharded
        totals = tf.zeros([5], tf.int64)
        for count in counts:
            totals = _with(totals, tf.constant(count, tf.int64), size, alone)
        whole, odd, odd_examples, misfits, _ = _count(iterator, pipeline, size, alone, totals)
    left_out = odd, odd_examples, whole % together * size
    return Found(size, together, whole, left_out, misfits)


@contextlib.contextmanager
def reading(hook: Hook) -> Iterator[None]:
    """Turns a failure of reading into one line that names the hook."""
    try:
        yield
    except tf.errors.OpError as error:
        why = one_line(explained(error) or error)
        raise hook.reject(f"reading the data failed: {why}") from error


def first_of(iterator: Any, hook: Hook) -> Any:
    """Returns the next element.

    Raises:
        SetupError: there is none.
    """
    for element in iterator:
        return element
    raise hook.reject(EMPTY)


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


# Stages that draw random numbers, others in each pass.
RESHUFFLING = {"_ShuffleDataset", "_ShuffleAndRepeatDataset", "_RandomDataset"}


def _check_size(pipeline: Pipeline, found: int | None, sizes: Sizes) -> int:
    if found == sizes.per_replica or (found == sizes.batch and not pipeline.sharded):
        return found
    micro = f" and {sizes.accumulate_steps} micro-batches" if sizes.accumulate_steps > 1 else ""
    raise SetupError(
        f"{pipeline.name}: returned "
        + (f"batches of {found} examples" if found is not None else "single examples")
        + f", expected batches of {sizes.per_replica} (batch_size {sizes.batch} over "
        f"{sizes.replicas} replica{'s' * (sizes.replicas > 1)}{micro}): use "
        + ("dataset.batch(per_replica_batch_size)." if pipeline.reader is None else _BATCHES)
    )


def _together(pipeline: Pipeline, size: int, sizes: Sizes) -> int:
    if size != sizes.per_replica:
        return 1
    return sizes.shares // (sizes.processes if pipeline.sharded else 1)


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
