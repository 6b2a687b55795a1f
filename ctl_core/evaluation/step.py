"""Adds a batch of an evaluation to the metrics and sums of its set, in a graph.

A batch is divided among the replicas as in training. If the last batch has no rows for a replica,
the replica computes on a placeholder, and its results are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from ctl_core.cluster.collectives import (
    all_reduce,
    count_local_replicas,
    find_offset_in_share,
    place_rows,
)
from ctl_core.cluster.replica_contexts import enter_logical_replica, weigh_by_rows
from ctl_core.compat import get_seed_generator, run_layers, run_replica
from ctl_core.evaluation.sets import EvaluationSet
from ctl_core.hooks.defaults import find_sample_weight, note_weighted, uses_weights
from ctl_core.input.batches import (
    LocatedBatch,
    Share,
    add_to_digest,
    count_rows,
    distribute_shares,
    find_first_replica,
    list_sizes,
    take_share,
)
from ctl_core.model.components import Components, ForwardContext, TraceContext
from ctl_core.model.forward import compute_loss, run_model, sum_loss, weigh_batch
from ctl_core.model.generator_states import EVALUATION, GeneratorStates
from ctl_core.model.leaf_sum import BucketLayout, DeviceResult, LeafResult, LeafSum
from ctl_core.model.leaves import LeafVariables, list_parts, weigh_leaf
from ctl_core.model.logical_exchange import get_device_number
from ctl_core.model.metrics import update_if, update_metrics
from ctl_core.model.shared_functions import SharedFunction, hide_numbers
from ctl_core.numerics.packing import BUCKET_BYTES, GradientPacking
from ctl_core.numerics.reduction import sum_over_replicas
from ctl_core.types import Batch, Count, GraphFunction, PerReplica, Structure


class EvaluationProgress(NamedTuple):
    """The progress of an evaluation within a graph call.

    Attributes:
        has_more: whether there may be more batches, a bool scalar
        digest: a checksum of the batches, an int64 scalar. It is the same on all processes if they
            read the same data, and 0 if there is a single process
        weight: the sum of the absolute sample weights, in which NaN counts as 0, a float64 scalar
    """

    has_more: tf.Tensor
    digest: tf.Tensor
    weight: tf.Tensor


def define_run_steps(
    components: Components, evaluation_set: EvaluationSet, shares: bool = True
) -> GraphFunction:
    """Returns a graph function that adds batches to the metrics and sums of a set.

    The graph function takes an iterator, and the maximum number of batches to add, an int64 scalar.
    It returns an ``EvaluationProgress``.

    Args:
        components: the components of the run
        evaluation_set: the set
        shares: whether functions are traced once for all devices
    """
    step = EvaluationStep(components, evaluation_set, shares)
    iterator_spec = tf.data.IteratorSpec(evaluation_set.element_spec)
    signature = [iterator_spec, tf.TensorSpec([], tf.int64)]

    @tf.function(autograph=False, input_signature=signature)
    def run_steps(iterator: tf.data.Iterator, steps: tf.Tensor) -> EvaluationProgress:
        def take_next(
            done: tf.Tensor, progress: EvaluationProgress
        ) -> tuple[tf.Tensor, EvaluationProgress]:
            return done + 1, step.take(iterator, progress)

        digest = tf.constant(0, tf.int64)
        if step.has_peers:  # a different start value makes the checksum cover different rows
            digest = tf.identity(components.step_variable)
        start = EvaluationProgress(tf.constant(True), digest, tf.constant(0.0, tf.float64))
        _, progress = tf.while_loop(
            lambda done, progress: (done < steps) & progress.has_more,
            take_next,
            (tf.constant(0, tf.int64), start),
        )
        return progress

    return run_steps


class EvaluationStep:
    """Adds one batch to the metrics and sums of a set, in a graph.

    Attributes:
        has_peers: whether there are other processes, which should read the same batches
    """

    def __init__(self, components: Components, evaluation_set: EvaluationSet, shares: bool) -> None:
        self._components = components
        self._set = evaluation_set
        self._shares = shares
        self._local_replicas = count_local_replicas(components.strategy)
        self.has_peers = components.shape.replicas > self._local_replicas
        self._seed_generator = get_seed_generator()

    def take(self, iterator: tf.data.Iterator, progress: EvaluationProgress) -> EvaluationProgress:
        """Draws a batch, if there is one, and adds it to the metrics and sums.

        Args:
            iterator: the iterator over the batches
            progress: the progress after the previous step

        Returns:
            The progress after this step.
        """
        drawn = iterator.get_next_as_optional()
        has_batch = drawn.has_value()

        def stop() -> EvaluationProgress:
            # If only some processes have a batch, their checksums differ after this addition, and
            # the caller reports the difference.
            digest = progress.digest + tf.cast(has_batch, tf.int64)
            return progress._replace(has_more=tf.constant(False), digest=digest)

        return tf.cond(
            self._have_all(has_batch),
            lambda: self._add_global_batch(drawn.get_value(), progress),
            stop,
        )

    def _have_all(self, has_batch: tf.Tensor) -> tf.Tensor:
        """Returns whether the next batch can be added.

        If the processes exchange values in a step, every process must have a batch, because a
        process with a batch would wait forever for a process without one. If they do not exchange
        values, it is sufficient that this process has a batch.
        """
        if not (self._set.exchanges and self.has_peers):
            return has_batch
        strategy = self._components.strategy
        count = strategy.run(count_replicas_with_batch, (has_batch,))
        replicas: tf.Tensor = strategy.experimental_local_results(count)[0]
        return replicas == self._components.shape.replicas

    def _add_global_batch(self, element: Batch, progress: EvaluationProgress) -> EvaluationProgress:
        """Adds a global batch, or this process's rows of it; returns the progress afterwards."""
        if self._components.shape.logical_replicas is not None:
            self._add_logical_replicas(element)
        else:
            self._add_replicas(element)
        batch = self._locate(element)
        if self.has_peers:
            compared = batch.rows
            if self._set.selection is not None:
                compared = list_sizes(batch.rows, batch.examples)
            with tf.device("CPU:0"):
                progress = progress._replace(digest=add_to_digest(progress.digest, compared))
        return self._add_weight(batch.rows, progress)

    def _locate(self, element: Batch) -> LocatedBatch:
        """Returns where the rows of an element of the dataset are in the global batch."""
        if not self._components.shape.by_rows:
            return LocatedBatch(element, 1)  # the element is the share of one replica
        if self._set.selection is None:
            return LocatedBatch(element, count_rows(element))
        first, _ = self._set.selection.find_rows(element.examples)
        return LocatedBatch(element.rows, element.examples, first)

    def _add_weight(self, batch: Batch, progress: EvaluationProgress) -> EvaluationProgress:
        """Adds the absolute sample weights of a batch, if its loss was multiplied by them."""
        weight = find_sample_weight(batch)
        if not self._set.is_weighted or weight is None:
            return progress
        size = tf.abs(tf.cast(weight, tf.float64))
        size = tf.reduce_sum(tf.where(tf.math.is_nan(size), tf.zeros_like(size), size))
        return progress._replace(weight=progress.weight + size)

    def _add_replicas(self, element: Batch) -> None:
        """Adds the shares of this process's replicas, each on its own replica."""
        strategy = self._components.strategy
        first = find_first_replica(strategy)
        batch = self._locate(element)
        shares = [self._take_share(batch, first + i) for i in range(self._local_replicas)]
        variables = LeafVariables(self._set.written, takes_first=True)
        leaf = SharedFunction(partial(self._compute_share, variables), strategy)
        if not self._shares:
            leaf.obstacle = "an error is looked for"
        step = self._components.step_variable.read_value()
        examples = batch.examples

        def add(share: Share) -> None:
            before = variables.read()
            changes, _ = leaf(step, hide_numbers(leaf, share), examples, before)
            if self._set.drawn:
                assert self._set.batches is not None
                self._set.batches.update_state(1)
            totals = sum_over_replicas(changes, self._components.shape.replicas)
            variables.apply_changes(before, totals)

        leaf.run_again_if_not_shareable(
            partial(strategy.run, add, args=(distribute_shares(strategy, shares),))
        )

    def _compute_share(
        self,
        variables: LeafVariables,
        _: tf.Tensor,
        share: Share,
        examples: Count,
        before: list[tf.Tensor],
    ) -> tuple[list[tf.Tensor], None]:
        """Adds the share of one replica, and returns the changes of variables.

        Args:
            variables: the variables that replicas write, except those of metrics
            share: the share
            examples: the number of examples in the batch
            before: the values of the variables before the batch
        """
        if self._set.drawn:
            self._assign_states(share.leaf)
        self._add_share(share)
        weight = weigh_leaf(share, examples, self._components.shape.evaluation_leaves)
        return variables.find_changes(before, share, weight), None

    def _assign_states(self, index: Count) -> None:
        """Sets the states of the random generators for a leaf of the next batch, on one device."""
        components = self._components
        assert self._set.batches is not None
        number = self._set.batches.result()
        step = components.step_variable.read_value()
        leaves = components.shape.evaluation_leaves
        generators = GeneratorStates(components, leaves, self._set.drawn)
        generators.assign(generators.derive(EVALUATION, step, number), index)

    def _add_logical_replicas(self, element: Batch) -> None:
        """Adds the results of all logical replicas.

        The results are summed along a tree that is the same for any number of devices.
        """
        components = self._components
        strategy = components.strategy
        leaf_sum = LeafSum(components.shape.leaves, components.shape.replicas)
        written = [*self._set.written, *list_parts(self._set.sums)]
        variables = LeafVariables(written, takes_first=True)

        leaf = SharedFunction(partial(self._compute_leaf, variables), strategy, inlined=False)
        step = components.step_variable.read_value()

        def run_device(element: Batch) -> tuple[DeviceResult, list[tf.Tensor]]:
            before = variables.read()

            def compute(index: tf.Tensor) -> tuple[LeafResult, BucketLayout]:
                result: tuple[LeafResult, BucketLayout] = leaf(step, index, element, before)
                return result

            return leaf_sum.add_up_device(get_device_number(), compute), before

        def finish(before: list[tf.Tensor], totals: list[tf.Tensor]) -> None:
            assert leaf_sum.layout is not None
            changes = leaf_sum.layout.packing.unpack(totals)
            variables.apply_changes(before, list(map(tf.convert_to_tensor, changes)))
            assert self._set.batches is not None
            self._set.batches.update_state(1)

        result, before = leaf.run_again_if_not_shareable(
            partial(strategy.run, run_device, args=(element,))
        )

        def run(function: Callable[..., Any], *values: PerReplica) -> PerReplica:
            return strategy.run(function, args=values)

        totals = leaf_sum.finish(strategy, run, result.roots)
        strategy.run(finish, args=(before, totals))

    def _compute_leaf(
        self,
        variables: LeafVariables,
        _: tf.Tensor,
        index: tf.Tensor,
        element: Batch,
        before: list[tf.Tensor],
    ) -> tuple[LeafResult, BucketLayout]:
        """Evaluates a logical replica's share of a batch on a device.

        Args:
            variables: the variables that a logical replica writes, and those of metrics
            index: the index of the logical replica
            element: the global batch, or this process's rows of it
            before: the values of the variables before the batch
        """
        leaves = self._components.shape.leaves
        with enter_logical_replica(index, leaves):
            self._assign_states(index)
            variables.begin_leaf(before)
            batch = self._locate(element)
            share = self._take_share(batch, index)
            self._add_share(share)
            weight = weigh_leaf(share, batch.examples, leaves)
            changes = variables.find_changes(before, share, weight)
        packing = GradientPacking(changes, BUCKET_BYTES)
        return LeafResult(packing.pack(changes), [], []), BucketLayout(packing)

    def _take_share(self, batch: LocatedBatch, replica: Count) -> Share:
        """Returns the share of a replica.

        If each element of the dataset is a share, the first replica evaluates the element, and the
        other replicas have no rows.
        """
        shape = self._components.shape
        replicas = shape.evaluation_leaves
        if shape.by_rows or replicas == 1:
            return take_share(batch.rows, batch.examples, replica, replicas, batch.first_row)
        is_first = tf.equal(replica, 0)
        return Share(batch.rows, rows=tf.cast(is_first, tf.int32), present=is_first, leaf=replica)

    def _add_share(self, share: Share) -> None:
        """Adds the share of one replica, on that replica."""
        batch = share.batch
        # The result of a tf.cond has no device, but reductions need one.
        if share.present is not None:
            batch = tf.nest.map_structure(tf.identity, batch, expand_composites=True)

        def find_offset() -> tf.Tensor:
            return find_offset_in_share(self._components.count_examples(batch), share.together)

        with (
            run_replica(self._seed_generator),
            weigh_by_rows(share.rows, share.present, share.together),
            place_rows(find_offset),
            run_layers(training=False),
        ):
            add_batch(TraceContext(self._components), self._set, batch, share.present)


