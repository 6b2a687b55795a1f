"""Everything a run is made of, created in the right order under the strategy's scope.

``train``, ``evaluate``, ``predict`` and ``export`` all start from here.
"""

from __future__ import annotations

import traceback
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checks.created import (
    check_groups,
    check_loss,
    check_manager,
    check_optimizers,
    check_optimizers_of_replicas,
    check_turns,
    check_variables,
    create_callable,
    of_sample_weights,
)
from ctl_core.checks.pairs import pairs_refused
from ctl_core.checks.returned import expect, kind_of
from ctl_core.checks.writes import Write, forward_writes
from ctl_core.cluster.shared_folder import check_shared
from ctl_core.cluster.strategy import create_strategy
from ctl_core.cluster.sync import Cluster
from ctl_core.cluster.task import Task
from ctl_core.compat import global_seed_generator
from ctl_core.console import Console
from ctl_core.context import StepContext
from ctl_core.errors import HookFailed, SetupError
from ctl_core.evaluate import Evaluation, create_evaluation
from ctl_core.hooks import Hooks, load_hooks
from ctl_core.inputs import Input, create_input
from ctl_core.metrics import create_loss_parts, create_metrics, update_train_metrics
from ctl_core.numerics.averaging import WeightAverage
from ctl_core.numerics.batch_norm import MovingStatistics
from ctl_core.numerics.freezing import Freezing, unfrozen
from ctl_core.numerics.groups import OptimizerGroups, is_pairs
from ctl_core.numerics.learning_rate import LearningRate, rate_for_hooks
from ctl_core.numerics.precision import LossScale, lower_dtypes
from ctl_core.numerics.rate_schedule import schedule_of, wanted
from ctl_core.numerics.shares import Shares
from ctl_core.run_folder import Run
from ctl_core.run_state.folder import repair_list
from ctl_core.run_state.tracking import find, trainable_variables
from ctl_core.scratch import placeholders, scratch
from ctl_core.settings import Config
from ctl_core.state import State
from ctl_core.step import (
    apply_update,
    forward,
    forward_backward,
    loss_of,
    objectives,
    run_model,
    train_step,
    weight_of,
)
from ctl_core.stretches import stack_for
from ctl_core.training_mode import inference


def create_state(callbacks: Any, config: Config, run: Run, console: Console) -> State:
    """Calls the create hooks, builds every variable, and checks what the hooks return.

    Nothing is read from a checkpoint and nothing is trained.

    Raises:
        SetupError: a setting or a hook cannot work; the message says which and why.
    """
    keras.utils.set_random_seed(config.seed)
    strategy = create_strategy(config)
    cluster = Cluster(strategy, run.task)
    cluster.check_settings(config)
    check_shared(cluster, run.path)
    hooks, warnings = load_hooks(callbacks, config)
    for warning in warnings:
        console.warn(warning)
    try:
        with cluster.peers():
            return _create(hooks, config, run, strategy, cluster, console)
    except HookFailed as error:  # nothing has been trained yet: wrong hooks, not a failed run
        raise SetupError(str(error)) from error.__cause__
    except IndexError as error:
        if "distribute_lib" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise
        raise SetupError(
            "a hook clears Keras' session, or resets TensorFlow's default graph, by which it ends "
            "the strategy's scope, too; leave that out: each run begins with seeds and names of "
            "its own."
        ) from error


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
        train_model = create_callable(
            hooks.create_model, "train_model", per_replica_batch_size=per_replica
        )
        train_loss = create_callable(hooks.create_loss, "train_loss")
        check_loss(hooks.create_loss, train_loss)
        lr = LearningRate(config.learning_rate)
        context = StepContext(
            hooks,
            train_model,
            train_loss,
            lr,
            None,
            {},
            config.batch_size,
            replicas,
            step,
            config.accumulate_steps,
            config.jit_compile,
            notes_losses=config.on_nan != "ignore",
        )
        if data.counted is not None:
            most, several = config.batch_size // config.accumulate_steps, data.sizes.shares > 1
            context.shares = Shares(strategy, most, several, cluster.task.processes)
        optimizers = _create_optimizers(context, lr, data, cluster.task)
        optimizer = context.optimizer
        variables, writes, parts = _build_variables(context, data, cluster.task)
        check_groups(hooks.create_opt, optimizers, variables)
        check_variables(hooks.create_model, variables)
        if said := of_sample_weights(hooks, data.element_spec):
            console.warn(said)
        for name, one in optimizers.items():
            if isinstance(one, keras.Optimizer) and not one.built:
                one.build(variables[name])
        if context.jit_compile:
            context.stack = stack_for(context, data)
            context.jit_compile = context.stack is None
        roots = _roots(context)
        computed = {*lower_dtypes(find(roots).layers), config.precision} - {"float32"}
        if "float16" in computed:
            context.loss_scale = LossScale()
        if wanted(config):
            context.rate_schedule = schedule_of(config, lr, context.lr, console)
        context.train_metrics = create_metrics(hooks.create_train_metrics)
        if context.train_metrics:
            _build_train_metrics(context, data, cluster.task)
        context.loss_parts = create_loss_parts(hooks.grad_pre, parts, context.train_metrics)
        if context.logged():
            roots["train_metrics"] = context.logged()
        if config.ema is not None:
            with unfrozen(train_model):
                weights = trainable_variables(train_model)
            roots["ema"] = context.average = WeightAverage(config.ema, weights, strategy)
        _create_eval_model(context, roots)
        evaluation = _create_evaluation(context, strategy, cluster.task, config, per_replica)
        if hooks.create_eval_model is not None:
            _build_eval_model(context, data, cluster.task, evaluation)
        _build_late(roots, context, data, cluster.task, variables)
        if cluster.task.chief:
            repair_list(run.ckpt, run.reading)
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
            str(hook),
        )
    check_manager(hook, ckpt, manager)
    _ = ckpt.save_counter  # TensorFlow makes it when it is first asked for
    roots["ckpt"] = ckpt
    if evaluation is not None:
        roots["metrics"] = evaluation.lasting_metrics()
    found = find(roots)
    if context.shares is not None:
        context.shares.look_at(writes, found)
    own = context.shares.own if context.shares else []
    return State(
        config=config,
        run_dir=run.path,
        whole=run.whole,
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
        statistics=MovingStatistics(found.layers, strategy, own),
        context=context,
        data=data,
        evaluation=evaluation,
        roots=roots,
        found=found,
        freezing=Freezing(found),
        computed_in=sorted(computed),
        writes=writes,
    )


