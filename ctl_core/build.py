"""Everything a run is made of, created in the right order under the strategy's scope.

All that hooks create is recorded, see model/recording.py. ``train``, ``evaluate``, ``predict`` and
``export`` start from here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core.batches import BatchShape, BatchSource, make_placeholders
from ctl_core.checkpoint import (
    CheckpointFacade,
    ManagerFacade,
    is_summed,
    read_first_batch_size,
)
from ctl_core.checks.created import (
    check_groups,
    check_loss,
    check_manager,
    check_optimizers,
    check_turns,
    check_variables,
    create_callable,
    of_sample_weights,
)
from ctl_core.checks.returned import expect
from ctl_core.cluster.strategy import create_strategy, distribute, local_replicas
from ctl_core.cluster.sync import Cluster
from ctl_core.compat import captured_variables, scratch_graph
from ctl_core.console import Console
from ctl_core.errors import HookFailed, SetupError, brief
from ctl_core.evaluation.evaluate import Evaluation, add_batch, create_evaluation
from ctl_core.forward import compute_objectives, forward_backward, run_model
from ctl_core.hooks import Hooks, load_hooks
from ctl_core.input import Input
from ctl_core.metrics import create_loss_parts, create_metrics, update_train_metrics
from ctl_core.model.freezing import unfrozen
from ctl_core.model.parts import Moment, Parts, Written
from ctl_core.model.recording import Recording
from ctl_core.model.variables import trainable_variables
from ctl_core.numerics.averaging import WeightAverage
from ctl_core.numerics.batch_norm import moving_statistics
from ctl_core.numerics.groups import OptimizerGroups, is_pairs
from ctl_core.numerics.learning_rate import LearningRate, rate_for_hooks
from ctl_core.numerics.precision import LossScale, lower_dtypes
from ctl_core.numerics.rate_schedule import schedule_of
from ctl_core.run.folder import Run
from ctl_core.run_state.folder import repair_list
from ctl_core.settings import Config
from ctl_core.state import State
from ctl_core.step import change_gradients
from ctl_core.stretches import count_stacked_steps
from ctl_core.training_mode import inference
from ctl_core.units import count_batches


def create_state(
    callbacks: Any,
    config: Config,
    run: Run,
    console: Console,
    strategy: tf.distribute.Strategy | None = None,
) -> State:
    """Calls the create hooks, builds every variable, and checks what the hooks return.

    Nothing is read from a checkpoint and nothing is trained.

    Args:
        callbacks: the hooks
        config: the settings
        run: its folder
        console: for warnings
        strategy: whose replicas train; default: what the settings ask for

    Raises:
        SetupError: a setting or a hook cannot work; the message says which and why.
    """
    keras.utils.set_random_seed(config.seed)
    strategy = strategy or create_strategy(config)
    cluster = Cluster(strategy, run.task)
    cluster.check_settings(config)
    hooks, warnings = load_hooks(callbacks, config)
    for warning in warnings:
        console.warn(warning)
    try:
        with cluster.peers():
            return _Builder(hooks, config, run, strategy, cluster, console).build()
    except tf.errors.OpError as error:  # nothing but data has been read
        raise SetupError(f"{hooks.create_dataset}: reading the data: {brief(error)}") from error
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


class _Builder:
    """Builds one run; each method is a stage of it."""

    def __init__(
        self,
        hooks: Hooks,
        config: Config,
        run: Run,
        strategy: tf.distribute.Strategy,
        cluster: Cluster,
        console: Console,
    ) -> None:
        self.hooks, self.config, self.run, self.console = hooks, config, run, console
        self.strategy, self.cluster = strategy, cluster
        replicas = strategy.num_replicas_in_sync
        self.shape = BatchShape(config.batch_size, replicas, config.accumulate_steps)
        self.recording = Recording()
        self.data: Input = None  # type: ignore[assignment]

    def build(self) -> State:
        """Returns the state of a run that has not begun."""
        with self.recording.during("create_dataset"):
            first = read_first_batch_size(self.run.ckpt)
            source = BatchSource(self.hooks, self.config, self.shape, first)
            self.data = Input(self.strategy, source)
            self.cluster.check_data(self.hooks.create_dataset, source.call_hooks)
        # Outside of the scope: one for all replicas, so that ``int(ckpt.step)`` works.
        with self.recording.during("engine"), tf.device("CPU:0"):
            step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        tf.summary.experimental.set_step(step)  # for hooks that ask; steps taken set theirs
        with self.strategy.scope(), self.recording.during("engine"):
            parts = self._create_models(step)
            parts = self._create_optimizers(parts)
            parts, names = self._create_variables(parts)
            self._trace_update(parts)
            parts = self._add_numerics(parts)
            parts = self._add_metrics(parts, names)
            parts = self._add_eval_model(parts)
            with self.recording.during("create_metrics"):
                evaluation = create_evaluation(parts, self.config)
            self._build_evaluation(parts, evaluation)
            ckpt, manager = self._create_ckpt(parts)
        _ = ckpt.save_counter  # TensorFlow makes it when it is first asked for: not on replicas
        self.recording.fix()
        stacked = count_stacked_steps(parts, self.data)
        self.data.begin(count_batches(self.data.dataset, stacked) if stacked else 0)
        computed = {*lower_dtypes(self.recording.layers), self.config.precision} - {"float32"}
        return State(
            config=self.config,
            run_dir=self.run.path,
            whole=self.run.whole,
            parts=parts,
            learning_rate=self._own_rate,
            recording=self.recording,
            data=self.data,
            evaluation=evaluation,
            cluster=self.cluster,
            ckpt=ckpt,
            manager=manager,
            computed_in=sorted(computed),
        )

    def _create_models(self, step: tf.Variable) -> Parts:
        """Calls ``create_model`` and ``create_loss``."""
        hooks, config = self.hooks, self.config
        with self.recording.during("create_model"):
            train_model = create_callable(
                hooks.create_model, "train_model", per_replica_batch_size=self.shape.per_replica
            )
        self.recording.add_model("create_model", train_model)
        with self.recording.during("create_loss"):
            train_loss = create_callable(hooks.create_loss, "train_loss")
        check_loss(hooks.create_loss, train_loss)
        self.recording.add_model("create_loss", train_loss)
        return Parts(
            hooks=hooks,
            strategy=self.strategy,
            shape=self.shape,
            train_model=train_model,
            train_loss=train_loss,
            lr=LearningRate(config.learning_rate),
            step_variable=step,
            jit_compile=config.jit_compile,
            notes_losses=config.on_nan != "ignore",
        )

    @contextlib.contextmanager
    def _scratch(self, spec: Any = None) -> Iterator[Any]:
        """A graph in which hooks are called without running anything, and a batch for them.

        Variables made in it exist outside of it. In a tf.function, random generators could not be
        made on several replicas.
        """
        with scratch_graph("build").as_default() as graph, Alone(self.strategy, 0):
            yield graph, make_placeholders(self.data.share_spec if spec is None else spec)

    def _create_optimizers(self, parts: Parts) -> Parts:
        """Calls ``create_opt``; where that names the model, its variables are there."""
        hook, lr = self.hooks.create_opt, parts.lr
        if "train_model" in hook.arguments:
            lr.follows = False
            with self.recording.during("create_model"), self._scratch() as (_, batch):
                for moment in parts.moments():
                    run_model(parts, moment, batch, training=True)
            lr.follows = True
        with self.recording.during("create_opt"):
            made = hook(lr=lr, train_model=parts.train_model)
            optimizer = OptimizerGroups(made) if is_pairs(made) else made
        lr.follows = False
        optimizers = optimizer if isinstance(optimizer, dict) else {"": optimizer}
        check_optimizers(hook, optimizers)
        check_turns(self.hooks, optimizers, parts.shape.accumulate_steps)
        rate = rate_for_hooks(lr, optimizers, str(hook))
        self._own_rate = lr
        return dataclasses.replace(parts, optimizer=optimizer, optimizers=optimizers, lr=rate)

    def _create_variables(self, parts: Parts) -> tuple[Parts, list[str]]:
        """Runs the forward hooks once on placeholders, so that every variable exists.

        An optimizer has to know the trainable_vars of its objective, also what is frozen now: those
        that ``grad_pre`` returns once more with no layer frozen.

        Returns:
            The parts with the variables that the forward pass writes, and the names of the parts
            of the loss.

        Raises:
            SetupError: an objective has no variables, frozen or not.
        """
        named: list[dict[str, Any]] = []
        free: list[Any] = []
        with self.recording.during("create_model"), self._scratch() as (graph, batch):
            for moment in parts.moments():
                named.append(compute_objectives(parts, moment, batch, 1)[0])
                with unfrozen(self.recording) as some_were_frozen:
                    if some_were_frozen:
                        named.append(compute_objectives(parts, moment, batch, 1)[0])
                    if len(parts.optimizers) == 1:
                        free = trainable_variables(parts.train_model)
        self.recording.add_model("create_model", parts.train_model)
        self._record_captured(graph)
        variables: dict[str, list[Any]] = {}
        for name in parts.optimizers:
            several = [*(one[name].variables for one in named if name in one), free]
            variables[name] = list({id(v): v for of_one in several for v in of_one}.values())
            if not variables[name]:
                hook = self.hooks.grad_pre
                raise SetupError(
                    f"{hook}['{name}']: returned no trainable_vars; there is nothing to train."
                )
        hook = self.hooks.create_opt
        check_groups(hook, dict(parts.optimizers), variables)
        check_variables(self.hooks.create_model, variables)
        if complaint := of_sample_weights(self.hooks, self.data.share_spec):
            self.console.warn_once(complaint)
        with self.recording.during("create_opt"):
            for name, one in parts.optimizers.items():
                build = getattr(one, "build", None)
                if callable(build) and not getattr(one, "built", False):
                    build(variables[name])
        generators = set(map(id, self.recording.generators))
        moved = {
            id(statistic): 1.0 / max(1.0 - layer.momentum, 1e-6)
            for layer in self.recording.layers
            if not getattr(layer, "synchronized", True)
            for statistic in moving_statistics([layer])
        }
        written = tuple(
            Written(v, moved.get(id(v)), id(v) in moved or is_summed(v))
            for v in self.recording.find_written(graph, self.strategy)
            if id(v) not in generators
        )
        names = [part for one in named for each in one.values() for part in each.parts]
        scalar = frozenset(name for one in named for name in one if one[name].is_scalar)
        return dataclasses.replace(parts, written=written, scalar_losses=scalar), names

    def _record_captured(self, graph: Any) -> None:
        """Records the variables that hooks use and others have made, as at import."""
        local = self.strategy.experimental_local_results
        known = {id(part) for v in self.recording.variables.values() for part in local(v)}
        for variable in captured_variables(graph, self.strategy):
            if id(variable) not in known:
                self.recording.add(variable, "elsewhere")

    def _trace_update(self, parts: Parts) -> None:
        """Runs an ``update_pre`` of the user's on placeholders, so that its variables exist."""
        hook = self.hooks.update_pre
        if hook.is_default:
            return
        kept = frozenset({"output", "batch"} & {*hook.arguments})
        with self.recording.during("update_pre"), self._scratch() as (graph, batch):
            for moment in parts.moments():
                share = (batch, None, None, None)
                made, trained = forward_backward(parts, moment, 1, kept, share)
                change_gradients(parts, moment, made, made, trained)
        self._record_captured(graph)

    def _add_numerics(self, parts: Parts) -> Parts:
        """Adds the loss scale, the schedule of the learning rate and the average of weights."""
        config = self.config
        computed = {*lower_dtypes(self.recording.layers), config.precision}
        average = None
        if config.ema is not None:
            with unfrozen(self.recording):
                weights = trainable_variables(parts.train_model)
            with self.recording.during("ema"):
                average = WeightAverage(config.ema, weights, self.strategy)
        return dataclasses.replace(
            parts,
            loss_scale=LossScale() if "float16" in computed else None,
            rate_schedule=schedule_of(config, self._own_rate, parts.lr, self.console),
            average=average,
        )

    def _add_metrics(self, parts: Parts, names: list[str]) -> Parts:
        """Adds the train metrics, and those by which parts of the loss are logged."""
        hooks = self.hooks
        with self.recording.during("create_train_metrics"):
            metrics = create_metrics(hooks.create_train_metrics)
            loss_parts = create_loss_parts(hooks.grad_pre, names, metrics)
            parts = dataclasses.replace(parts, train_metrics=metrics, loss_parts=loss_parts)
            if not metrics:
                return parts
            updated: set[str] = set()
            with self._scratch() as (_, batch):
                for moment in parts.moments():
                    _, made = compute_objectives(parts, moment, batch, 1)
                    updated |= update_train_metrics(
                        parts, moment, batch, made["output"], made["loss"], None
                    )
        if missing := metrics.keys() - updated:
            raise hooks.train_metric_pre.reject(
                f"returned nothing for the metric '{min(missing)}' in any turn."
            )
        return parts

    def _add_eval_model(self, parts: Parts) -> Parts:
        """Calls ``create_eval_model``."""
        hook, after = self.hooks.create_eval_model, self.hooks.update_post
        if hook is None:
            if after is not None and "eval_model" in after.arguments:
                raise after.reject(
                    "asks for eval_model, which create_eval_model would make; write it."
                )
            return parts
        with self.recording.during("create_eval_model"):
            made = create_callable(hook, "eval_model", train_model=parts.train_model)
            self.recording.add_model("create_eval_model", made)
            return dataclasses.replace(parts, eval_model=made)

    def _build_evaluation(self, parts: Parts, evaluation: Evaluation | None) -> None:
        """Evaluates placeholders, so that every variable of eval_model and metrics exists."""
        sets = list(evaluation.sets.values()) if evaluation else []
        specs = [one.make().element_spec for one in sets]
        if self.hooks.create_eval_model is not None:
            for spec in specs or [self.data.share_spec]:
                hook, graph = self.recording.during("create_eval_model"), self._scratch(spec)
                with hook, inference(), graph as (_, batch):
                    run_model(parts, Moment(), batch, training=False)
        for one, spec in zip(sets, specs, strict=True):
            hook, graph = self.recording.during("create_metrics"), self._scratch(spec)
            with hook, inference(), graph as (_, batch):
                add_batch(parts, one, batch, None)

    def _create_ckpt(self, parts: Parts) -> tuple[Any, Any]:
        """Calls ``create_ckpt``; returns what hooks are given of it."""
        hook = self.hooks.create_ckpt
        if self.cluster.task.chief:
            repair_list(self.run.ckpt, self.run.reading)
        with self.recording.during("create_ckpt"):
            returned = hook(
                ckpt_path=str(self.run.ckpt),
                step=parts.step_variable,
                lr=self._own_rate,
                optimizer=parts.optimizer,
                train_model=parts.train_model,
                train_loss=as_trackable(parts.train_loss),
            )
            ckpt, manager = expect(returned, ("ckpt", "manager"), str(hook))
            check_manager(hook, ckpt, manager)
        facade = CheckpointFacade(ckpt)
        return facade, ManagerFacade(manager, facade)


