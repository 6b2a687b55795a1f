"""Evaluates a model: each example counts exactly once, and training is not affected.

The variables that an evaluation writes are restored afterwards. sets.py creates the sets of
evaluation data, step.py adds a batch to the metrics of a set, and criteria.py compares the values
of evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from ctl_core.cluster.sync import LoopStatus
from ctl_core.compat import FunctionGraph, add_called_ops
from ctl_core.evaluation.sets import SINGLE_SET, EvaluationData, EvaluationSet
from ctl_core.evaluation.step import define_run_steps
from ctl_core.hooks.recording import Recording, read_flags
from ctl_core.model.components import Components
from ctl_core.model.copies import ReplicaCopies
from ctl_core.model.leaves import describe_written
from ctl_core.model.logical_limits import refuse_states
from ctl_core.model.metrics import read_results
from ctl_core.numerics.variables import is_summed, unwrap
from ctl_core.run.settings import Config
from ctl_core.schedule import StepsPerCall

# The maximum number of batches in a graph call. StepsPerCall adjusts the actual number, so that a
# call takes about a second.
MOST_BATCHES = 100_000

Sync = Callable[[LoopStatus], LoopStatus]


class Evaluation:
    """Evaluates all sets of evaluation data, each with its own graph and metrics.

    Attributes:
        sets: the sets by name; a single set has the name ``SINGLE_SET``
        arrays: the results of the last evaluation that are not scalars, such as a confusion matrix
        problem: the reason why the values of the last evaluation are meaningless; "" if there is
            none
    """

    def __init__(
        self, components: Components, recording: Recording, sets: dict[str, EvaluationSet]
    ) -> None:
        self.sets = sets
        self.arrays: dict[str, np.ndarray] = {}
        self.problem = ""
        self._components = components
        self._recording = recording
        self._frozen: list[bool] | None = None
        self._shares = True

    @property
    def names(self) -> list[str]:
        """The names of the values that ``evaluate`` returns.

        Examples are ``loss``, or ``NAME/loss`` if the set has the name NAME.
        """
        return [
            name_value(set_name, name)
            for set_name, evaluation_set in self.sets.items()
            for name in ("loss", *evaluation_set.names)
        ]

    def list_passing_variables(self) -> list[tf.Variable]:
        """Returns the variables that each evaluation resets, so that no checkpoint needs them."""
        return [
            unwrap(variable)
            for evaluation_set in self.sets.values()
            for metric in evaluation_set.accumulators
            for variable in metric.variables
        ]

    def trace(self) -> None:
        """Traces the graphs of all sets without running them.

        Does nothing if the graphs have been traced already, and the same layers were frozen then as
        now. (Frozen layers have no regularization losses.)
        """
        frozen = read_flags(self._recording)
        if frozen == self._frozen:
            return
        self._frozen = frozen
        for evaluation_set in self.sets.values():
            evaluation_set.exchanges = False
            evaluation_set.written = []
            evaluation_set.drawn = set()
            shape = self._components.shape
            if shape.logical_replicas is not None:
                refuse_states(self._components.hooks.create_metrics, evaluation_set.metrics)
            graph = self._trace_set(evaluation_set)
            # Only the traced graph shows which variables besides metrics are written, and which
            # generators are drawn from. The new graph combines what leaves write, and sets the
            # states of the generators for each leaf.
            if shape.has_evaluation_leaves and self._note_written(evaluation_set, graph):
                graph = self._trace_set(evaluation_set)
            # Only the traced graph shows whether hooks or layers exchange values between replicas.
            # If they do, every step must check first that each process has a batch.
            if _has_collectives(graph):
                evaluation_set.exchanges = True
                graph = self._trace_set(evaluation_set)
            evaluation_set.copies = self._copy_written_variables(graph)

    def _trace_set(self, evaluation_set: EvaluationSet) -> FunctionGraph:
        """Traces the graph function of a set, and returns its graph."""
        evaluation_set.run_steps = define_run_steps(self._components, evaluation_set, self._shares)
        return evaluation_set.run_steps.get_concrete_function().graph

    def list_graphs(self) -> list[FunctionGraph]:
        """Returns the graphs that ``trace`` has traced, one for each set."""
        return [
            evaluation_set.run_steps.get_concrete_function().graph
            for evaluation_set in self.sets.values()
            if evaluation_set.run_steps is not None
        ]

    def _note_written(self, evaluation_set: EvaluationSet, graph: FunctionGraph) -> bool:
        """Notes which variables leaves write, and which random generators they draw from.

        Returns:
            True if there are any.
        """
        shape = self._components.shape
        generators = set(map(id, self._components.generators.variables))
        divided = set()
        for variable in self.list_passing_variables():
            # A metric that was created in create_model has the same value on all replicas.
            if is_summed(variable) or shape.logical_replicas is not None:
                divided.add(id(variable))
        written = []
        for variable in self._recording.find_written(graph, self._components.strategy):
            if id(variable) in generators:
                evaluation_set.drawn.add(id(variable))
            elif id(variable) not in divided:
                written.append(variable)
        evaluation_set.written = describe_written(self._recording, written)
        return bool(evaluation_set.written or evaluation_set.drawn)

    def _copy_written_variables(self, graph: FunctionGraph) -> ReplicaCopies:
        """Creates copies of the variables that an evaluation writes and that training reads.

        Metrics are not copied and restored, so that hooks can read them after the evaluation.
        """
        return ReplicaCopies(self._components.strategy, self._list_written(graph))

    def _list_written(self, graph: FunctionGraph) -> list[tf.Variable]:
        """Returns the variables that an evaluation writes, except the variables of metrics."""
        passing = {id(variable) for variable in self.list_passing_variables()}
        written = self._recording.find_written(graph, self._components.strategy)
        return [variable for variable in written if id(variable) not in passing]

    def _count_most_batches(self, evaluation_set: EvaluationSet) -> int:
        """Returns the maximum number of batches in a graph call.

        Within a graph call, a collective between processes requires the same shapes in each step.
        If hooks exchange values, the last batch may change these shapes, so a graph call evaluates
        only one batch. Logical replicas always exchange values of the same shapes.
        """
        is_logical = self._components.shape.logical_replicas is not None
        if evaluation_set.exchanges and not is_logical:
            return 1
        return MOST_BATCHES

    def _find_problem(self, set_name: str, evaluation_set: EvaluationSet) -> str:
        """Returns the reason why the values of a set are meaningless; "" if there is none."""
        counted = float(evaluation_set.examples.result())
        lacks_weight = evaluation_set.is_weighted and not evaluation_set.has_weight
        if counted > 0 and not lacks_weight:
            return ""
        hooks = self._components.hooks
        where = ""
        if set_name != SINGLE_SET:
            where = f" of the set '{set_name}'"
        if counted > 0:
            return (
                f"{hooks.create_eval_dataset}: the sample weights of all examples{where} are 0 "
                "or NaN, so the values of an evaluation are meaningless; return positive "
                "weights."
            )
        if hooks.batch_weight is not None:
            return (
                f"{hooks.batch_weight}: the weights of all batches{where} add up to {counted:g}, "
                "so an evaluation has no mean loss; return the weight of each batch."
            )
        return (
            f"{hooks.create_eval_dataset}: an evaluation{where} has {counted:g} examples, so "
            "its values are meaningless; return a dataset with examples."
        )

    def evaluate(self, sync: Sync = lambda status: status) -> dict[str, float] | None:
        """Evaluates each set of evaluation data once.

        Args:
            sync: a function that is called about once a second. In a cluster, it returns the status
                that all processes agree on. A signal in this status ends the evaluation early

        Returns:
            The values by the names in ``names``, or None if the evaluation ended early. A loss is
            the sum over all examples, divided by the number of examples. If the user has defined
            ``batch_weight``, it is divided by the sum of the weights of the batches instead. If
            this divisor is not positive, ``problem`` explains why.
        """
        self.trace()
        self.problem = ""
        values: dict[str, float] = {}
        self.arrays = {}
        for set_name, evaluation_set in self.sets.items():
            assert evaluation_set.copies is not None
            with evaluation_set.copies.put_back_after():
                is_complete = add_all_batches(
                    evaluation_set, sync, self._count_most_batches(evaluation_set)
                )
                if not is_complete:
                    return None
                values[name_value(set_name, "loss")] = _read_mean_loss(evaluation_set)
                self.problem = self.problem or self._find_problem(set_name, evaluation_set)
                results = read_results(evaluation_set.metrics)
            for name, scalar in results.scalars.items():
                values[name_value(set_name, name)] = scalar
            for name, array in results.arrays.items():
                self.arrays[name_value(set_name, name)] = array
        return values

    def repeat_failure(self) -> None:
        """Evaluates again with a function for each device, whose errors say which op has failed."""
        self._shares = False
        self._frozen = None
        self.evaluate()


def name_value(set_name: str, name: str) -> str:
    """Returns the full name of a value: ``loss`` in a single set, ``NAME/loss`` in a set NAME."""
    if set_name == SINGLE_SET:
        return name
    return f"{set_name}/{name}"


def _has_collectives(graph: tf.Graph) -> bool:
    """Returns whether replicas exchange values in a graph."""
    operations = add_called_ops(graph.get_operations())
    return any(op.type.startswith("Collective") for op in operations)


def add_all_batches(evaluation_set: EvaluationSet, sync: Sync, most: int) -> bool:
    """Resets the metrics and sums of a set, and adds all batches of the set to them.

    Args:
        evaluation_set: the set
        sync: see ``Evaluation.evaluate``
        most: the maximum number of batches in a graph call

    Returns:
        True if all batches were added; False if a signal ended the evaluation early.
    """
    assert evaluation_set.run_steps is not None
    for metric in evaluation_set.accumulators:
        metric.reset_state()
    evaluation_set.has_weight = False
    iterator = iter(evaluation_set.make())
    steps_per_call = StepsPerCall(most)
    while True:
        with steps_per_call.measure(steps_per_call.limit) as steps:
            progress = evaluation_set.run_steps(iterator, tf.constant(steps, tf.int64))
            has_more = bool(progress.has_more)
        status = LoopStatus(
            steps_per_call=steps_per_call.limit,
            data=int(progress.digest),
            has_weight=float(progress.weight) > 0,
        )
        status = sync(status)
        evaluation_set.has_weight |= status.has_weight
        steps_per_call.limit = status.steps_per_call
        if not has_more:
            return True
        if status.signal:
            return False


def _read_mean_loss(evaluation_set: EvaluationSet) -> float:
    """Returns the mean loss after an evaluation; NaN if there were no examples."""
    examples = float(evaluation_set.examples.result())
    if examples == 0:
        return math.nan
    return float(evaluation_set.total.result()) / examples


def create_evaluation(
    components: Components, config: Config, recording: Recording
) -> Evaluation | None:
    """Creates the evaluation from the hooks ``create_eval_dataset`` and ``create_metrics``.

    Returns:
        The evaluation, or None if the user has not defined ``create_eval_dataset``.

    Raises:
        SetupError: a hook returned data that cannot be evaluated, or the user has defined
            ``after_eval`` but not ``create_eval_dataset``.
    """
    hooks = components.hooks
    if hooks.create_eval_dataset is None:
        if hooks.after_eval:
            raise hooks.after_eval[0].reject(
                "there is no evaluation after which it could run; write create_eval_dataset."
            )
        return None
    data = EvaluationData(components, config, hooks.create_eval_dataset)
    results = data.call_hook()
    sets = {name: data.create_set(name, results) for name in results.sets}
    return Evaluation(components, recording, sets)
