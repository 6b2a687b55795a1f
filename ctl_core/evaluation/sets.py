"""Creates the sets of evaluation data that ``create_eval_dataset`` returns, and their metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.compat import is_shuffle, list_stages
from ctl_core.hooks.hooks import Hook
from ctl_core.input.batches import has_varying_widths
from ctl_core.input.caches import refuse_unfinished_caches, warn_of_old_caches
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
        spec: the specification of the dataset's elements
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
        weight: the sum of the absolute sample weights in the last evaluation; 0 if ``is_weighted``
            is False
    """

    make: Callable[[], tf.data.Dataset]
    spec: BatchSpec
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
    weight: float = 0.0

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

    def call_hook(self) -> dict[str, Any]:
        """Calls ``create_eval_dataset``, with the same seed each time.

        Returns:
            The datasets or readers by name. If the hook returns only one, it has the name
            ``SINGLE_SET``.
        """
        size = self._batch_size
        if not self._components.shape.by_rows:  # each element is the share of a replica
            size = max(1, size // self._components.shape.replicas)
        with keep_seeds():
            keras.utils.set_random_seed(self._config.seed)
            returned = self._hook(global_batch_size=size, per_replica_batch_size=size)
        if isinstance(returned, dict):
            return returned
        return {SINGLE_SET: returned}

    def create_set(self, name: str, returned: Any) -> EvaluationSet:
        """Creates the set for a dataset or reader that the hook returned.

        Args:
            name: the name of the set
            returned: the dataset or reader
        """
        hook = self._hook
        if name != SINGLE_SET:
            hook = dataclasses.replace(hook, name=f"{hook.name}['{name}']")
        reader = open_reader(hook, returned, lambda: self.call_hook()[name])
        if reader is not None:
            returned = reader.read(goes_on=False)
        spec = returned.element_spec
        if self._components.shape.by_rows and not may_have_rows(spec):
            raise reject_elements(hook, spec)
        dataset = self._prepare(hook, returned)
        refuse_unfinished_caches(hook, dataset)
        warn_of_old_caches(hook, dataset)
        is_shuffled = any(map(is_shuffle, list_stages(dataset)))

        def make() -> tf.data.Dataset:
            if is_shuffled:  # a second pass over a shuffled dataset would have another order
                return self._prepare(hook, self.call_hook()[name])
            return dataset

        total = keras.metrics.Sum("loss", dtype="float64")
        examples = keras.metrics.Sum("examples", dtype="float64")
        create_metrics = self._components.hooks.create_metrics
        metrics = create_metrics()
        problem = find_wrong_name(metrics)
        if problem is not None:
            raise create_metrics.reject(problem)
        batches = None
        if self._components.shape.has_evaluation_leaves:
            batches = keras.metrics.Sum("batches", dtype="int64")
        return EvaluationSet(make, dataset.element_spec, metrics, total, examples, batches=batches)

    def _prepare(self, hook: Hook, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset of one pass in global batches.

        Raises:
            SetupError: the dataset is endless.
        """
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise hook.reject(
                "returned an endless dataset, so an evaluation would never end; leave out repeat()."
            )
        if self._components.shape.by_rows and not has_varying_widths(dataset.element_spec):
            dataset = dataset.rebatch(self._batch_size, drop_remainder=False)
        if self._config.limit_eval is not None:
            dataset = dataset.take(self._config.limit_eval)
        return read_ahead(dataset, for_long=False)