def _create_optimizers(
    context: StepContext, lr: LearningRate, data: Input, task: Task
) -> dict[str, Any]:
    """Calls ``create_opt``; where that names the model, its variables are there.

    Returns:
        The optimizers by objective, which the context has, too.
    """
    hook = context.hooks.create_opt
    if "train_model" in hook.arguments:
        lr.follows = False
        with scratch(data, task):
            for _ in context.each_turn(again=False):
                run_model(context, placeholders(data.element_spec), training=True)
        lr.follows = True
    made = hook(lr=lr, train_model=context.train_model)
    lr.follows = False
    optimizer = OptimizerGroups(made) if is_pairs(made) else made
    optimizers = optimizer if isinstance(optimizer, dict) else {"": optimizer}
    check_optimizers(hook, optimizers)
    check_turns(context.hooks, optimizers, context.accumulate_steps)
    if context.replicas > 1:
        check_optimizers_of_replicas(hook, optimizer)
    context.optimizer, context.optimizers = optimizer, optimizers
    context.lr = rate_for_hooks(lr, optimizers, str(hook))
    return optimizers


def _create_evaluation(
    context: StepContext,
    strategy: tf.distribute.Strategy,
    task: Task,
    config: Config,
    per_replica: int,
) -> Evaluation | None:
    """Creates the evaluation, of batches and of a length that do not depend on the replicas."""
    most, size = config.limit_eval, config.eval_batch_size
    return create_evaluation(
        context,
        strategy,
        task,
        (size or 0) // context.replicas or per_replica,
        None if most is None else most * (size or config.batch_size),
    )


def _create_eval_model(context: StepContext, roots: dict[str, Any]) -> None:
    """Calls ``create_eval_model``; without it, the model that is trained is evaluated.

    Raises:
        SetupError: it returns no callable; or a hook asks for what is not there.
    """
    hooks = context.hooks
    hook, after = hooks.create_eval_model, hooks.update_post
    if hook is None:
        if after is not None and "eval_model" in after.arguments:
            raise after.reject("asks for eval_model, which create_eval_model would make; write it.")
        return
    made = create_callable(hook, "eval_model", train_model=context.train_model)
    roots["eval_model"] = context.eval_model = made


def _build_eval_model(
    context: StepContext, data: Input, task: Task, evaluation: Evaluation | None
) -> None:
    """Runs it on placeholders for each set of evaluation data, so that its variables exist."""
    sets = evaluation.sets.values() if evaluation is not None else ()
    elements = [one.data.dataset.element_spec for one in sets] or [data.element_spec]
    for element in elements:
        with scratch(data, task), inference():
            run_model(context, placeholders(element), training=False)


