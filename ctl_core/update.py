"""Makes the update of a step, which applies the sums over the replicas to the weights.

``update_pre`` changes the summed gradients, optimizers apply them, and then ``update_post`` runs.
As in step.py, everything runs while a graph is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import place_rows, replica_id
from ctl_core.cluster.replica_contexts import (
    enter_logical_replica,
    find_local_device,
    is_shared,
    weigh_by_rows,
)
from ctl_core.hooks.hooks import Hook
from ctl_core.model.components import Compilation, StepContext
from ctl_core.model.executable import describe_op, find_uncompilable_op
from ctl_core.model.failures import find_line
from ctl_core.model.forward import call_made, fix_shape
from ctl_core.model.generator_states import BETWEEN_STEPS, UPDATE, choose_generators
from ctl_core.model.leaves import LeafVariables, Sums
from ctl_core.model.replicas import Replicas
from ctl_core.model.shared_functions import Shareable
from ctl_core.numerics import reduction
from ctl_core.numerics.not_finite import are_finite, are_losses_finite, are_numbers
from ctl_core.numerics.randomness import draws_random_numbers
from ctl_core.numerics.reduction import PIECES, Contribution, ContributionLayout, PackedContribution
from ctl_core.numerics.report import Report, stack_flags
from ctl_core.run.errors import HookFailed, NotCompilable, SetupError
from ctl_core.types import (
    Count,
    Gradient,
    Gradients,
    GradientsByObjective,
    PerReplica,
    Structure,
    UserObject,
    Variable,
    VariablesByObjective,
)

# The names of values that an update returns only if they are needed.
_RETURNED = frozenset({"gradients", "update_gradients", "display_gradients"})


class Updates(NamedTuple):
    """The results of ``update_pre`` by objective.

    Attributes:
        applied: the gradients that optimizers apply
        displayed: the gradients that host hooks receive as ``display_gradients``
        skips: bool scalars that say whether to skip an update, if ``update_pre`` returned any
    """

    applied: GradientsByObjective
    displayed: dict[str, UserObject]
    skips: dict[str, tf.Tensor]


class UpdateResult(NamedTuple):
    """The results of an update, as described in ``step.StepResult``.

    Gradients that are not needed are left out. The report is that of a single replica.
    """

    loss: dict[str, tf.Tensor]
    weight: list[tf.Tensor]
    gradients: GradientsByObjective
    update_gradients: GradientsByObjective
    display_gradients: dict[str, UserObject]
    report: Report


class UpdateInputs(NamedTuple):
    """The values that the update of one replica gets, besides variables.

    Attributes:
        examples: the number of examples in the global batch
        local: the contribution of the replica
        total: the sums over all leaves, see ``Sums``
        before: the values of the written variables before the leaves
        states: the states of the random generators in the update; None if they are not set
    """

    examples: Count
    local: PackedContribution
    total: list[Gradient]
    before: list[tf.Tensor]
    states: tf.Tensor | None


class PreparedUpdate(NamedTuple):
    """The results of everything that an update does before the optimizers run.

    Attributes:
        summed: the gradients and objectives summed over the replicas
        weight: the weight of the batch, see ``step.StepResult``
        updates: the result of ``call_update_pre``
        is_finite: in float16, whether all gradients are finite, in a list; otherwise empty
        report: the flags of the replica
    """

    summed: Contribution
    weight: list[tf.Tensor]
    updates: Updates
    is_finite: list[tf.Tensor]
    report: Report


def finish_sums(context: StepContext, is_executable: bool, total: Contribution) -> Contribution:
    """Finishes the sums over the replicas, on one replica.

    The sums are divided by the loss scale and by the weight of the batch. Rows of a sparse gradient
    that have the same index are merged.

    Args:
        context: the context of the step
        is_executable: whether XLA compiles the traced graph
        total: the sums over all leaves
    """
    if context.components.shape.logical_replicas is None:  # the tree has merged the rows already
        gradients = reduction.merge_rows(total.gradients, is_executable)
        total = total._replace(gradients=gradients)
    return unscale_sums(context, total)


def unscale_sums(context: StepContext, total: Contribution) -> Contribution:
    """Divides the sums by the loss scale and by the weight of the batch, on one replica.

    Args:
        context: the context of the step
        total: the sums over all replicas; in a sparse gradient, each index occurs once
    """
    components = context.components
    loss = total.loss
    gradients = total.gradients
    if components.loss_scale is not None:
        gradients = reduction.multiply(gradients, 1.0 / components.loss_scale.value)
    if total.weight:
        factor = tf.math.reciprocal_no_nan(total.weight[0])
        loss = reduction.multiply(loss, factor)
        gradients = reduction.multiply(gradients, factor)
    return Contribution(loss, gradients, [], [], [], [], [])


def make_update(
    context: StepContext,
    replicas: Replicas,
    examples: Count,
    sums: Sums,
    returned: frozenset[str],
) -> UpdateResult:
    """Makes the update with the sums over all leaves.

    In a compiled run, the work of each replica is an XLA executable, and so is the update. An
    update that draws random numbers must be compiled as well, because the same seed gives other
    random numbers without XLA. If an update draws none, and XLA cannot compile it, for example
    because it writes a summary, it is not compiled. That of logical replicas never is.

    With shards, the update has three stages, which are compiled separately. Between the stages, the
    owners of the variables send the new values to all other devices.

    Args:
        context: the context of the step, or of a turn within it
        replicas: the replicas that make the update
        examples: the number of examples in the global batch
        sums: the sums
        returned: the names of the values to return

    Raises:
        SetupError: the update draws random numbers, but cannot be compiled.
    """
    arguments = context.hooks.update_pre.arguments
    local = sums.local._replace(
        buckets=[],
        output=sums.local.output if "output" in arguments else [],
        batch=sums.local.batch if "batch" in arguments else [],
    )
    inputs = UpdateInputs(examples, local, sums.total, sums.before, sums.states)
    returned = returned & _RETURNED
    define = partial(Update, context, sums.layout, sums.written, returned)
    key = ("update", context.turn, returned, sums.layout.signature)
    calls = UpdateCalls(context, replicas, define, key)
    shards = context.components.shards
    result: UpdateResult
    if shards is None:
        result = calls.call(Update.make, inputs)
        return result
    of_owner = "each device updates the variables that it owns"
    prepared = calls.call(Update.prepare, inputs, inlined=False)
    calls.call(Update.apply, prepared, inlined=False, obstacle=of_owner)
    shards.copy_from_owners(itertools.chain(*sums.layout.variables.values()))
    if context.components.update_average is None:
        of_owner = ""  # all devices do the same again
    result = calls.call(Update.finish, inputs, prepared, inlined=False, obstacle=of_owner)
    return result


class UpdateCalls:
    """Calls an update, or one of its stages, on all devices of this process."""

    def __init__(
        self,
        context: StepContext,
        replicas: Replicas,
        define: Callable[..., Update],
        key: tuple[Hashable, ...],
    ) -> None:
        """Prepares the calls.

        Args:
            context: the context of the step, or of a turn within it
            replicas: the replicas that make the update
            define: returns the update, given whether XLA compiles it
            key: identifies the update among those of the run
        """
        self._context = context
        self._replicas = replicas
        self._define = define
        self._key = key
        self._is_logical = context.components.shape.logical_replicas is not None

    def call(
        self,
        stage: Callable[..., Structure],
        *values: PerReplica,
        inlined: bool = True,
        obstacle: str = "",
    ) -> PerReplica:
        """Calls a method of ``Update``; in a compiled run, as an executable if that is possible.

        Args:
            stage: the method
            values: its arguments after the number of the step
            inlined: see ``SharedFunction``
            obstacle: why the devices cannot share one function; "" if nothing is known
        """
        is_compiled = self._context.compilation is Compilation.REPLICA and not self._is_logical
        reason = "that of logical replicas never is"
        if is_compiled:
            try:
                return self._call_compiled(stage, values, obstacle)
            except NotCompilable as error:
                reason = str(error)
            except HookFailed as error:
                if not isinstance(error.__cause__, NotCompilable):
                    raise
                reason = str(error)
        with refuse_random_ops(self._context, reason):
            return self._call_uncompiled(stage, values, inlined, obstacle)

    def _call_compiled(
        self, stage: Callable[..., Structure], values: tuple[PerReplica, ...], obstacle: str
    ) -> PerReplica:
        """Calls a method as an XLA executable; see ``call`` for the arguments."""
        function = self._replicas.share(
            (*self._key, stage.__name__, "compiled"),
            add_no_facts(stage, self._define(is_executable=True)),
            compiled=True,
            check=partial(_check_compilable, self._context),
        )
        function.obstacle = function.obstacle or obstacle
        call = partial(self._replicas.call, function, *values)
        return function.run_again_if_not_shareable(call)[0]

    def _call_uncompiled(
        self,
        stage: Callable[..., Structure],
        values: tuple[PerReplica, ...],
        inlined: bool,
        obstacle: str,
    ) -> PerReplica:
        """Calls a method without compiling it; see ``call`` for the arguments."""
        update = self._define(is_executable=self._context.compilation is Compilation.STEP)
        # The update of logical replicas is always a function, so that it is rounded in the same way
        # on any number of devices.
        function = self._replicas.share(
            (*self._key, stage.__name__),
            add_no_facts(stage, update),
            inlined=inlined and not self._is_logical,
        )
        function.obstacle = function.obstacle or obstacle

        def run() -> PerReplica:
            if function.is_inlined:
                return self._make_in_stages(update, *values)
            return self._replicas.call(function, *values)[0]

        return function.run_again_if_not_shareable(run)

    def _make_in_stages(self, update: Update, inputs: PerReplica) -> PerReplica:
        """Makes an update whose devices do not share a function.

        If hooks use an object that exists once, each of them runs on all devices before the next.

        Args:
            update: the update
            inputs: the ``UpdateInputs`` of each replica
        """
        step = self._replicas.step
        prepared = self._replicas.run(partial(update.prepare, step), inputs)
        self._replicas.run(partial(update.apply, step), prepared)
        return self._replicas.run(partial(update.finish, step), inputs, prepared)


def add_no_facts(stage: Callable[..., Structure], update: Update) -> Shareable:
    """Returns a method of an update in the form of a shared function, which also returns facts."""

    def compute(*values: Structure) -> tuple[Structure, None]:
        return stage(update, *values), None

    return compute


def _check_compilable(context: StepContext, graph: tf.Graph) -> None:
    """Raises ``NotCompilable`` if XLA cannot compile the graph of an update."""
    op = find_uncompilable_op(graph)
    if op is not None:
        raise NotCompilable(describe_op(op, context.hooks))


class Update:
    """Makes the update on one replica. Contains no tensors, so that all graphs can use it."""

    def __init__(
        self,
        context: StepContext,
        layout: ContributionLayout,
        written: LeafVariables,
        returned: frozenset[str],
        is_executable: bool,
    ) -> None:
        """Prepares an update.

        Args:
            context: the context of the step, or of a turn within it; its step is not used
            layout: the layout of the sums
            written: the variables whose changes were added up
            returned: the names of the values to return
            is_executable: whether XLA compiles the update
        """
        self._is_executable = is_executable
        self._context = dataclasses.replace(context, step=None)
        self._layout = layout
        self._written = written
        self._returned = returned
        self._generators = choose_generators(context)

    @property
    def variables(self) -> list[Variable]:
        """The variables that optimizers update, each at least once."""
        return list(itertools.chain(*self._layout.variables.values()))

    def make(self, step: tf.Tensor, inputs: UpdateInputs) -> UpdateResult:
        """Makes the update in the step with the given number."""
        prepared = self.prepare(step, inputs)
        self.apply(step, prepared)
        return self.finish(step, inputs, prepared)

    def prepare(self, step: tf.Tensor, inputs: UpdateInputs) -> PreparedUpdate:
        """Does everything up to the call of ``update_pre``; see ``make`` for the arguments."""
        examples, local, total, before, states = inputs
        context = self._context.begin_step(step)
        shape = context.components.shape
        variables = self._layout.variables
        sums = self._layout.unpack(total)
        present = None
        if shape.logical_replicas is None:
            _, present = shape.count_rows_of(replica_id(), examples)
        else:
            local = local._replace(loss=sums.loss)  # the same on all devices
        self._written.apply_changes(before, sums.changes, present)
        # All devices get equal states, so they draw equal numbers in the update.
        self._generators.assign(states, UPDATE)
        gradients = {
            name: list(map(fix_shape, gradients, variables[name]))
            for name, gradients in sums.gradients.items()
        }
        summed = finish_sums(context, self._is_executable, sums._replace(gradients=gradients))
        with enter_alike(context):
            updates = call_update_pre(context, examples, variables, local, summed)
        loss_is_finite, gradients_are_numbers = compute_flags(context, local, summed)
        are_equal = [tf.equal(count, 0.0) for count in sums.differences]
        report = Report(loss_is_finite, gradients_are_numbers, stack_flags(are_equal))
        is_finite = []
        if context.components.loss_scale is not None:
            is_finite = [are_finite(tf.nest.flatten(summed.gradients))]
        return PreparedUpdate(summed, sums.weight, updates, is_finite, report)

    def apply(self, step: tf.Tensor, prepared: PreparedUpdate) -> None:
        """Lets the optimizers apply the update; see ``finish`` for the arguments."""
        if not self.variables:
            return
        context = self._context.begin_step(step)
        apply = partial(apply_updates, context, self._layout.variables, prepared.updates)
        with enter_update(context) as device:
            run_if_finite(prepared.is_finite, apply)
            shards = context.components.shards
            if shards is not None:
                graph = tf.compat.v1.get_default_graph()
                assert isinstance(graph, compat.FunctionGraph)
                shards.check_graph(context.hooks.create_opt, device, graph)

    def finish(
        self, step: tf.Tensor, inputs: UpdateInputs, prepared: PreparedUpdate
    ) -> UpdateResult:
        """Does everything that follows after the optimizers, such as calling ``update_post``.

        Args:
            step: the number of the step
            inputs: the tensors that the update gets
            prepared: the result of ``prepare``
        """
        context = self._context.begin_step(step)
        summed, weight, updates, is_finite, report = prepared
        loss_scale = context.components.loss_scale
        if self.variables:
            is_skipped = _find_common_skip(updates)
            with enter_update(context) as device:
                finish = partial(finish_update, context, device)
                run_if_finite(is_finite, partial(run_unless, is_skipped, finish))
                if loss_scale is not None:
                    loss_scale.adjust(*is_finite)
        if context.components.shape.logical_replicas is not None:
            self._generators.assign(inputs.states, BETWEEN_STEPS)
        values: dict[str, Any] = {
            "gradients": summed.gradients,
            "update_gradients": updates.applied,
            "display_gradients": updates.displayed,
        }
        for name, value in values.items():
            if name not in self._returned:
                values[name] = type(value)()
        return UpdateResult(summed.loss, weight, **values, report=report)


def enter_alike(context: StepContext) -> contextlib.AbstractContextManager[None]:
    """Makes every device with logical replicas call hooks as if it were logical replica 0.

    All devices thus compute the same update. Does nothing without logical replicas.
    """
    shape = context.components.shape
    if shape.logical_replicas is None:
        return contextlib.nullcontext()
    return enter_logical_replica(0, shape.leaves)


@contextlib.contextmanager
def refuse_random_ops(context: StepContext, obstacle: str) -> Iterator[None]:
    """Rejects an uncompiled update that draws random numbers; it is traced inside the context.

    Does nothing in a run that is not compiled.

    Args:
        context: the context of the step
        obstacle: why the update is not compiled, for the error message

    Raises:
        SetupError: an op draws random numbers; the message names its line.
    """
    graph = tf.compat.v1.get_default_graph()
    operations_before = len(graph.get_operations())
    yield
    if context.compilation is not Compilation.REPLICA:
        return
    for op in compat.add_called_ops(graph.get_operations()[operations_before:]):
        if draws_random_numbers(op):
            raise SetupError(
                f"{find_line(op, context.hooks) or 'the update'}: draws random numbers, and "
                "the update cannot be compiled, so they would differ from those that XLA "
                f"draws; train with --no-jit-compile. ({obstacle})"
            )


def call_update_pre(
    context: StepContext,
    examples: Count,
    variables: VariablesByObjective,
    contribution: Contribution | PackedContribution,
    summed: Contribution,
) -> Updates:
    """Calls ``update_pre`` for each objective on one replica, without applying the updates.

    Args:
        context: the context of the step, or of a turn within it
        examples: the number of examples in the global batch
        variables: the variables by objective, in the order of the gradients
        contribution: the contribution of the replica, before the sum
        summed: the gradients and objectives summed over the replicas
    """
    components = context.components
    hook = context.hooks.update_pre
    pieces = {
        name: reduction.join_pieces(getattr(contribution, name))
        for name in PIECES
        if name in hook.arguments
    }
    applied: GradientsByObjective = {}
    displayed: dict[str, UserObject] = {}
    skips: dict[str, tf.Tensor] = {}
    shape = components.shape
    rows, present = shape.count_rows_of(replica_id(), examples)
    find_offset = partial(shape.count_rows_before, replica_id(), examples)
    with weigh_by_rows(rows, present), place_rows(find_offset):
        for name, gradients in summed.gradients.items():
            if not gradients:  # all variables of this objective are frozen
                applied[name] = []
                displayed[name] = []
                continue
            values = {
                **pieces,
                **context.hook_values(),
                "objective": name or None,
                "gradients": gradients,
                "all_gradients": summed.gradients,
                "variables": variables[name],
                "loss": summed.loss.get(name),
                "optimizer": components.optimizers[name],
            }
            with compat.skip_reduction(), _refuse_optimizers(context, hook):
                update, displayed[name], *skip = hook.trace(**values)
            _check_shapes(context, update, variables[name])
            applied[name] = list(update)
            if skip and skip[0] is not None:
                skips[name] = tf.convert_to_tensor(skip[0])
    return Updates(applied, displayed, skips)


def _refuse_optimizers(context: StepContext, hook: Hook) -> contextlib.AbstractContextManager[None]:
    """Raises an error inside the context if a hook applies an optimizer itself, with shards.

    Only ``Update.apply`` is followed by copies of the weights.
    """
    if context.components.shards is None:
        return contextlib.nullcontext()
    return compat.refuse_optimizers(
        f"{hook}: applies an optimizer itself, which shard_optimizer cannot divide among the "
        "devices; return the gradients from update_pre, or leave out shard_optimizer."
    )


def _check_shapes(context: StepContext, update: Gradients, variables: list[Variable]) -> None:
    """Rejects gradients returned by ``update_pre`` that do not match their variables."""
    problem = ""
    for gradient, variable in zip(update, variables, strict=False):
        shape = tf.TensorShape(getattr(gradient, "shape", None))
        variable_shape = tf.TensorShape(variable.shape)
        if not shape.is_compatible_with(variable_shape):
            problem = f" ({shape} for {variable_shape})"
            break
    if problem or len(update) != len(variables):
        raise context.hooks.update_pre.reject(
            f"returned {len(update)} update_gradients for {len(variables)} gradients{problem}; "
            "return one per gradient, with the same shapes, in the same order."
        )


def compute_flags(
    context: StepContext, contribution: PackedContribution, summed: Contribution
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns whether the loss of a replica is finite, and whether no summed gradient has a NaN."""
    loss_is_finite = are_losses_finite(contribution.loss)
    if context.components.loss_scale is not None:  # updates with NaN are skipped anyway
        return loss_is_finite, tf.constant(True)
    gradients = itertools.chain(*summed.gradients.values())
    return loss_is_finite, are_numbers(gradients)


