"""Everything a run is made of, created in the right order under the strategy's scope.

``train``, ``evaluate``, ``predict`` and ``export`` all start from here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.accumulate import take_update
from ctl_core.checks.created import (
    check_keras_loss,
    check_manager,
    check_optimizers,
    check_optimizers_of_replicas,
    check_variables,
    create_callable,
    of_sample_weights,
)
from ctl_core.checks.pairs import pairs_refused
from ctl_core.checks.returned import expect, kind_of
from ctl_core.checks.writes import Write, forward_writes, same_on_all_replicas
from ctl_core.cluster.strategy import Task, create_strategy
from ctl_core.cluster.sync import Cluster
from ctl_core.compat import global_seed_generator, global_seed_generator_kept
from ctl_core.console import Console
from ctl_core.errors import HookFailed, SetupError
from ctl_core.evaluate import Evaluation, create_evaluation
from ctl_core.hooks import Hooks, load_hooks
from ctl_core.inputs import Input, create_input, deal, local_replicas
from ctl_core.numerics.batch_norm import MovingStatistics
from ctl_core.numerics.freezing import Freezing, unfrozen
from ctl_core.numerics.learning_rate import LearningRate, rate_for_hooks
from ctl_core.numerics.not_finite import Noted
from ctl_core.numerics.precision import LossScale, lower_dtypes
from ctl_core.profile import Clock
from ctl_core.run_folder import Run, repair_list
from ctl_core.run_state.tracking import Found, Unnamed, find, trainable_variables
from ctl_core.settings import Config
from ctl_core.step import Parts, contribution, loss_of, objectives, run_model, update, weight_of


@dataclasses.dataclass
class State:
    """The trained state: what ``ctl_core.train`` returns.

    Attributes:
        config: the settings
        run_dir: the run's folder
        step: how many steps were taken
        step_variable: the same, as checkpoints hold it; a scalar int64 variable
        train_model, train_loss, optimizer: as the hooks made them
        lr: the learning rate that create_opt was given
        ckpt, manager: as ``create_ckpt`` returned them
        metrics: values of the last evaluation by name, or {}
        hook_state: what host hooks keep, their argument ``state``
        stopped_by: the number of the signal that ended training early, or None
        functions: the graph functions, while training (graph.StepFunctions)
        clock: where the time goes, while training
        cluster: the processes that train together
        statistics: of batch normalisations, averaged over the replicas before they are read
        roots: the objects and hooks that the run is made of, by name
        found: the variables, layers and generators that they reach
        freezing: what of it is frozen
        computed_in: the dtypes lower than float32 in which layers compute
        noted: of which steps the loss was not finite
        ended: whether a hook has ended training (StopTraining), now or earlier
        writes: what the forward pass writes to, with several replicas or micro-batches
    """

    config: Config
    run_dir: Any
    step_variable: tf.Variable
    train_model: Any
    train_loss: Any
    optimizer: Any
    lr: LearningRate
    ckpt: tf.train.Checkpoint
    manager: tf.train.CheckpointManager
    hooks: Hooks
    strategy: tf.distribute.Strategy
    cluster: Cluster
    statistics: MovingStatistics
    parts: Parts
    data: Input
    evaluation: Evaluation | None
    input_spec: Any
    roots: dict[str, Any]
    found: Found
    freezing: Freezing
    writes: list[Write]
    computed_in: list[str]
    noted: Noted = dataclasses.field(default_factory=Noted)
    ended: bool = False
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    hook_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    stopped_by: int | None = None
    functions: Any = None
    clock: Clock = dataclasses.field(default_factory=Clock)

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return int(self.step_variable.numpy())

    @property
    def diverged(self) -> bool:
        """Whether the loss of the last step was not finite, unless ``on_nan`` is ignore."""
        return self.step > 0 and self.noted.latest == self.step

    def renew_input(self) -> None:
        """Makes the training data anew, as it was before anything was read from it."""
        with global_seed_generator_kept():
            self.data = create_input(
                self.hooks, self.strategy, self.cluster, self.config, found=self.data.found
            )


def create_state(callbacks: Any, config: Config, run: Run, console: Console) -> State:
    """Calls the create hooks, builds every variable, and checks what the hooks return.

    Nothing is read from a checkpoint and nothing is trained.

    Raises:
        SetupError: a setting or a hook cannot work; the message says which and why.
    """
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    strategy = create_strategy(config)
    cluster = Cluster(strategy, run.task)
    cluster.check_settings(config)
    hooks, warnings = load_hooks(callbacks, config)
    for warning in warnings:
        console.warn(warning)
    try:
        with cluster.peers():
            return _create(hooks, config, run, strategy, cluster, console)
    except HookFailed as error:  # nothing has been trained yet: wrong hooks, not a failed run
        raise SetupError(str(error)) from error.__cause__


def _create(
    hooks: Hooks,
    config: Config,
    run: Run,
    strategy: tf.distribute.Strategy,
    cluster: Cluster,
    console: Console,
) -> State:
    replicas = strategy.num_replicas_in_sync
    per_replica = config.batch_size // (replicas * config.accumulate_steps)
    data = create_input(hooks, strategy, cluster, config, console)
    step = _step_variable()
    tf.summary.experimental.set_step(step)  # for hooks that ask; steps that are taken set theirs
    with strategy.scope():
        train_model = create_callable(hooks.create_model, "train_model")
        train_loss = create_callable(hooks.create_loss, "train_loss")
        check_keras_loss(hooks.create_loss, train_loss)
        lr = LearningRate(config.learning_rate)
        optimizer = hooks.create_opt(lr=lr)
        optimizers = optimizer if isinstance(optimizer, dict) else {"": optimizer}
        check_optimizers(hooks.create_opt, optimizers)
        lr.follows = False
        if replicas > 1:
            check_optimizers_of_replicas(hooks.create_opt, optimizer)
        parts = Parts(
            hooks,
            train_model,
            train_loss,
            rate_for_hooks(lr, optimizers, f"create_opt ({hooks.create_opt.where})"),
            optimizer,
            optimizers,
            config.batch_size,
            replicas,
            config.accumulate_steps,
            config.jit_compile,
            notes_losses=config.on_nan != "ignore",
        )
        variables, input_spec, writes = _build_variables(parts, data, cluster.task)
        check_variables(hooks.create_model, variables)
        if said := of_sample_weights(hooks, data.element_spec):
            console.warn(said)
        for name, one in optimizers.items():
            if isinstance(one, keras.Optimizer) and not one.built:
                one.build(variables[name])
        roots = _roots(parts)
        computed = {*lower_dtypes(find_state(roots).layers), config.precision} - {"float32"}
        if "float16" in computed:
            parts.loss_scale = LossScale()
        _build_late(roots, parts, data, cluster.task, variables)
        evaluation = create_evaluation(parts, strategy, cluster.task, per_replica)
        if cluster.task.chief:
            repair_list(run.ckpt)
        hook = hooks.create_ckpt
        ckpt, manager = expect(
            hook(
                ckpt_path=str(run.ckpt),
                step=step,
                lr=lr,
                optimizer=optimizer,
                train_model=train_model,
                train_loss=train_loss,
            ),
            ("ckpt", "manager"),
            f"create_ckpt ({hook.where})",
        )
    check_manager(hook, ckpt, manager)
    _ = ckpt.save_counter  # TensorFlow makes it when it is first asked for
    roots["ckpt"] = ckpt
    if evaluation is not None:
        roots["metrics"] = evaluation.lasting_metrics()
    found = find_state(roots)
    return State(
        config=config,
        run_dir=run.path,
        step_variable=step,
        train_model=train_model,
        train_loss=train_loss,
        optimizer=optimizer,
        lr=lr,
        ckpt=ckpt,
        manager=manager,
        hooks=hooks,
        strategy=strategy,
        cluster=cluster,
        statistics=MovingStatistics(found.layers, strategy),
        parts=parts,
        data=data,
        evaluation=evaluation,
        input_spec=input_spec,
        roots=roots,
        found=found,
        freezing=Freezing(found),
        computed_in=sorted(computed),
        writes=writes,
    )


def _step_variable() -> tf.Variable:
    """Makes the step counter: one for all replicas, so that ``int(ckpt.step)`` works."""
    with tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="step")


def _roots(parts: Parts) -> dict[str, Any]:
    """Names the objects of a run, and the hooks of which functions may hold others."""
    return {
        "train_model": parts.train_model,
        "train_loss": parts.train_loss,
        "optimizer": parts.optimizer,
        "keras.random": global_seed_generator(),
        **parts.hooks.functions(),
    }


def find_state(roots: dict[str, Any]) -> Found:
    """Finds what belongs to a run.

    Raises:
        SetupError: a variable is where it has no name.
    """
    try:
        return find(roots)
    except Unnamed as where:
        raise SetupError(
            f"{where} is a set with variables in it, of which a checkpoint cannot tell one from "
            "the other; use a list or a dict."
        ) from where


def _build_late(
    roots: dict[str, Any],
    parts: Parts,
    data: Input,
    task: Task,
    variables: dict[str, list[Any]],
) -> None:
    """Lets optimizers that make variables only when they are used make them before a restore.

    Those are optimizers of the user's own, and Keras optimizers that hooks use. One that has the
    method ``build(variables)``, as Keras' have, is built by it; otherwise a step is traced, which
    nobody runs.

    Raises:
        SetupError: on several replicas, the variables cannot be made.
    """
    own = {n: o for n, o in parts.optimizers.items() if not isinstance(o, keras.Optimizer)}
    for name, optimizer in own.items():
        build = getattr(optimizer, "build", None)
        if callable(build) and not getattr(optimizer, "built", False):
            build(variables[name])
    late = [o for o in own.values() if not getattr(o, "built", False)]
    if not late and all(optimizer.built for optimizer in find_state(roots).optimizers):
        return
    if parts.replicas == 1:  # tf.function lifts what the values of new variables are made of
        step = tf.function(lambda: take_update(parts, data, frozenset()) and None, autograph=False)
        step.get_concrete_function()
        return
    try:
        with _scratch(data, task):
            batch = _placeholders(data.element_spec)
            needed = frozenset({"output", "batch"})
            update(parts, contribution(parts, batch, needed), frozenset())
    except HookFailed as error:
        if "could not be lifted" in str(error.__cause__):
            hook = parts.hooks.create_opt
            raise SetupError(
                f"{hook.name} ({hook.where}): {kind_of(late[0])} makes variables when it is first "
                "used, which several replicas cannot; give it a method build(variables) that makes "
                "them, and is called before."
            ) from error
        raise


def _build_variables(
    parts: Parts, data: Input, task: Task
) -> tuple[dict[str, list[Any]], Any, list[Write]]:
    """Runs the forward hooks once on placeholders, so that every variable exists.

    Nothing is computed: the graph is thrown away, and Keras creates variables outside of it.

    Returns:
        The variables that each objective's optimizer has to know, the specification of the model's
        input, and what is written to where not all examples of a step are seen at once. An
        optimizer has to know the trainable_vars of its objective, also what is frozen now: those
        that ``grad_pre`` returns once more with no layer frozen. Where there is one objective, it
        knows all that the model could train, too.

    Raises:
        SetupError: an objective has no variables, frozen or not.
    """
    with _scratch(data, task) as graph:
        batch = _placeholders(data.element_spec)
        inputs = parts.hooks.input_pre.in_graph(batch=batch, lr=parts.lr)
        input_spec = tf.nest.map_structure(tf.type_spec_from_value, inputs)
        output = run_model(parts, batch, training=True)
        with pairs_refused(parts, data.element_spec, _placeholders):
            loss = loss_of(parts, batch, output)
            weight = weight_of(parts, batch, output)
            named = [objectives(parts, batch, output, loss, weight)]
        with unfrozen(parts.train_model, parts.train_loss) as some_were_frozen:
            if some_were_frozen:
                named.append(objectives(parts, batch, output, loss, weight))
            free = trainable_variables(parts.train_model) if len(parts.optimizers) == 1 else []
    variables = {}
    for name in parts.optimizers:
        several = [*(one[name][1] for one in named), free]
        variables[name] = list({id(v): v for of_one in several for v in of_one}.values())
        if not variables[name]:
            hook = parts.hooks.grad_pre
            raise SetupError(
                f"grad_pre ({hook.where})['{name}']: returned no trainable_vars; there is nothing "
                "to train."
            )
    shared = parts.replicas * parts.accumulate_steps > 1
    writes = forward_writes(graph) if shared else []
    return variables, input_spec, writes


def _placeholders(element_spec: Any) -> Any:
    return tf.nest.map_structure(
        lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape),
        element_spec,
        expand_composites=True,
    )


@contextlib.contextmanager
def _scratch(data: Input, task: Task) -> Iterator[Any]:
    """A graph, on this process's first replica, to call hooks in without running anything.

    Variables made in it exist outside of it. ``FuncGraph`` is not quite public, but Keras builds
    its models in one; in a tf.function, random generators could not be made on several replicas.
    """
    first = task.index * data.replicas
    with tf.__internal__.FuncGraph("build").as_default() as graph, Alone(data.strategy, first):
        yield graph


class Alone(tf.distribute.ReplicaContext):
    """A replica that meets no other: what is exchanged has the right shapes and no values."""

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function as if every replica of this process gave the same."""

        def merge(strategy: tf.distribute.Strategy, args: Any, kwargs: Any) -> Any:
            def of_all(part: Any) -> Any:
                if not isinstance(part, tf.Tensor | tf.IndexedSlices):
                    return part
                return deal(strategy, [part] * local_replicas(strategy))

            args, kwargs = tf.nest.map_structure(of_all, (args, kwargs))
            merged = merge_fn(strategy, *args, **kwargs)
            return tf.nest.map_structure(
                lambda part: strategy.experimental_local_results(part)[0], merged
            )

        return super().merge_call(merge, (args, kwargs or {}))

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns the value as it is."""
        return same_on_all_replicas(value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Returns the value once for each replica."""
        replicas = self.strategy.num_replicas_in_sync
        gathered = tf.nest.map_structure(lambda part: tf.concat([part] * replicas, axis), value)
        return same_on_all_replicas(gathered)
