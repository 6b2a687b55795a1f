"""The evaluation data: one pass, which every evaluation reads from its start."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.checks.data import checked_count, dataset_of, examples_in, first_of, packed, reading
from ctl_core.hooks import Hooks


@dataclasses.dataclass(frozen=True)
class EvaluationData:
    """The evaluation data, which every evaluation reads from their start.

    Attributes:
        dataset: one pass; element = (number of examples, batch)
    """

    dataset: tf.data.Dataset
    _start: tempfile.TemporaryDirectory[str] | None

    def __iter__(self) -> Any:
        """Returns an iterator that reads what the first did: shuffles have the same order again.

        A resumed run thus evaluates on what the whole run does. Where a stage has a state that
        cannot be saved, shuffles go on to other orders.
        """
        iterator = iter(self.dataset)
        if self._start is not None:
            tf.train.Checkpoint(iterator=iterator).read(str(Path(self._start.name) / "start"))
        return iterator


def create_eval_dataset(hooks: Hooks, per_replica: int) -> EvaluationData:
    """Creates the evaluation data, of all processes; the last batch may be smaller.

    Raises:
        SetupError: it is no dataset, empty, or endless.
    """
    hook = hooks.create_eval_dataset
    assert hook is not None
    made = dataset_of(hook, per_replica_batch_size=per_replica)
    if made.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise hook.reject(
            "returned an endless dataset, so an evaluation would never end; leave out repeat()."
        )

    @tf.autograph.experimental.do_not_convert
    def count(*parts: Any) -> tuple[tf.Tensor, Any]:
        batch = packed(made, parts)
        return checked_count(hooks.count_examples, batch), batch

    dataset = made.map(count).prefetch(tf.data.AUTOTUNE)
    start = tempfile.TemporaryDirectory(prefix="ctl_core-")
    data = EvaluationData(dataset, start)
    try:
        tf.train.Checkpoint(iterator=iter(dataset)).write(str(Path(start.name) / "start"))
    except tf.errors.FailedPreconditionError:
        data = EvaluationData(dataset, None)
    with reading(hook):
        if examples_in(hooks.count_examples, first_of(iter(made), hook)) is None:
            raise hook.reject(
                "returned single examples, expected batches: use "
                "dataset.batch(per_replica_batch_size)."
            )
    return data
