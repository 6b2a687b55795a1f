"""What the hooks make of the training data, and how a global batch is shared out of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from ctl_core.checks.examples import examples_in, packed, read_by
from ctl_core.errors import SetupError
from ctl_core.hooks import Hook, Hooks
from ctl_core.readers.stream import Stream

EMPTY = (
    "returned an empty dataset, or one with fewer examples than one global batch; lower batch_size."
)
_BATCHES = (
    "batches of global_batch_size in the reader, which the hook may name and the engine shares out."
)
# Stages that draw random numbers, others in each pass.
RESHUFFLING = {"_ShuffleDataset", "_ShuffleAndRepeatDataset", "_RandomDataset"}


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

    ``reader`` is what ``create_dataset`` returned if that is a reader in Python.
    """

    hook: Hook
    count_examples: Hook
    dataset: tf.data.Dataset
    endless: bool
    sharded: bool
    reader: Stream | None = None

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
    dataset = hook(**values)
    if not isinstance(dataset, tf.data.Dataset):
        looked = None if before is None or before.reader is None else before.reader.looked
        seed = hook.common["config"].seed

        def again() -> Any:
            return hook(**values)

        reader = read_by(hook, dataset, hooks.count_examples, again, looked, seed)
        dataset = checked_dataset(hook, dataset if reader is None else reader.one_pass())
    if dataset.cardinality() == 0:
        raise SetupError(f"{hook}: {EMPTY}")
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
    return Pipeline(hook, hooks.count_examples, dataset, endless, sharded, reader)


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
        checked_size(pipeline, size, sizes)
    if size is None or elements == tf.data.UNKNOWN_CARDINALITY:
        return None
    together = elements_together(pipeline, size, sizes)
    if pipeline.endless:
        return Found(size, together, None, (0, 0, 0))
    return Found(size, together, elements, (0, 0, elements % together * size))


def uneven(pipeline: Pipeline, together: int) -> bool:
    """Whether the shares of a step may differ in shape, apart from their first dimension."""
    return together > 1 and any(
        isinstance(spec, tf.TensorSpec) and not spec.shape[1:].is_fully_defined()
        for spec in tf.nest.flatten(pipeline.dataset.element_spec)
    )


def checked_size(pipeline: Pipeline, found: int | None, sizes: Sizes) -> int:
    """Returns how many examples an element holds, if that is what it should hold.

    Raises:
        SetupError: it is not.
    """
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


def elements_together(pipeline: Pipeline, size: int, sizes: Sizes) -> int:
    """Returns how many elements fill a step: of this process, or of all if they share them."""
    if size != sizes.per_replica:
        return 1
    return sizes.shares // (sizes.processes if pipeline.sharded else 1)