def count_replicas_with_batch(has_batch: tf.Tensor) -> tf.Tensor:
    """Returns the number of replicas that have a batch. Every replica must call this function.

    Args:
        has_batch: whether this replica has a batch, a bool scalar
    """
    count: tf.Tensor = all_reduce(tf.cast(has_batch, tf.int64))
    return count


def add_batch(
    context: ForwardContext,
    evaluation_set: EvaluationSet,
    batch: Batch,
    present: tf.Tensor | None,
) -> Structure:
    """Adds the batch of one replica to the metrics and sums of a set.

    Args:
        context: the context of the evaluation
        evaluation_set: the set to which the batch belongs
        batch: the batch, or a placeholder, whose results are ignored
        present: whether the batch is real rather than a placeholder, a bool scalar; None if no
            batch is a placeholder

    Returns:
        The loss that ``train_loss`` returned.
    """
    hooks = context.hooks
    components = context.components
    output = run_model(context, batch, training=False)
    loss = compute_loss(context, batch, output, training=False)
    with note_weighted() as weights:
        loss_per_batch, extra_loss = hooks.eval_pre.trace(
            loss=loss, output=output, batch=batch, **context.hook_values()
        )
    evaluation_set.is_weighted = uses_weights(batch, weights)
    weight: Count | None = weigh_batch(context, batch, output, None)
    if weight is None:
        weight = components.count_examples(batch)
    examples = tf.cast(weight, tf.float64)
    total = tf.cast(sum_loss(components, loss_per_batch, batch), tf.float64)
    total += tf.cast(extra_loss, tf.float64) * examples
    update_if(present, evaluation_set.total.update_state, total)
    update_if(present, evaluation_set.examples.update_state, examples)
    if evaluation_set.metrics:
        arguments = hooks.metric_pre.trace(
            output=output, batch=batch, train_model=components.train_model
        )
        update_metrics(evaluation_set.metrics, hooks.metric_pre, arguments, present)
    return loss
