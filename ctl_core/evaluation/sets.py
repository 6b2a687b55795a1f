"""Creates the sets of evaluation data that ``create_eval_dataset`` returns, and their metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ctl_core.compat import is_shuffle, list_stages
from ctl_core.hooks.hooks import Hook
from ctl_core.input.batches import find_process_leaves, has_varying_widths
from ctl_core.input.caches import refuse_unfinished_caches, warn_of_old_caches
from ctl_core.input.own_rows import Mark, PreparedRows, RowSelection, find_mark
from ctl_core.input.prefetch import read_ahead
from ctl_core.input.readers import open_reader
from ctl_core.input.sharing import may_have_rows, reject_elements
from ctl_core.model.components import Components, WrittenVariable
from ctl_core.model.copies import ReplicaCopies
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.run.listeners import FILE, RESERVED
from ctl_core.run.settings import Config
from ctl_core.types import BatchSpec, GraphFunction

# The name of the set if ``create_eval_dataset`` returns a single dataset instead of a dict.
SINGLE_SET = ""


@dataclasses.dataclass
class EvaluationSet:
    """A set of evaluation data with its metrics, and the graph function that updates them.

    Attributes:
        make: a function that returns the dataset, with the same elements in the same order at each
            call
        element_spec: the specification of the elements of the dataset
        selection: selects the rows of this process if ``ctl.data.own_rows`` was called and there
            are several processes: the elements of the dataset are then ``PreparedRows``. Otherwise,
            None: the elements are global batches
        metrics: the metrics that ``create_metrics`` returned, by name
        total: the sum of the losses, in float64
        examples: the number of examples, or the sum of the weights of batches, in float64. The sum
            of the losses is divided by this number
        exchanges: whether replicas exchange values while they evaluate a batch
        run_steps: the graph function that evaluates batches, see ``define_run_steps``; None before
            it is traced
        copies: copies of the variables that the evaluation writes; None before it is traced
        batches: the number of batches; None if there is only one leaf
        written: the variables that several leaves write, except those of random generators, and of
            metrics whose sums are divided among the replicas
        drawn: the ids of the states of random generators from which leaves draw
        names: the names of the metrics' values; empty before the metrics are built
        is_weighted: whether ``eval_pre`` multiplies the loss by the sample weights of the batch
        has_weight: whether a sample weight in the last evaluation was neither 0 nor NaN; False if
            ``is_weighted`` is False
    """

    make: Callable[[], tf.data.Dataset]
    element_spec: BatchSpec
    metrics: dict[str, keras.Metric]
    total: keras.Metric
    examples: keras.Metric
    exchanges: bool = False
    run_steps: GraphFunction | None = None
    copies: ReplicaCopies | None = None
    batches: keras.metrics.Metric | None = None
    written: list[WrittenVariable] = dataclasses.field(default_factory=list)
    drawn: set[int] = dataclasses.field(default_factory=set)
    names: list[str] = dataclasses.field(default_factory=list)
    is_weighted: bool = False
    has_weight: bool = False
    selection: RowSelection | None = None

    @property
    def spec(self) -> BatchSpec:
        """The specification of the batches, or of this process's rows of them."""
        if isinstance(self.element_spec, PreparedRows):
            return self.element_spec.rows
        return self.element_spec

    @property
    def accumulators(self) -> list[keras.Metric]:
        """The metrics and sums that are reset before each evaluation."""
        if self.batches is None:
            return self.sums
        return [*self.sums, self.batches]

    @property
    def sums(self) -> list[keras.Metric]:
        """The metrics and sums to which leaves add their results."""
        return [*self.metrics.values(), self.total, self.examples]


def find_wrong_name(metrics: dict[str, keras.Metric]) -> str | None:
    """Returns a message about a metric's name that cannot be used; None if all names can be used.

    A line of metrics.jsonl contains the names of metrics next to the keys in ``RESERVED``.
    """
    names_by_metric: dict[int, str] = {}
    for name, metric in metrics.items():
        if not name or not name.isprintable():
            return f"names a metric {name!r}; use printable characters only."
        if name in RESERVED:
            return (
                f"names a metric '{name}', which is a key of each line of {FILE}; choose "
                "another name."
            )
        other = names_by_metric.setdefault(id(metric), name)
        if other != name:
            return f"returned one metric as '{other}' and as '{name}'; create one for each name."
    return None


class EvaluationResults(NamedTuple):
    """The results of a call of ``create_eval_dataset``.

    Attributes:
        sets: the datasets or readers by name. If the hook returns only one, it has the name
            ``SINGLE_SET``
        marks: the calls of ``ctl.data.own_rows``
    """

    sets: dict[str, Any]
    marks: list[Mark]


def call_eval_hook(hook: Hook, size: int, seed: int, selection: RowSelection) -> EvaluationResults:
    """Calls ``create_eval_dataset``.

    Args:
        hook: the hook
        size: the batch size that the hook receives
        seed: the seed of all random generators during the call
        selection: selects the rows of this process in each call of ``ctl.data.own_rows``
    """
    keras.utils.set_random_seed(seed)
    with selection.note_marks() as marks:
        returned = hook(global_batch_size=size, per_replica_batch_size=size)
    if not isinstance(returned, dict):
        returned = {SINGLE_SET: returned}
    return EvaluationResults(returned, marks)


