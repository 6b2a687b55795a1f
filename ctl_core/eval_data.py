"""The evaluation data: one pass, or one by name for each set, read anew by every evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.checks.data import first_of, reading
from ctl_core.checks.examples import checked_count, examples_in, read_by
from ctl_core.checks.returned import kind_of
from ctl_core.compat import stages
from ctl_core.hooks import Hook, Hooks
from ctl_core.settings import shown

_NAME = re.compile(r"\w[\w.-]{0,99}")


@dataclasses.dataclass(frozen=True)
class EvaluationData:
    """A set of evaluation data, which every evaluation reads from their start.

    Attributes:
        hook: that makes them, with the name of the set if it has one
        dataset: one pass of batches
    """

    hook: Hook
    dataset: tf.data.Dataset
    _start: tempfile.TemporaryDirectory[str] | None

    def __iter__(self) -> Any:
        """Returns an iterator that reads what the first did: shuffles have the same order again.

        A resumed run thus evaluates on what the whole run does. Where a stage has a state that
        cannot be saved, shuffles go on to other orders. (Going back to the start costs more than
        a small evaluation does; ``_START_ANYWAY`` are stages for which there is no need.)
        """
        iterator = iter(self.dataset)
        if self._start is not None:
            tf.train.Checkpoint(iterator=iterator).read(str(Path(self._start.name) / "start"))
        return iterator


def create_eval_data(
    hooks: Hooks, per_replica: int, most: int | None = None
) -> dict[str, EvaluationData]:
    """Creates the evaluation data, of all processes; the last batch may be smaller.

    Args:
        hooks: ``create_eval_dataset`` and ``count_examples``
        per_replica: how many examples a batch should hold
        most: batches that begin after so many examples are left out; default: none

    Returns:
        The sets by name; one without a name under "".

    Raises:
        SetupError: the hook returns neither a dataset nor a dict of such by name; or one is empty,
            or endless.
    """
    hook = hooks.create_eval_dataset
    assert hook is not None
    values = {"per_replica_batch_size": per_replica}
    made = hook(**values)
    if not isinstance(made, dict):
        return {"": _create(hooks, hook, dataset_of(hooks, hook, made, values), most)}
    if not made:
        raise hook.reject("returned an empty dict, expected datasets by name.")
    for name in made:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise hook.reject(
                f"returned a dataset by the name {shown(name)}, expected a text of letters, "
                "digits, '_', '-' and '.', such as 'test'."
            )
    sets = {}
    for name, one in made.items():
        named = dataclasses.replace(hook, name=f"{hook.name}['{name}']")
        dataset = dataset_of(hooks, named, one, values, name)
        sets[name] = _create(hooks, named, dataset, most)
    return sets


def dataset_of(
    hooks: Hooks, hook: Hook, made: Any, values: dict[str, Any], name: str | None = None
) -> tf.data.Dataset:
    """Returns one pass of what the hook returned; of a reader in Python, always from its start.

    Args:
        hooks: of which ``count_examples`` counts
        hook: for messages
        made: what it returned
        values: that it was called with
        name: of the set, if what it returned is one of several

    Raises:
        SetupError: it is nothing that can be read.
    """
    if isinstance(made, tf.data.Dataset):
        return made

    def again() -> Any:
        found = hook(**values)
        return found if name is None else found[name]

    reader = read_by(hook, made, hooks.count_examples, again)
    if reader is None:
        raise hook.reject(
            f"returned {kind_of(made)}, expected a tf.data.Dataset, or a dict of such by name."
        )
    if reader.reader.endless:
        raise hook.reject(
            "returned a PyDataset without an end, so an evaluation would never end; let __len__ "
            "say how many batches it has."
        )
    return reader.from_start()


def _create(hooks: Hooks, hook: Hook, made: tf.data.Dataset, most: int | None) -> EvaluationData:
    if made.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise hook.reject(
            "returned an endless dataset, so an evaluation would never end; leave out repeat()."
        )

    dataset = made if most is None else _first(made, hooks.count_examples, most)
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    data = EvaluationData(hook, dataset, None)
    if not all(type(stage).__name__ in _START_ANYWAY for stage in stages(dataset)):
        start = tempfile.TemporaryDirectory(prefix="ctl_core-")
        with contextlib.suppress(tf.errors.FailedPreconditionError):
            tf.train.Checkpoint(iterator=iter(dataset)).write(str(Path(start.name) / "start"))
            data = dataclasses.replace(data, _start=start)
    with reading(hook):
        if examples_in(hooks.count_examples, first_of(iter(made), hook)) is None:
            raise hook.reject(
                "returned single examples, expected batches: use "
                "dataset.batch(per_replica_batch_size)."
            )
    return data


def _first(dataset: tf.data.Dataset, count_examples: Hook, most: int) -> tf.data.Dataset:
    """Leaves out the batches that begin after so many examples."""

    @tf.autograph.experimental.do_not_convert
    def add(before: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        return before + checked_count(count_examples, batch), (before, batch)

    numbered = dataset.scan(tf.constant(0, tf.int64), add)
    within = numbered.take_while(lambda before, _: before < min(most, tf.int64.max))
    return within.map(lambda _, batch: batch)


# What reads the same again from a new iterator on; of what TensorFlow may add, nobody knows. The
# names are TensorFlow's own: one that is no longer known costs time, nothing else.
_START_ANYWAY = {
    *("_TensorDataset", "_TensorSliceDataset", "_RangeDataset", "_MapDataset"),
    *("_BatchDataset", "_PaddedBatchDataset", "_RebatchDataset", "_UnbatchDataset"),
    *("_ParallelMapDataset", "_ParallelBatchDataset", "_PrefetchDataset", "_OptionsDataset"),
    *("_TakeDataset", "_SkipDataset", "_ShardDataset", "_RepeatDataset", "_ZipDataset"),
    *("_AssertCardinalityDataset", "_RestructuredDataset"),
}
