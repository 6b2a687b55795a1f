"""Traces hooks on placeholders, before training.

A traced hook creates all its variables, so that they can be recorded and saved. The graphs show
which variables a step writes, and whether the processes of a cluster or the hooks would train wrong
weights. The graphs are never run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import NamedTuple

import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import count_local_replicas
from ctl_core.cluster.replica_contexts import NO_EXCHANGE, FirstReplica
from ctl_core.cluster.sync import Cluster
from ctl_core.evaluation.evaluate import Evaluation
from ctl_core.evaluation.step import add_batch
from ctl_core.hooks.hooks import Hooks
from ctl_core.hooks.recording import Recording, unfreeze
from ctl_core.input.batches import Share, find_first_replica, make_placeholders
from ctl_core.model.backward import (
    BackwardOp,
    SpecialOps,
    add_backward_pass,
    find_special_ops,
    list_differentiated,
    list_own_gradients,
    list_unjudged,
)
from ctl_core.model.components import (
    SINGLE_OBJECTIVE,
    Components,
    ForwardComponents,
    StepContext,
    TraceContext,
    WrittenVariable,
)
from ctl_core.model.copies import list_local_components
from ctl_core.model.fingerprint import compare_forward
from ctl_core.model.forward import ReplicaObjective, compute_objectives, forward_backward, run_model
from ctl_core.model.leaves import describe_written
from ctl_core.model.logical_limits import refuse_layers, refuse_stateful_layers
from ctl_core.model.loss_calls import (
    is_exchange,
    locate_op,
    makes_exchange,
    refuse_calls_of_collectives,
    refuse_exchanges,
    refuse_scaled_losses,
)
from ctl_core.model.metrics import name_scalars, update_train_metrics
from ctl_core.model.sample_weights import refuse_weights_in_loss
from ctl_core.model.shared_functions import find_obstacle
from ctl_core.numerics.randomness import find_drawing_layers
from ctl_core.numerics.reduction import PIECES
from ctl_core.numerics.variables import name_variable, trainable_variables, unwrap
from ctl_core.run.errors import HookFailed, SetupError, read_calls
from ctl_core.run.settings import Config
from ctl_core.types import Batch, BatchSpec, Variable, VariablesByObjective
from ctl_core.update import call_update_pre


class TracedForward(NamedTuple):
    """The results of tracing the forward hooks once.

    Attributes:
        variables: the variables to train by objective, including those of frozen layers
        weights: the trainable variables of the model
        left_out: the names of the trainable variables of the loss that belong to no objective
        untracked: the names of the trainable tf.Variables of Keras layers that belong to no
            objective, although the loss depends on them
        written: the variables that the forward pass or the backward pass writes
        drawing_layers: the kinds of layers that draw random numbers
        scalar_losses: the objectives whose loss is a single number per batch
        unchanged_losses: the objectives whose loss ``grad_pre`` returned unchanged
        logged: the names of the logged parts of the loss
        own_gradients, unjudged_gradients, leaf_obstacle: see ``Components``
        is_weighted: whether ``grad_pre`` multiplies the loss by the sample weights of the batch
    """

    variables: VariablesByObjective
    weights: list[Variable]
    left_out: list[str]
    untracked: list[str]
    written: tuple[WrittenVariable, ...]
    drawing_layers: list[str]
    scalar_losses: frozenset[str]
    unchanged_losses: frozenset[str]
    logged: list[str]
    own_gradients: tuple[str, ...]
    unjudged_gradients: tuple[str, ...]
    leaf_obstacle: str
    is_weighted: bool


@dataclasses.dataclass
class ScratchTracer:
    """Traces the hooks of a run in graphs that are never run.

    Attributes:
        hooks: the hooks
        config: the settings
        strategy: the strategy whose replicas train
        cluster: compares the forward passes of all processes
        recording: records the variables and layers that the hooks create
        share_spec: the specification of the batch of a share
        trains: whether the run is built to be trained rather than to be read
    """

    hooks: Hooks
    config: Config
    strategy: tf.distribute.Strategy
    cluster: Cluster
    recording: Recording
    share_spec: BatchSpec
    trains: bool

    def trace_forward(self, forward: ForwardComponents) -> TracedForward:
        """Runs the forward hooks once on placeholders, so that all their variables exist.

        No layer is frozen meanwhile, because an optimizer also needs to know the variables that
        hooks unfreeze later.
        """
        recording = self.recording
        objectives: list[tuple[str, ReplicaObjective]] = []
        is_weighted = False
        scratch = self._scratch("create_model", self.share_spec)
        with unfreeze(recording), scratch as (graph, batch):
            for turn in TraceContext(forward).list_turns():
                result = compute_objectives(turn, batch, 1)
                objectives += result.objectives.items()
                is_weighted |= result.is_weighted
                if self.trains and result.is_weighted:
                    refuse_weights_in_loss(self.hooks, self.hooks.grad_pre, batch, result.loss)
                with recording.record_as("create_train_metrics"):
                    update_train_metrics(turn, result, None)
            weights = trainable_variables(forward.train_model)
            operations = list(compat.add_called_ops(graph.get_operations()))
            special = find_special_ops(operations)
            backward_ops = self._trace_backward(graph, special, objectives)
            untracked = self._list_untracked(graph, forward, objectives)
        compare_forward(self.cluster, self.hooks, operations)
        refuse_scaled_losses(self.hooks, operations)
        if self._is_logical:
            refuse_layers(self.hooks, recording.layers)
        if forward.shape.has_several_leaves:
            refuse_stateful_layers(self.hooks, recording.layers, self._explain_single_leaf())
        self._refuse_exchanges(operations, backward_ops)
        self._refuse_sums_of_sums(graph)
        variables = self._collect_variables(objectives, weights)
        # If replicas exchange values, the leaves that they compute at the same time write equal
        # values, but the leaves of a replica do not.
        has_rounds = self.config.accumulate_steps > 1
        averages_floats = has_rounds and makes_exchange(operations)
        written = self._find_written(graph, forward, averages_floats)
        return TracedForward(
            variables=variables,
            weights=weights,
            left_out=list_left_out(forward, variables, written),
            untracked=untracked,
            written=written,
            drawing_layers=find_drawing_layers(recording.layers, self._find_drawn(graph)),
            scalar_losses=frozenset(name for name, objective in objectives if objective.is_scalar),
            unchanged_losses=frozenset(
                name for name, objective in objectives if objective.has_unchanged_loss
            ),
            logged=[name for _, objective in objectives for name in objective.logged],
            own_gradients=list_own_gradients(self.hooks, special, backward_ops),
            unjudged_gradients=list_unjudged(self.hooks, backward_ops),
            leaf_obstacle=self._find_leaf_obstacle(operations),
            is_weighted=is_weighted,
        )

    def _find_leaf_obstacle(self, operations: list[tf.Operation]) -> str:
        """Returns why leaves cannot be shared between devices; "" if the forward pass shows none.

        A leaf would otherwise be traced in vain once, because tracing it shows the reason, too.

        Args:
            operations: the ops of the forward pass
        """
        if self.strategy.num_replicas_in_sync > 1 and makes_exchange(operations):
            return "replicas exchange values in it"
        return find_obstacle(operations, count_local_replicas(self.strategy) > 1)

    def _trace_backward(
        self,
        graph: compat.FunctionGraph,
        special: SpecialOps,
        objectives: list[tuple[str, ReplicaObjective]],
    ) -> list[BackwardOp]:
        """Adds the backward pass to a forward pass with its own gradient functions.

        Args:
            graph: the graph of the forward pass, the default graph
            special: the ops of the forward pass with their own gradient functions
            objectives: the objectives of all turns

        Returns:
            The ops of the backward pass; an empty list if there are only built-in gradients.
        """
        if not any(special):
            return []
        # Variables that the backward pass creates are named like those that update_pre creates, as
        # in the checkpoints of earlier versions, which first traced the backward pass with it.
        with self.recording.record_as("update_pre"):
            return add_backward_pass(
                graph, [objective for _, objective in objectives], self.strategy
            )

    def _list_untracked(
        self,
        graph: compat.FunctionGraph,
        forward: ForwardComponents,
        objectives: list[tuple[str, ReplicaObjective]],
    ) -> list[str]:
        """Returns the names of trainable tf.Variables that are not trained because of Keras.

        Keras does not track a plain ``tf.Variable`` that a layer, model or loss has as an
        attribute, so ``trainable_variables`` does not contain it.

        Args:
            graph: the graph of the forward pass, the default graph
            forward: the components of the forward pass
            objectives: the objectives of all turns
        """
        recording = self.recording
        known: list[Variable] = []
        known += [variable for layer in recording.layers for variable in layer.variables]
        known += [variable for _, each in objectives for variable in each.variables]
        known += trainable_variables(forward.train_loss)
        known += recording.find_written(graph, self.strategy)  # the forward pass changes them
        ids = {id(unwrap(variable)) for variable in known}
        others = [
            variable
            for variable in recording.variables.values()
            if variable.trainable and id(variable) not in ids
        ]
        of_objectives = [objective for _, objective in objectives]
        untracked = list_differentiated(graph, of_objectives, others, self.strategy)
        return list(map(name_variable, untracked))

    def _refuse_exchanges(
        self, operations: list[tf.Operation], backward_ops: list[BackwardOp]
    ) -> None:
        """Rejects exchanges that cannot be combined with the settings."""
        if self._is_logical:
            refuse_calls_of_collectives(self.hooks, backward_ops, NO_EXCHANGE)
        if self.config.accumulate_steps > 1:
            refuse_exchanges(self.hooks, operations)
            of_losses = [op for op in backward_ops if not op.is_in_model]
            refuse_exchanges(self.hooks, of_losses, "gradient")

    def _refuse_sums_of_sums(self, graph: compat.FunctionGraph) -> None:
        """Rejects ``all_reduce`` of a variable that is already a sum over all replicas.

        Raises:
            SetupError: it has the aggregation SUM; the message names the variable and the line.
        """
        if self.strategy.num_replicas_in_sync == 1:
            return
        recording = self.recording
        by_handle = {
            id(component.handle): variable
            for variable in recording.variables.values()
            if recording.aggregations.get(id(variable)) == tf.VariableAggregation.SUM
            for component in self.strategy.experimental_local_results(variable)
        }
        if not by_handle:
            return
        captured = {inner.op.name: by_handle.get(id(outer)) for outer, inner in graph.captures}
        for op in graph.get_operations():
            read = op.inputs[0].op if op.type == "Identity" else None
            if read is None or read.type != "ReadVariableOp":
                continue
            variable = captured.get(read.inputs[0].op.name)
            if variable is not None and is_exchange(read_calls(op)):
                raise SetupError(
                    f"{locate_op(self.hooks, op)}: all_reduce of {name_variable(variable)}, which "
                    "has the aggregation SUM and therefore is the sum over all replicas already; "
                    "use its value."
                )

    def trace_update(self, components: Components) -> list[Variable]:
        """Runs ``update_pre`` on placeholders, so that it creates its variables.

        Returns:
            The variables that a step trains as long as no hook freezes or unfreezes layers.
        """
        kept = frozenset(PIECES) & {*self.hooks.update_pre.arguments}
        trained: dict[int, Variable] = {}
        with self._scratch("update_pre", self.share_spec) as (graph, batch):
            for turn in TraceContext(components).list_turns():
                contribution, variables = forward_backward(turn, 1, kept, Share(batch))
                call_update_pre(turn, 1, variables, contribution, contribution)
                for objective_variables in variables.values():
                    trained |= {id(unwrap(variable)): variable for variable in objective_variables}
            components.generators.drawn.update(self._find_drawn(graph))
        return list(trained.values())

    def trace_evaluation(self, components: Components, evaluation: Evaluation | None) -> None:
        """Evaluates placeholders, so that eval_model and the metrics create all their variables."""
        context = TraceContext(components)
        if evaluation is None:
            with self._scratch_evaluation(context, self.share_spec):
                pass
            return
        for evaluation_set in evaluation.sets.values():
            with self._scratch_evaluation(context, evaluation_set.spec) as batch:
                loss = add_batch(context, evaluation_set, batch, None)
                if self.trains and evaluation_set.is_weighted:
                    refuse_weights_in_loss(self.hooks, self.hooks.eval_pre, batch, loss)
                evaluation_set.names = [
                    scalar
                    for name, metric in evaluation_set.metrics.items()
                    for scalar in name_scalars(name, metric.result())
                ]

    @contextlib.contextmanager
    def _scratch_evaluation(self, context: StepContext, spec: BatchSpec) -> Iterator[Batch]:
        """Calls ``eval_model`` in a graph that is never run, and yields the batch it was called on.

        On exit, the graph is rejected if it scales a loss.
        """
        with compat.run_layers(False), self._scratch("create_metrics", spec) as (graph, batch):
            if context.components.eval_model is not None:
                with self.recording.record_as("create_eval_model"):
                    run_model(context, batch, training=False)
            yield batch
        refuse_scaled_losses(self.hooks, compat.add_called_ops(graph.get_operations()))

    @contextlib.contextmanager
    def _scratch(self, hook: str, spec: BatchSpec) -> Iterator[tuple[compat.FunctionGraph, Batch]]:
        """Yields a graph for tracing hooks without running any op, and a placeholder batch.

        Variables that are created in this graph exist outside of it as well. Variables that the
        graph reads but that were created elsewhere, such as at import, are recorded. The graph does
        not belong to a tf.function, because random generators cannot be created there on several
        replicas.

        Args:
            hook: the name of the hook under which new variables are recorded
            spec: the specification of the batch
        """
        recording = self.recording
        strategy = self.strategy
        with (
            recording.record_as(hook),
            FirstReplica(strategy, find_first_replica(strategy)),
            compat.make_scratch_graph("build").as_default() as graph,
        ):
            try:
                yield graph, make_placeholders(spec)
            except HookFailed:
                self._refuse_exchanges_so_far(graph)
                raise
        components = list_local_components(strategy, list(recording.variables.values()))
        known = {id(component) for component in components}
        for variable in compat.find_captured_variables(graph, strategy):
            if id(variable) not in known:
                recording.add(variable, "elsewhere")

    def _refuse_exchanges_so_far(self, graph: tf.Graph) -> None:
        """Rejects exchanges between replicas in a graph whose tracing failed.

        A value that a single replica or micro-batch exchanges has another shape than expected, so
        the failure may only be a consequence.
        """
        operations = list(compat.add_called_ops(graph.get_operations()))
        if self._is_logical:
            refuse_calls_of_collectives(self.hooks, operations, NO_EXCHANGE)
        if self.config.accumulate_steps > 1:
            refuse_exchanges(self.hooks, operations)

    def _collect_variables(
        self, objectives: list[tuple[str, ReplicaObjective]], weights: list[Variable]
    ) -> VariablesByObjective:
        """Returns the variables of each objective; a single objective includes all weights."""
        by_identity: dict[str, dict[int, Variable]] = {}
        for name, objective in objectives:
            variables = list(objective.variables)
            if name == SINGLE_OBJECTIVE:
                variables += weights
            identified = {id(variable): variable for variable in variables}
            by_identity.setdefault(name, {}).update(identified)
        collected = {name: list(variables.values()) for name, variables in by_identity.items()}
        for name, variables in collected.items():
            problem = find_untrainable(variables, self.strategy)
            if problem is not None:
                returned = f"returned for {name!r}" if name else "returned"
                raise self.hooks.grad_pre.reject(f"{returned} {problem}.")
        return collected

    def _find_drawn(self, graph: compat.FunctionGraph) -> set[int]:
        """Returns the ids of the variables of random generators that a graph reads."""
        captured = {id(outer) for outer, _ in graph.captures}
        local_results = self.strategy.experimental_local_results
        return {
            id(state)
            for state in (*self.recording.generators, *self.recording.tf_generators)
            if any(id(component.handle) in captured for component in local_results(state))
        }

    def _find_written(
        self, graph: compat.FunctionGraph, forward: ForwardComponents, averages_floats: bool
    ) -> tuple[WrittenVariable, ...]:
        """Returns the variables that a graph writes, except random generators and metrics.

        Args:
            graph: the graph of the forward pass
            forward: the components of the forward pass
            averages_floats: see ``describe_written``
        """
        recording = self.recording
        ignored = {*map(id, recording.generators), *map(id, recording.tf_generators)}
        ignored |= self._find_parts(forward)
        variables = [
            variable
            for variable in recording.find_written(graph, self.strategy)
            if id(variable) not in ignored
        ]
        for variable in variables:
            if variable.dtype == tf.string and forward.shape.has_several_leaves:
                raise self.hooks.create_model.reject(
                    f"a step assigns {name_variable(variable)}, a string variable, which "
                    "replicas cannot exchange; use a number instead."
                )
        return tuple(describe_written(recording, variables, averages_floats))

    def _find_parts(self, forward: ForwardComponents) -> set[int]:
        """Returns the ids of the variables of training metrics whose parts are added up when read.

        A metric that was created in another hook has the same value on all replicas. Its
        changes are combined after each step, unless logical replicas compute the leaves.
        """
        created_by_hook = {
            id(variable)
            for name, variable in self.recording.variables.items()
            if name.startswith("create_train_metrics/")
        }
        of_metrics = {
            id(unwrap(variable))
            for metric in forward.train_metrics.values()
            for variable in metric.variables
        }
        if self._is_logical:
            return of_metrics
        return of_metrics & created_by_hook

    def _explain_single_leaf(self) -> str:
        """Returns what to do so that a batch is computed as a whole."""
        if self._is_logical:
            return "logical_replicas"
        if self.config.accumulate_steps > 1:
            return "accumulate_steps"
        return "train on one device"

    @property
    def _is_logical(self) -> bool:
        """Whether the run uses logical replicas."""
        return self.config.logical_replicas is not None


def list_left_out(
    forward: ForwardComponents,
    variables: VariablesByObjective,
    written: Collection[WrittenVariable],
) -> list[str]:
    """Returns the names of the trainable variables of a loss that no step changes.

    Args:
        forward: the components of the forward pass
        variables: the variables to train by objective
        written: the variables that the forward pass writes, which are not trained but do change
    """
    changed = {id(unwrap(entry.variable)) for entry in written}
    for trained in (*variables.values(), trainable_variables(forward.train_model)):
        changed |= {id(unwrap(variable)) for variable in trained}
    return [
        name_variable(variable)
        for variable in trainable_variables(forward.train_loss)
        if id(unwrap(variable)) not in changed
    ]


def find_untrainable(
    variables: Collection[Variable], strategy: tf.distribute.Strategy
) -> str | None:
    """Returns why the variables of an objective cannot be trained; None if they can.

    The returned text names the first such variable.

    Args:
        variables: the variables of the objective
        strategy: the strategy whose replicas train
    """
    if not variables:
        return (
            "there is nothing to train: Keras tracks variables that are created by "
            "add_weight, or by layers assigned in __init__ or build, but no plain tf.Variable"
        )
    for variable in variables:
        reason = _explain_untrainable(variable, strategy)
        if reason is not None:
            return f"{name_variable(variable)}, which {reason}"
    return None


def _explain_untrainable(variable: Variable, strategy: tf.distribute.Strategy) -> str | None:
    """Returns why a variable cannot be trained; None if it can."""
    is_created_here = strategy.extended.variable_created_in_scope
    if strategy.num_replicas_in_sync > 1 and not is_created_here(unwrap(variable)):
        return (
            "was created outside the hooks, so the replicas have no copies of it; create it "
            "in create_model"
        )
    if tf.as_dtype(variable.dtype) == tf.float16:
        return "has the dtype float16, in which most updates are rounded away; use mixed_float16"
    if getattr(variable, "overwrite_with_gradient", False):  # quantize("float8") sets this
        return "has a gradient that overwrites it, and replicas cannot add up such gradients"
    return None