def _step_variable() -> tf.Variable:
    """Makes the step counter: one for all replicas, so that ``int(ckpt.step)`` works."""
    with tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="step")


def _roots(context: StepContext) -> dict[str, Any]:
    """Names the objects of a run, and the hooks of which functions may hold others."""
    return {
        "train_model": context.train_model,
        "train_loss": context.train_loss,
        "optimizer": context.optimizer,
        "keras.random": global_seed_generator(),
        **context.hooks.functions(),
    }


def _build_late(
    roots: dict[str, Any],
    context: StepContext,
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
    own = {n: o for n, o in context.optimizers.items() if not isinstance(o, keras.Optimizer)}
    for name, optimizer in own.items():
        build = getattr(optimizer, "build", None)
        if callable(build) and not getattr(optimizer, "built", False):
            build(variables[name])
    late = [o for o in own.values() if not getattr(o, "built", False)]
    if not late and all(optimizer.built for optimizer in find(roots).optimizers):
        return
    if context.replicas == 1:  # tf.function lifts what the values of new variables are made of
        step = tf.function(lambda: train_step(context, data, frozenset()) and None, autograph=False)
        step.get_concrete_function()
        return
    try:
        with scratch(data, task):
            batch = placeholders(data.element_spec)
            needed = frozenset({"output", "batch"})
            for _ in context.each_turn(again=False):
                apply_update(context, forward_backward(context, batch, needed), frozenset())
    except HookFailed as error:
        if "could not be lifted" in str(error.__cause__):
            hook = context.hooks.create_opt
            raise hook.reject(
                f"{kind_of(late[0])} makes variables when it is first "
                "used, which several replicas cannot; give it a method build(variables) that makes "
                "them, and is called before."
            ) from error
        raise


def _build_variables(
    context: StepContext, data: Input, task: Task
) -> tuple[dict[str, list[Any]], list[Write], list[str]]:
    """Runs the forward hooks once on placeholders, so that every variable exists.

    Nothing is computed: the graph is thrown away, and Keras creates variables outside of it.

    Returns:
        The variables that each objective's optimizer has to know, what is written to where not all
        examples of a step are seen at once, and the names of the parts of the loss. An optimizer
        has to know the trainable_vars of its objective, also what is frozen now: those that
        ``grad_pre`` returns once more with no layer frozen. Where there is one objective, it knows
        all that the model could train, too.

    Raises:
        SetupError: an objective has no variables, frozen or not.
    """
    with scratch(data, task) as graph:
        batch = placeholders(data.element_spec)
        named: list[dict[str, Any]] = []
        for _ in context.each_turn(again=False):
            output = run_model(context, batch, training=True)
            with pairs_refused(context, data.element_spec, placeholders):
                loss = loss_of(context, batch, output, training=True)
                weight = weight_of(context, batch, output)
                named.append(objectives(context, batch, output, loss, weight))
            with unfrozen(context.train_model, context.train_loss) as some_were_frozen:
                if some_were_frozen:
                    named.append(objectives(context, batch, output, loss, weight))
                alone = len(context.optimizers) == 1
                free = trainable_variables(context.train_model) if alone else []
    variables = {}
    for name in context.optimizers:
        several = [*(one[name][1] for one in named if name in one), free]
        variables[name] = list({id(v): v for of_one in several for v in of_one}.values())
        if not variables[name]:
            hook = context.hooks.grad_pre
            raise SetupError(
                f"{hook}['{name}']: returned no trainable_vars; there is nothing to train."
            )
    shared = context.replicas * context.accumulate_steps > 1
    writes = forward_writes(graph) if shared else []
    parts = [part for one in named for _, _, parts in one.values() for part in parts]
    return variables, writes, parts


def _build_train_metrics(context: StepContext, data: Input, task: Task) -> None:
    """Lets metrics that make variables when they are first used make them.

    Raises:
        SetupError: one is updated in no turn.
    """
    updated: set[str] = set()
    with scratch(data, task):
        batch = placeholders(data.element_spec)
        for _ in context.each_turn(again=False):
            output, loss = forward(context, batch, training=True)
            updated |= update_train_metrics(context, batch, output, loss)
    if missing := context.train_metrics.keys() - updated:
        hook = context.hooks.train_metric_pre
        raise hook.reject(f"returned nothing for the metric '{min(missing)}' in any turn.")
