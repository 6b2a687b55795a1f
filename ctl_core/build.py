"""Builds the state of a run: calls the create hooks in the right order under the strategy's scope.

Everything that hooks create is recorded, see hooks/recording.py. In between, hooks are traced on
placeholders, see scratch.py. All commands that use a run start by building its state.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from ctl_core.checkpoint.initial_weights import (
    InitialWeights,
    check_patterns,
    list_weights,
    load_initial_weights,
)
from ctl_core.checkpoint.retention import prepare_list
from ctl_core.cluster.collectives import count_local_replicas
from ctl_core.cluster.strategy import create_strategy
from ctl_core.cluster.sync import Cluster, is_peer_lost
from ctl_core.evaluation.evaluate import create_evaluation
from ctl_core.hooks.hooks import Hooks
from ctl_core.hooks.load import load_hooks
from ctl_core.hooks.optimizer_groups import OptimizerGroups, is_pairs
from ctl_core.hooks.optimizers import refuse_loss_scales
from ctl_core.hooks.recording import Recording
from ctl_core.input.batches import BatchShape
from ctl_core.input.caches import refuse_shared_caches
from ctl_core.input.stream import Input
from ctl_core.model.averages import WeightAverage
from ctl_core.model.components import SINGLE_OBJECTIVE, Components, ForwardComponents
from ctl_core.model.copies import ReplicaCopies
from ctl_core.model.forward import call_made
from ctl_core.model.logical_limits import refuse_hooks, refuse_states
from ctl_core.model.shards import Shards
from ctl_core.model.state import State
from ctl_core.numerics.learning_rate import LearningRate, Rate, RateSchedule, make_rate_for_hooks
from ctl_core.numerics.not_finite import LossScale
from ctl_core.numerics.variables import make_trackable, unwrap
from ctl_core.run.console import Console
from ctl_core.run.errors import HookFailed, SetupError, format_error
from ctl_core.run.settings import SETTINGS, Config
from ctl_core.scratch import ScratchTracer, TracedForward
from ctl_core.session.facts import compare_optimizers, compare_processes
from ctl_core.session.run import Run
from ctl_core.types import Callbacks, Model, Optimizer, UserObject, Variable, VariablesByObjective


def create_state(
    callbacks: Callbacks,
    config: Config,
    run: Run,
    console: Console,
    strategy: tf.distribute.Strategy | None = None,
) -> State:
    """Calls the create hooks, builds every variable, and checks the results of the hooks.

    If the run starts from scratch, the weights that ``init_from`` names are loaded. No other
    checkpoint is read, and nothing is trained.

    Args:
        callbacks: the hooks
        config: the settings
        run: the run folder
        console: prints warnings
        strategy: the strategy whose replicas train; default: the strategy that the settings name

    Raises:
        SetupError: a setting or a hook cannot work; the message says which and why.
    """
    keras.utils.set_random_seed(config.seed)
    strategy = strategy or create_strategy(config)
    cluster = Cluster(strategy, run.task)
    compare_processes(cluster, strategy, config, callbacks)
    hooks, warnings = load_hooks(callbacks, config)
    for warning in warnings:
        console.warn(warning)
    try:
        return _Builder(hooks, config, run, strategy, cluster, console).build()
    except tf.errors.OpError as error:  # no ops have run except those that read data
        if is_peer_lost(cluster.task, error):
            raise
        raise SetupError(
            f"{hooks.create_dataset}: reading the data: {format_error(error)}"
        ) from error
    except HookFailed as error:  # nothing has been trained, so this is an error of the setup
        raise SetupError(str(error)) from error.__cause__


@dataclasses.dataclass
class _Builder:
    """Builds the state of one run; each method is one stage."""

    hooks: Hooks
    config: Config
    run: Run
    strategy: tf.distribute.Strategy
    cluster: Cluster
    console: Console

    def __post_init__(self) -> None:
        self.recording: Recording = Recording(divides_metrics=self.config.logical_replicas is None)

    def build(self) -> State:
        """Returns the state of a run that has not started.

        The order in which hooks are called determines the initial weights of a run, and the names
        of its variables in checkpoints. Therefore, it must not change.
        """
        self.data = self._create_input()
        if self.config.logical_replicas is not None:
            refuse_hooks(self.hooks)
        step = self._create_step()
        tracer = ScratchTracer(
            hooks=self.hooks,
            config=self.config,
            strategy=self.strategy,
            cluster=self.cluster,
            recording=self.recording,
            share_spec=self.data.share_spec,
            trains=not self.run.reading,
        )
        with self.strategy.scope():
            rate = self._create_learning_rate()
            forward = self._create_forward_components(step, rate)
            traced = tracer.trace_forward(forward)
        # The weights are loaded before optimizers, averages and eval_model are created, because
        # these may copy the weights. Loading happens outside of the strategy's scope, because it
        # also copies the random generators, and the scope would replicate these copies.
        loaded = self._load_initial_weights(forward.train_model)
        with self.strategy.scope():
            components, average, precisions = self._create_components(forward, traced, rate)
            trained = tracer.trace_update(components)
            with self.recording.record_as("create_metrics"):
                evaluation = create_evaluation(components, self.config, self.recording)
            tracer.trace_evaluation(components, evaluation)
            ckpt, manager = self._create_ckpt(components, rate)
        if loaded is not None:
            self._finish_initial_weights(forward.train_model, loaded)
        # TensorFlow creates save_counter on first access, which must not happen on a replica.
        _ = ckpt.save_counter
        self.recording.fix()
        self._add_generators(components)
        return State(
            config=self.config,
            run_dir=self.run.path,
            components=components,
            learning_rate=rate,
            average=average,
            recording=self.recording,
            data=self.data,
            evaluation=evaluation,
            cluster=self.cluster,
            ckpt=ckpt,
            manager=manager,
            computed_in=precisions,
            trained=trained,
            left_out=traced.left_out,
            untracked=traced.untracked,
            is_weighted=traced.is_weighted,
        )

    def _create_input(self) -> Input:
        """Creates the training data."""
        config = self.config
        replicas = self.strategy.num_replicas_in_sync
        if config.logical_replicas is not None and replicas > config.logical_replicas:
            raise SetupError(
                f"logical_replicas: {replicas} devices cannot share {config.logical_replicas} "
                "logical replicas; use fewer devices, or start a run with more logical "
                "replicas."
            )
        if config.accumulate_steps > config.batch_size and not self.run.reading:
            raise SetupError(
                f"accumulate_steps: a batch of {config.batch_size} cannot be split into "
                f"{config.accumulate_steps} micro-batches; use at most batch_size micro-batches."
            )
        shape = BatchShape(
            config.batch_size,
            replicas,
            config.accumulate_steps,
            logical_replicas=config.logical_replicas,
        )
        with self.recording.record_as("create_dataset"):
            data = Input(self.hooks, config, self.strategy, shape)
        refuse_shared_caches(self.hooks.create_dataset, data.dataset, self.cluster)
        return data

    def _create_step(self) -> tf.Variable:
        """Creates the variable that contains the number of steps taken so far.

        The step is created outside of the strategy's scope, so that it is one variable for all
        replicas, and ``int(ckpt.step)`` works.
        """
        with self.recording.record_as("engine"), tf.device("CPU:0"):
            step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        # Hooks may read this step through TensorFlow. Traced steps set their own number instead.
        tf.summary.experimental.set_step(step)
        return step

    def _create_learning_rate(self) -> LearningRate:
        """Creates the learning rate that is passed to ``create_opt``."""
        with self.recording.record_as("engine"):
            return LearningRate(self.config.learning_rate)

    def _create_forward_components(
        self, step: tf.Variable, rate: LearningRate
    ) -> ForwardComponents:
        """Creates the model, the loss and the training metrics.

        Args:
            step: the number of steps taken so far
            rate: the learning rate
        """
        shape = self.data.shape
        train_model = self._create("create_model", per_replica_batch_size=shape.per_replica)
        train_loss = self._create("create_loss")
        train_metrics = self._create("create_train_metrics")
        return ForwardComponents(
            hooks=self.hooks,
            strategy=self.strategy,
            shape=shape,
            train_model=train_model,
            train_loss=train_loss,
            lr=rate,
            step_variable=step,
            train_metrics=train_metrics,
        )

    def _create_components(
        self, forward: ForwardComponents, traced: TracedForward, rate: LearningRate
    ) -> tuple[Components, WeightAverage | None, list[str]]:
        """Creates the optimizers, ``eval_model``, and what the settings need for a step.

        Args:
            forward: the components of the forward pass
            traced: the results of tracing the forward pass
            rate: the learning rate that is passed to ``create_opt``

        Returns:
            The components of a step, the moving average of the weights (None if ``ema`` is not
            set), and the dtypes lower than float32 in which training computes.
        """
        shards = self._create_shards(traced)
        optimizer, optimizers = self._create_optimizers(forward, rate, traced.variables, shards)
        lr = make_rate_for_hooks(rate, optimizers)
        precisions = self._find_low_precisions()
        loss_scale = self._create_loss_scale(precisions)
        assign_rate = self._choose_schedule(lr, rate)
        average = self._create_average(traced.weights, shards)
        update_average = None
        if average is not None:
            update_average = average.update
        eval_model = None
        if self.hooks.create_eval_model is not None:
            eval_model = self._create("create_eval_model", train_model=forward.train_model)
        loss_metrics = self._create_loss_metrics(traced.logged)
        components = Components(
            hooks=forward.hooks,
            strategy=forward.strategy,
            shape=forward.shape,
            train_model=forward.train_model,
            train_loss=forward.train_loss,
            lr=lr,
            step_variable=forward.step_variable,
            train_metrics=forward.train_metrics,
            eval_model=eval_model,
            optimizer=optimizer,
            optimizers=optimizers,
            written=traced.written,
            drawing_layers=traced.drawing_layers,
            scalar_losses=traced.scalar_losses,
            unchanged_losses=traced.unchanged_losses,
            loss_metrics=loss_metrics,
            loss_scale=loss_scale,
            assign_rate=assign_rate,
            update_average=update_average,
            shards=shards,
            own_gradients=traced.own_gradients,
            unjudged_gradients=traced.unjudged_gradients,
            leaf_obstacle=traced.leaf_obstacle,
        )
        if self.config.logical_replicas is not None:
            refuse_states(self.hooks.create_train_metrics, components.list_logged_metrics())
        return components, average, precisions

    def _add_generators(self, components: Components) -> None:
        """Adds all random generators to the components, so that leaves can set their states."""
        variables = [*self.recording.generators, *self.recording.tf_generators]
        components.generators.variables += variables
        components.generators.initial_states = [variable.numpy() for variable in variables]

    def _find_low_precisions(self) -> list[str]:
        """Returns the dtypes lower than float32 in which layers compute."""
        dtypes: set[str] = {self.config.precision}
        dtypes |= {layer.compute_dtype for layer in self.recording.layers}
        return sorted(dtypes & {"bfloat16", "float16"})

    def _create_loss_scale(self, precisions: list[str]) -> LossScale | None:
        """Creates the loss scale; returns None if no layer computes in float16."""
        if "float16" not in precisions:
            return None
        with self.recording.record_as("engine"):
            return LossScale()

    def _create_shards(self, traced: TracedForward) -> Shards | None:
        """Chooses the owners of variables; returns None if all devices keep the whole state."""
        if not self.config.shard_optimizer or count_local_replicas(self.strategy) == 1:
            return None
        trained = [variable for each in traced.variables.values() for variable in each]
        return Shards(self.strategy, self.recording, [*trained, *traced.weights])

    def _create_average(
        self, weights: list[Variable], shards: Shards | None
    ) -> WeightAverage | None:
        """Creates the moving average of the weights; returns None if ``ema`` is not set."""
        if self.config.ema is None:
            return None
        with self.recording.record_as("ema"):
            return WeightAverage(self.config.ema, weights, self.strategy, shards)

    def _choose_schedule(self, lr: Rate, rate: LearningRate) -> Callable[[tf.Tensor], None] | None:
        """Returns the function that assigns the learning rate of a step; None without a schedule.

        Args:
            lr: the rate that is passed to hooks
            rate: the rate that was passed to ``create_opt``
        """
        config = self.config
        named = {
            name
            for hook in (self.hooks.create_opt, *self.hooks.list_graph_hooks())
            for name in hook.arguments
        }
        rate.is_used = "lr" in named
        is_scheduled = config.lr_schedule != "constant" or config.warmup > 0
        if is_scheduled and lr is rate and rate.is_used:
            with self.recording.record_as("engine"):
                return RateSchedule(config, rate).apply
        if "config" in named:  # a hook may apply lr_schedule and warmup itself
            return None
        if is_scheduled:
            reason = "does not use lr"
            if lr is not rate:
                reason = "gives the optimizer its own schedule"
            self.console.warn(f"lr_schedule and warmup have no effect: create_opt {reason}.")
        elif not rate.is_used and config.learning_rate != SETTINGS["learning_rate"].default:
            self.console.warn("learning_rate has no effect: create_opt does not use lr.")
        return None

    def _create_ckpt(
        self, components: Components, rate: LearningRate
    ) -> tuple[tf.train.Checkpoint, tf.train.CheckpointManager]:
        """Calls ``create_ckpt``, and returns the checkpoint and the manager that it created.

        Raises:
            SetupError: ``keep`` is set, but the hook does not use this setting.
        """
        hook = self.hooks.create_ckpt
        if self.config.keep != SETTINGS["keep"].default and "config" not in hook.arguments:
            raise SetupError(
                f"keep: {hook} does not use it; add the argument config, and pass "
                "max_to_keep=config.keep."
            )
        prepare_list(self.run.ckpt)
        created: tuple[tf.train.Checkpoint, tf.train.CheckpointManager] = self._create(
            "create_ckpt",
            ckpt_path=str(self.run.ckpt),
            step=components.step_variable,
            lr=rate,
            optimizer=make_trackable(components.optimizer),
            train_model=make_trackable(components.train_model),
            train_loss=make_trackable(components.train_loss),
        )
        return created

    def _create(self, name: str, **values: Any) -> UserObject:
        """Calls a hook, and records the variables and layers that it creates.

        Args:
            name: the name of the hook
            values: the arguments of the hook, by name
        """
        with self.recording.record_as(name):
            created = getattr(self.hooks, name)(**values)
            self.recording.add_model(name, created)
        return created

    def _load_initial_weights(self, train_model: Model) -> InitialWeights | None:
        """Loads the weights that ``init_from`` names, if the run starts from scratch.

        Returns:
            The loaded weights; None if there is nothing to load.
        """
        if self.config.init_from is None or self.run.source is not None:
            return None
        # Random generators keep their states, because the seed of this run determines them.
        generators = ReplicaCopies(self.strategy, self.recording.generators)
        with generators.put_back_after():
            return load_initial_weights(train_model, self.hooks.create_model, self.config)

    def _finish_initial_weights(self, train_model: Model, loaded: InitialWeights) -> None:
        """Loads weights into variables that were created later, and prints which were loaded.

        For example, a layer that only evaluations call creates its variables late. Patterns of
        ``init_skip`` are checked here, because only now are all variables known.
        """
        check_patterns(train_model, self.config)
        if len(list_weights(train_model)) > len(loaded.paths):
            loaded = self._load_initial_weights(train_model) or loaded
        for line in loaded.describe():
            self.console.say(line)

    def _create_loss_metrics(self, names: Iterable[str]) -> dict[str, keras.Metric]:
        """Creates a mean metric for each logged part of the loss."""
        with self.recording.record_as("create_train_metrics"):
            return {name: keras.metrics.Mean(name) for name in dict.fromkeys(names)}

    def _create_optimizers(
        self,
        forward: ForwardComponents,
        rate: LearningRate,
        variables: VariablesByObjective,
        shards: Shards | None,
    ) -> tuple[Optimizer | dict[str, Optimizer], dict[str, Optimizer]]:
        """Calls ``create_opt``, and lets each optimizer create its own variables.

        Returns:
            The optimizer, or the dict of optimizers, that the hook returned; and a dict of all
            optimizers by objective.
        """
        hooks = self.hooks
        hook = hooks.create_opt
        if hooks.turns and self.config.accumulate_steps > 1:
            raise SetupError(
                f"accumulate_steps: {self.config.accumulate_steps} micro-batches cannot be "
                "combined with turns, which make several updates on one batch; use only one "
                "of the two."
            )
        place_slots = contextlib.nullcontext() if shards is None else shards.place_slots()
        with self.recording.record_as("create_opt"), place_slots:
            optimizer = hook(
                lr=rate, train_model=forward.train_model, train_loss=forward.train_loss
            )
            refuse_loss_scales(hook, optimizer)
            if is_pairs(optimizer):
                optimizer = OptimizerGroups(optimizer)
            optimizers = optimizer
            if not isinstance(optimizer, dict):
                optimizers = {SINGLE_OBJECTIVE: optimizer}
            if variables.keys() != optimizers.keys():
                in_turns = ", in turns" if hooks.turns else ""
                raise hook.reject(
                    f"returned the optimizers {list(optimizers)}, but {hooks.grad_pre} the "
                    f"objectives {list(variables)}{in_turns}; the names must be the same, or '' "
                    "for a single one without."
                )
            compare_optimizers(self.cluster, optimizers)
            for name, objective_optimizer in optimizers.items():
                self._build_optimizer(objective_optimizer, variables[name])
                if shards is not None:
                    shards.check_optimizer(hook, objective_optimizer)
        return optimizer, optimizers

    def _build_optimizer(self, optimizer: Optimizer, variables: list[Variable]) -> None:
        """Lets an optimizer create its variables, unless they exist already.

        Raises:
            SetupError: the optimizer was created outside of ``create_opt``.
        """
        hook = self.hooks.create_opt
        iterations = getattr(optimizer, "iterations", None)
        if isinstance(iterations, keras.Variable):
            is_created_here = self.strategy.extended.variable_created_in_scope(unwrap(iterations))
            if not is_created_here:
                raise hook.reject(
                    "returned an optimizer that was created before the call; "
                    "create it inside the hook."
                )
        build = getattr(optimizer, "build", None)
        if callable(build) and not getattr(optimizer, "built", False):
            call_made(hook, build, variables)