@contextlib.contextmanager
def enter_update(context: StepContext) -> Iterator[int]:
    """Enters the contexts in which a replica changes variables after the leaves were added up.

    Replicas exchange no values here, because all replicas compute the same update from the same
    gradients. A condition in ``update_pre`` or in an optimizer therefore has the same value on all
    replicas. A Keras optimizer updates the variables that the replica's device owns.

    Yields:
        The index of the device among those of this process.
    """
    components = context.components
    strategy = components.strategy
    number = find_local_device(strategy)
    device: str | None = strategy.extended.worker_devices[number]
    if is_shared():
        device = None  # ops run on the device that calls the function
    owns = _owns_all
    if components.shards is not None:
        owns = partial(components.shards.owns, device=number)
    assert isinstance(context.step, tf.Tensor)
    with (
        compat.mute_other_summaries(context.step, tf.convert_to_tensor(replica_id())),
        compat.enter_update(strategy, number),
        tf.device(device),
        tf.name_scope(""),  # otherwise, the names of summaries would begin with the name scope
        compat.update_device(strategy, number, device, owns),
    ):
        yield number


def _owns_all(_: Variable) -> bool:
    """Returns True: without shards, each device updates all variables."""
    return True


def run_if_finite(is_finite: list[tf.Tensor], function: Callable[[], None]) -> None:
    """Calls a function that changes variables; in float16, only if the gradients are finite.

    Args:
        is_finite: whether all gradients are finite, a bool scalar, in a list; otherwise empty
        function: the function
    """
    if is_finite:
        tf.cond(is_finite[0], function, lambda: None)
    else:
        function()