class EvaluationData:
    """Reads the evaluation data of ``create_eval_dataset``."""

    def __init__(self, components: Components, config: Config, hook: Hook) -> None:
        """Stores the arguments, and chooses the batch size of evaluations.

        Args:
            components: the components of a step
            config: the settings
            hook: the hook ``create_eval_dataset``
        """
        self._components = components
        self._config = config
        self._hook = hook
        self._batch_size = config.eval_batch_size or components.shape.batch
        shape = components.shape
        self._selection = RowSelection(
            batch=self._batch_size,
            leaves=shape.evaluation_leaves,
            process_leaves=find_process_leaves(
                dataclasses.replace(shape, accumulate_steps=1), components.strategy
            ),
            keeps_last_batch=True,
            is_repeated=False,
        )

    def call_hook(self) -> EvaluationResults:
        """Calls ``create_eval_dataset``, with the same seed each time."""
        size = self._batch_size
        if not self._components.shape.by_rows:  # each element is the share of a replica
            size = max(1, size // self._components.shape.replicas)
        with keep_seeds():
            return call_eval_hook(self._hook, size, self._config.seed, self._selection)

    def create_set(self, name: str, results: EvaluationResults) -> EvaluationSet:
        """Creates the set for a dataset or reader that the hook returned.

        Args:
            name: the name of the set
            results: the results of the hook
        """
        returned = results.sets[name]
        hook = self._hook
        if name != SINGLE_SET:
            hook = dataclasses.replace(hook, name=f"{hook.name}['{name}']")
        reader = open_reader(hook, returned, lambda: self.call_hook().sets[name])
        if reader is not None:
            returned = reader.read(goes_on=False)
        spec = returned.element_spec
        if self._components.shape.by_rows and not may_have_rows(spec):
            raise reject_elements(hook, spec)
        mark = self._find_mark(hook, returned, results.marks)
        examples = self._count_examples(hook, name, mark)
        dataset = self._prepare(hook, returned, mark, examples)
        refuse_unfinished_caches(hook, dataset)
        warn_of_old_caches(hook, dataset)
        is_shuffled = any(map(is_shuffle, list_stages(dataset)))

        def make() -> tf.data.Dataset:
            if is_shuffled:  # a second pass over a shuffled dataset would have another order
                results = self.call_hook()
                mark = self._find_mark(hook, results.sets[name], results.marks)
                return self._prepare(hook, results.sets[name], mark, examples)
            return dataset

        total = keras.metrics.Sum("loss", dtype="float64")
        number = keras.metrics.Sum("examples", dtype="float64")
        create_metrics = self._components.hooks.create_metrics
        metrics = create_metrics()
        problem = find_wrong_name(metrics)
        if problem is not None:
            raise create_metrics.reject(problem)
        batches = None
        if self._components.shape.has_evaluation_leaves:
            batches = keras.metrics.Sum("batches", dtype="int64")
        created = EvaluationSet(make, dataset.element_spec, metrics, total, number, batches=batches)
        if examples is not None:
            created.selection = self._selection
        return created

    def _find_mark(self, hook: Hook, dataset: tf.data.Dataset, marks: list[Mark]) -> Mark | None:
        """Returns the call of ``ctl.data.own_rows`` in a dataset; None if there is none."""
        mark = find_mark(hook, dataset, marks)
        if mark is not None and not self._components.shape.by_rows:
            raise hook.reject(
                "calls ctl.data.own_rows, but count_examples does not count rows, so each element "
                "is a share; leave out own_rows."
            )
        return mark

    def _count_examples(self, hook: Hook, name: str, mark: Mark | None) -> int | None:
        """Returns the number of examples in a set, of which this process prepares a part.

        Reads the data before the mark if this is necessary.

        Args:
            hook: the hook that returned the set
            name: the name of the set
            mark: the call of ``ctl.data.own_rows`` in the set; None if there is none

        Returns:
            The number; None if this process prepares all examples.
        """
        if mark is None or mark.is_endless or self._selection.has_all_rows:
            return None
        examples = mark.find_number_of_examples()
        if examples is not None:
            return examples
        results = self.call_hook()
        inspected = self._find_mark(hook, results.sets[name], results.marks)
        assert inspected is not None
        return inspected.count_examples()

    def _prepare(
        self, hook: Hook, dataset: tf.data.Dataset, mark: Mark | None, examples: int | None
    ) -> tf.data.Dataset:
        """Returns a dataset of one pass in global batches, or in this process's rows of them.

        Args:
            hook: the hook that returned the dataset
            dataset: the dataset
            mark: the call of ``ctl.data.own_rows`` in the dataset; None if there is none
            examples: the number of examples if only this process's rows were selected

        Raises:
            SetupError: the dataset is endless.
        """
        is_endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        if is_endless or (mark is not None and mark.is_endless):
            raise hook.reject(
                "returned an endless dataset, so an evaluation would never end; leave out repeat()."
            )
        if examples is not None:
            dataset = self._selection.join_rows(dataset, examples)
        elif self._is_joined(dataset, mark):
            dataset = dataset.rebatch(self._batch_size, drop_remainder=False)
        if self._config.limit_eval is not None:
            dataset = dataset.take(self._config.limit_eval)
        return read_ahead(dataset, for_long=False)

    def _is_joined(self, dataset: tf.data.Dataset, mark: Mark | None) -> bool:
        """Returns whether the elements of a dataset are joined to batches of the right size."""
        if mark is not None:
            return True
        return self._components.shape.by_rows and not has_varying_widths(dataset.element_spec)