class TrackableLoss(tf.Module):
    """Stands in a ``tf.train.Checkpoint`` for a loss that is a plain function."""

    def __init__(self, function: Any) -> None:
        super().__init__(name="train_loss")
        self._function = lambda: function

    def __call__(self, loss_input: Any) -> Any:
        """Returns what the function returns."""
        return self._function()(loss_input)


def as_trackable(loss: Any) -> Any:
    """Returns a loss, or something with its name and call that a checkpoint can hold."""
    try:
        tf.train.Checkpoint(train_loss=loss)
    except ValueError:
        return TrackableLoss(loss)
    return loss


class Alone(tf.distribute.ReplicaContext):
    """A replica that meets no other: what is exchanged has the right shapes and no values."""

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function as if every replica of this process gave the same."""

        def merge(strategy: tf.distribute.Strategy, args: Any, kwargs: Any) -> Any:
            def of_all(part: Any) -> Any:
                if not isinstance(part, tf.Tensor | tf.IndexedSlices):
                    return part
                return distribute(strategy, [part] * local_replicas(strategy))

            args, kwargs = tf.nest.map_structure(of_all, (args, kwargs))
            merged = merge_fn(strategy, *args, **kwargs)
            return tf.nest.map_structure(
                lambda part: strategy.experimental_local_results(part)[0], merged
            )

        return super().merge_call(merge, (args, kwargs or {}))

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns the value as it is."""
        return tf.nest.map_structure(tf.identity, value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Returns the value once for each replica."""
        replicas = self.strategy.num_replicas_in_sync
        return tf.nest.map_structure(lambda part: tf.concat([part] * replicas, axis), value)