def apply_updates(context: StepContext, variables: VariablesByObjective, updates: Updates) -> None:
    """Lets optimizers apply the updates on one device.

    Args:
        context: the context of the step, or of a turn within it
        variables: the variables by objective, in the order of the gradients
        updates: the result of ``call_update_pre``
    """
    for name, gradients in updates.applied.items():
        apply = partial(apply_gradients, context, name, gradients, variables[name])
        run_unless(updates.skips.get(name), apply)


def _find_common_skip(updates: Updates) -> tf.Tensor | None:
    """Returns whether all updates are skipped; None if an updated objective has no ``skip``."""
    updating = [name for name, gradients in updates.applied.items() if gradients]
    if not updates.skips or len(updates.skips) < len(updating):
        return None
    return tf.reduce_all(list(updates.skips.values()))


def run_unless(is_skipped: tf.Tensor | None, function: Callable[[], None]) -> None:
    """Calls a function if ``is_skipped`` is None, or if it is a tensor whose value is False."""
    if is_skipped is None:
        function()
    else:
        tf.cond(is_skipped, lambda: None, function)


def apply_gradients(
    context: StepContext, objective: str, gradients: Gradients, variables: list[Variable]
) -> None:
    """Lets the optimizer of an objective apply gradients, which have already been summed."""
    optimizer = context.components.optimizers[objective]
    pairs = list(zip(gradients, variables, strict=True))
    if pairs:
        call_made(context.hooks.create_opt, optimizer.apply_gradients, pairs)


def finish_update(context: StepContext, device: int) -> None:
    """Calls ``update_post`` on one device; after the last turn, also updates the weight average.

    Args:
        context: the context of the step, or of a turn within it
        device: the index of the device among those of this process
    """
    components = context.components
    hook = context.hooks.update_post
    if hook is not None:
        with _refuse_optimizers(context, hook):
            hook.trace(optimizer=components.optimizer, **context.hook_values())
    if context.is_last_turn and components.update_average is not None:
        components.update_average(device)
