"""The evaluation data: one pass, or one by name for each set, read anew by every evaluation."""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core.ahead import read_ahead, without_tuner
from ctl_core.checks.data import first_of, reading
from ctl_core.checks.examples import checked_count, examples_in, read_by
from ctl_core.checks.returned import kind_of
from ctl_core.compat import stages
from ctl_core.hooks import Hook, Hooks
from ctl_core.process_state import seeds_kept
from ctl_core.readers.stream import Looked, Stream
from ctl_core.settings import shown

_NAME = re.compile(r"\w[\w.-]{0,99}")
_EMPTY = (
    "returned an empty dataset; if there are examples, batch them without drop_remainder: the last "
    "batch of an evaluation may be smaller."
)


@dataclasses.dataclass(frozen=True)
class EvaluationData:
    """A set of evaluation data, which every evaluation reads from their start.

    Attributes:
        hook: that makes them, with the name of the set if it has one
        dataset: one pass of batches
    """

    hook: Hook
    dataset: tf.data.Dataset
    _start: tempfile.TemporaryDirectory[str] | None = None
    _anew: Callable[[], tf.data.Dataset] | None = None

    def __iter__(self) -> Any:
        """Returns an iterator that reads what the first did: shuffles have the same order again.

        A resumed run thus evaluates on what the whole run does. (Going back to the start costs more
        than a small evaluation does; ``_START_ANYWAY`` are stages for which there is no need. Where
        a stage has a state that cannot be saved, the hook makes shuffles and readers anew.)
        """
        iterator = iter(self.anew())
        if self._start is not None:
            tf.train.Checkpoint(iterator=iterator).read(str(Path(self._start.name) / "start"))
        return iterator

    def anew(self) -> tf.data.Dataset:
        """Returns the dataset, or one that is made anew if the hook makes one for each evaluation.

        What came of that before is read no more.
        """
        return self.dataset if self._anew is None else self._anew()


class _Made:
    """What the hook returns when it is called again, as a resumed run calls it: with its seeds.

    Sets by name are made together, once for each evaluation.
    """

    def __init__(self, hook: Hook, values: dict[str, Any]) -> None:
        self._hook = hook
        self._values = values
        self._sets: dict[str | None, Any] = {}
        self._asked: set[str | None] = set()

    def take(self, name: str | None = None) -> Any:
        """Returns the set of a name, made anew; None is that of what has no names."""
        self._asked.add(name)
        if name not in self._sets:
            with seeds_kept():
                keras.utils.set_random_seed(self._hook.common["config"].seed)
                made = self._hook(**self._values)
            sets = {None: made} if name is None else made
            self._sets = {key: sets[key] for key in self._asked}
        return self._sets.pop(name)


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
    again = _Made(hook, values)
    if not isinstance(made, dict):
        return {"": _create(hooks, hook, made, again.take, most)}
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
        sets[name] = _create(hooks, named, one, functools.partial(again.take, name), most)
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

    return _reader(hooks, hook, made, again).from_start()


def _reader(
    hooks: Hooks, hook: Hook, made: Any, again: Callable[[], Any], looked: Looked | None = None
) -> Stream:
    reader = read_by(hook, made, hooks.count_examples, again, looked)
    if reader is None:
        raise hook.reject(
            f"returned {kind_of(made)}, expected a tf.data.Dataset, or a dict of such by name."
        )
    if reader.reader.endless:
        raise hook.reject(
            "returned a PyDataset without an end, so an evaluation would never end; let __len__ "
            "say how many batches it has."
        )
    return reader


def _create(
    hooks: Hooks, hook: Hook, made: Any, again: Callable[[], Any], most: int | None
) -> EvaluationData:
    """Creates a set of what the hook made; ``again`` makes the same once more."""
    reader = None
    if not isinstance(made, tf.data.Dataset):
        reader = _reader(hooks, hook, made, again)
        made = reader.from_start()
    if made.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise hook.reject(
            "returned an endless dataset, so an evaluation would never end; leave out repeat()."
        )

    def whole(one: tf.data.Dataset) -> tf.data.Dataset:
        one = one if most is None else _first(one, hooks.count_examples, most)
        return read_ahead(one, for_long=False)

    data = EvaluationData(hook, whole(made))
    names = {type(stage).__name__ for stage in stages(data.dataset)}
    if reader is not None:
        if not reader.reader.is_sure_to_begin_again():
            remade = _Remade(hooks, hook, again, reader)
            data = dataclasses.replace(data, _anew=lambda: whole(remade.dataset()))
    elif not names <= _START_ANYWAY:
        start = tempfile.TemporaryDirectory(prefix="ctl_core-")
        try:
            tf.train.Checkpoint(iterator=iter(data.dataset)).write(str(Path(start.name) / "start"))
            data = dataclasses.replace(data, _start=start)
        except tf.errors.FailedPreconditionError:
            if names & _SHUFFLES:
                data = dataclasses.replace(data, _anew=lambda: whole(again()))
    with reading(hook):
        first = first_of(iter(without_tuner(made, for_long=False)), hook, _EMPTY)
        if examples_in(hooks.count_examples, first) is None:
            raise hook.reject(
                "returned single examples, expected batches: use "
                "dataset.batch(per_replica_batch_size)."
            )
    return data


class _Remade:
    """A reader that is made anew for each evaluation, since its own passes differ."""

    def __init__(self, hooks: Hooks, hook: Hook, again: Callable[[], Any], reader: Stream) -> None:
        self._hooks, self._hook, self._again = hooks, hook, again
        self._reader = reader

    def dataset(self) -> tf.data.Dataset:
        looked, made = self._reader.looked, self._again()
        self._reader.close()
        self._reader = _reader(self._hooks, self._hook, made, self._again, looked)
        return self._reader.from_start()


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
_SHUFFLES = {"_ShuffleDataset", "_RandomDataset"}
