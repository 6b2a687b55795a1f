"""The evaluation data: one pass, or one by name for each set, read anew by every evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.checks.data import checked_count, examples_in, first_of, reading
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
    made = hook(per_replica_batch_size=per_replica)
    if not isinstance(made, dict):
        return {"": _create(hooks, hook, made, most)}
    if not made:
        raise hook.reject("returned an empty dict, expected datasets by name.")
    for name in made:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise hook.reject(
                f"returned a dataset by the name {shown(name)}, expected a text of letters, "
                "digits, '_', '-' and '.', such as 'test'."
            )
    return {
        name: _create(hooks, dataclasses.replace(hook, name=f"{hook.name}['{name}']"), one, most)
        for name, one in made.items()
    }


def _create(hooks: Hooks, hook: Hook, made: Any, most: int | None) -> EvaluationData:
    if not isinstance(made, tf.data.Dataset):
        raise hook.reject(
            f"returned {kind_of(made)}, expected a tf.data.Dataset, or a dict of such by name."
        )
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
