"""Everything a run is made of, created in the right order under the strategy's scope.

All that hooks create is recorded, see hooks/recording.py. ``train``, ``evaluate``, ``predict`` and
``export`` start from here.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl_core import compat
from ctl_core.checkpoint.folder import Run
from ctl_core.cluster.collectives import Alone
from ctl_core.cluster.strategy import create_strategy
from ctl_core.cluster.sync import Cluster, is_peer_lost
from ctl_core.evaluation.evaluate import Evaluation, add_batch, create_evaluation
from ctl_core.graph import is_executable
from ctl_core.hooks.hooks import Hooks
from ctl_core.hooks.load import load_hooks
from ctl_core.hooks.recording import Recording, unfreeze
from ctl_core.input.batches import BatchShape, Share, find_first_replica, make_placeholders
from ctl_core.input.prefetch import count_batches
from ctl_core.input.stream import Input
from ctl_core.model.forward import (
    Objective,
    call_made,
    compute_objectives,
    forward_backward,
    run_model,
)
from ctl_core.model.metrics import update_train_metrics
from ctl_core.model.parts import Parts, Written
from ctl_core.model.state import State
from ctl_core.numerics.groups import OptimizerGroups, is_pairs
from ctl_core.numerics.learning_rate import LearningRate, RateSchedule, make_rate_for_hooks
from ctl_core.numerics.not_finite import LossScale
from ctl_core.numerics.replicas import WeightAverage, find_moving_statistics
from ctl_core.numerics.variables import is_summed, name_variable, trainable_variables, unwrap, walk
from ctl_core.run.console import Console
from ctl_core.run.errors import HookFailed, SetupError, format_error
from ctl_core.run.settings import SETTINGS, Config
from ctl_core.step import change_gradients


@contextlib.contextmanager
def prepare_process(config: Config) -> Iterator[None]:
    """Within, Keras and TensorFlow are as the run needs them, which trains as in a new process.

    Names of Keras' objects begin anew, and ops stay deterministic from here on. Keras' one dtype
    policy is put back at the end, also where a hook has set another.
    """
    compat.name_anew()
    before = keras.config.dtype_policy()
    if config.precision != "float32":
        keras.config.set_dtype_policy(f"mixed_{config.precision}")
    compat.keep_large_sums_whole()
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    try:
        with compat.separate_losses(), compat.convert_variables():
            yield
    finally:
        keras.config.set_dtype_policy(before)


def create_state(
    callbacks: Any,
    config: Config,
    run: Run,
    console: Console,
    strategy: tf.distribute.Strategy | None = None,
) -> State:
    """Calls the create hooks, builds every variable, and checks what the hooks return.

    Nothing is read from a checkpoint and nothing is trained. The ``strategy`` is by default what
    the settings ask for.

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
        return _Builder(hooks, config, run, strategy, cluster, console).build()
    except tf.errors.OpError as error:  # nothing but data has been read
        if is_peer_lost(cluster.task, error):
            raise
        raise SetupError(
            f"{hooks.create_dataset}: reading the data: {format_error(error)}"
        ) from error
    except HookFailed as error:  # nothing has been trained yet: wrong hooks, not a failed run
        raise SetupError(str(error)) from error.__cause__


@dataclasses.dataclass
class _Builder:
    """Builds one run; each method is a stage of it."""

    hooks: Hooks
    config: Config
    run: Run
    strategy: tf.distribute.Strategy
    cluster: Cluster
    console: Console
    recording: Recording = dataclasses.field(default_factory=Recording)

    def build(self) -> State:
        """Returns the state of a run that has not begun."""
        config, recording = self.config, self.recording
        replicas = self.strategy.num_replicas_in_sync
        shape = BatchShape(config.batch_size, replicas, config.accumulate_steps)
        with recording.record_as("create_dataset"):
            self.data = data = Input(self.hooks, config, self.strategy, shape)
        shape = data.shape
        # Outside of the scope: one for all replicas, so that ``int(ckpt.step)`` works.
        with recording.record_as("engine"), tf.device("CPU:0"):
            step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        tf.summary.experimental.set_step(step)  # for hooks that ask; steps taken set theirs
        with self.strategy.scope():
            with recording.record_as("engine"):
                rate = LearningRate(config.learning_rate)
            parts = Parts(
                hooks=self.hooks,
                strategy=self.strategy,
                shape=shape,
                train_model=self._create("create_model", per_replica_batch_size=shape.per_replica),
                train_loss=self._create("create_loss"),
                lr=rate,
                step_variable=step,
                jit_compile=config.jit_compile,
                train_metrics=self._create("create_train_metrics"),
            )
            parts, objectives, weights = self._trace_forward(parts)
            parts = self._create_optimizers(parts, rate, objectives)
            self._trace_update(parts)
            computed_in = {config.precision, *(layer.compute_dtype for layer in recording.layers)}
            precisions = sorted(computed_in & {"bfloat16", "float16"})
            with recording.record_as("engine"):
                loss_scale = LossScale() if "float16" in precisions else None
                assign_rate = self._choose_schedule(parts, rate)
            with recording.record_as("ema"):
                ema = config.ema
                average = None if ema is None else WeightAverage(ema, weights, self.strategy)
            parts = dataclasses.replace(
                parts,
                loss_scale=loss_scale,
                assign_rate=assign_rate,
                update_average=average.update if average else None,
            )
            parts, evaluation = self._create_evaluation(parts)
            ckpt, manager = self._create_ckpt(parts, rate)
        _ = ckpt.save_counter  # TensorFlow makes it when it is first asked for: not on replicas
        recording.fix()
        data.begin(count_batches(data.dataset) if is_executable(parts, data) else 0)
        return State(
            config=config,
            run_dir=self.run.path,
            parts=parts,
            learning_rate=rate,
            average=average,
            recording=recording,
            data=data,
            evaluation=evaluation,
            cluster=self.cluster,
            ckpt=ckpt,
            manager=manager,
            computed_in=precisions,
        )

    def _choose_schedule(self, parts: Parts, rate: LearningRate) -> Any:
        """Returns what assigns the learning rate of each step, if the settings ask for it."""
        config, hooks = self.config, [self.hooks.create_opt, *self.hooks.list_graph_hooks()]
        is_named = any("lr" in hook.arguments for hook in hooks)
        is_scheduled = config.lr_schedule != "constant" or config.warmup > 0
        if is_scheduled and parts.lr is rate and is_named:
            return RateSchedule(config, rate).apply
        if is_scheduled:
            has_own = parts.lr is not rate
            why = "gives the optimizer a schedule of its own" if has_own else "does not use lr"
            self.console.warn(f"lr_schedule and warmup change nothing: create_opt {why}.")
        elif not is_named and config.learning_rate != SETTINGS["learning_rate"].default:
            self.console.warn("learning_rate changes nothing: create_opt does not use lr.")
        return None

    def _create_evaluation(self, parts: Parts) -> tuple[Parts, Evaluation | None]:
        """Creates the model and the metrics of evaluations, and traces one."""
        if self.hooks.create_eval_model is not None:
            eval_model = self._create("create_eval_model", train_model=parts.train_model)
            parts = dataclasses.replace(parts, eval_model=eval_model)
        with self.recording.record_as("create_metrics"):
            evaluation = create_evaluation(parts, self.config, self.recording)
        self._trace_evaluation(parts, evaluation)
        return parts, evaluation

    def _create_ckpt(self, parts: Parts, rate: LearningRate) -> Any:
        """Returns the checkpoint of the user's part, and its manager."""
        try:
            tf.train.get_checkpoint_state(str(self.run.ckpt))
        except ValueError:  # a list left empty by a power cut, which no manager starts with
            (self.run.ckpt / "checkpoint").unlink(missing_ok=True)
        return self._create(
            "create_ckpt",
            ckpt_path=str(self.run.ckpt),
            step=parts.step_variable,
            lr=rate,
            optimizer=make_trackable(parts.optimizer),
            train_model=make_trackable(parts.train_model),
            train_loss=make_trackable(parts.train_loss),
        )

    def _create(self, name: str, **values: Any) -> Any:
        """Calls a hook, and records what it creates."""
        with self.recording.record_as(name):
            made = getattr(self.hooks, name)(**values)
            self.recording.add_model(name, made)
        return made

    @contextlib.contextmanager
    def _scratch(self, hook: str, spec: Any = None) -> Iterator[Any]:
        """A graph in which hooks are called without running anything, and a batch for them.

        Variables made in it exist outside of it; those that others have made, as at import, are
        recorded. In a tf.function, random generators could not be made on several replicas.
        """
        recording, strategy = self.recording, self.strategy
        spec = self.data.share_spec if spec is None else spec
        with (
            recording.record_as(hook),
            Alone(strategy, find_first_replica(strategy)),
            compat.make_scratch_graph("build").as_default() as g,
        ):
            yield g, make_placeholders(spec)
        local = strategy.experimental_local_results
        known = {id(part) for v in recording.variables.values() for part in local(v)}
        for variable in compat.find_captured_variables(g, strategy):
            if id(variable) not in known:
                recording.add(variable, "elsewhere")

    def _trace_forward(self, parts: Parts) -> tuple[Parts, dict[str, list[Any]], list[Any]]:
        """Runs the forward hooks once on placeholders, so that every variable of theirs exists.

        No layer is frozen there: an optimizer has to know also what is unfrozen later.

        Returns:
            The parts with the variables that the forward pass writes and the means of the loss's
            parts; by objective the variables, frozen or not; and those of the model.
        """
        hooks, recording, model = self.hooks, self.recording, parts.train_model
        traced: list[tuple[str, Objective]] = []
        with unfreeze(recording), self._scratch("create_model") as (graph, batch):
            for turn in parts.list_turns():
                objectives, made = compute_objectives(turn, batch, 1)
                traced += objectives.items()
                with recording.record_as("create_train_metrics"):
                    update_train_metrics(turn, {}, made, None)
            weights = trainable_variables(model)
        variables: dict[str, dict[int, Any]] = {}
        for name, one in traced:
            own = one.variables if name else [*one.variables, *weights]
            variables.setdefault(name, {}).update({id(v): v for v in own})
        for name, several in variables.items():
            if why := find_untrainable(several.values(), self.strategy):
                raise hooks.grad_pre.reject(f"returned{f' for {name!r}' * bool(name)} {why}.")
        with recording.record_as("create_train_metrics"):
            names = dict.fromkeys(part for _, one in traced for part in one.parts)
            loss_parts = {name: keras.metrics.Mean(name) for name in names}
        parts = dataclasses.replace(
            parts,
            written=self._find_written(graph, parts),
            scalar_losses=frozenset(name for name, one in traced if one.is_scalar),
            loss_parts=loss_parts,
        )
        return parts, {name: list(several.values()) for name, several in variables.items()}, weights

    def _find_written(self, graph: Any, parts: Parts) -> tuple[Written, ...]:
        """Returns what the forward pass writes, random generators and metrics left out."""
        recording = self.recording
        metrics = [v for metric in parts.train_metrics.values() for v in metric.variables]
        aside = {id(unwrap(v)) for v in (*recording.generators, *metrics)}
        furthest = {
            id(statistic): 1.0 / max(1.0 - layer.momentum, 1e-6)
            for layer in recording.layers
            if not getattr(layer, "synchronized", True)
            for statistic in find_moving_statistics([layer])
        }
        return tuple(
            Written(
                variable,
                furthest.get(id(variable)),
                is_shared=not is_summed(variable)
                and id(variable) not in furthest
                and (variable.dtype.is_floating or variable.dtype.is_integer),
            )
            for variable in recording.find_written(graph, self.strategy)
            if id(variable) not in aside
        )

    def _create_optimizers(
        self, parts: Parts, rate: LearningRate, variables: dict[str, list[Any]]
    ) -> Parts:
        """Calls ``create_opt``, and lets each optimizer make what it keeps of its variables."""
        hooks, hook = self.hooks, self.hooks.create_opt
        if hooks.turns and self.config.accumulate_steps > 1:
            raise SetupError(
                f"accumulate_steps: {self.config.accumulate_steps} micro-batches cannot go with "
                "turns, in which several updates are made on one batch; leave one of the two out."
            )
        is_made_here = self.strategy.extended.variable_created_in_scope
        with self.recording.record_as("create_opt"):
            made = hook(lr=rate, train_model=parts.train_model)
            optimizer = OptimizerGroups(made) if is_pairs(made) else made
            optimizers = optimizer if isinstance(optimizer, dict) else {"": optimizer}
            if variables.keys() != optimizers.keys():
                raise hook.reject(
                    f"returned the optimizers {list(optimizers)}, but {hooks.grad_pre} the "
                    f"objectives {list(variables)}{', in turns' * bool(hooks.turns)}; the names "
                    "must be the same, or '' for a single one without."
                )
            for name, one in optimizers.items():
                number, build = getattr(one, "iterations", None), getattr(one, "build", None)
                if isinstance(number, keras.Variable) and not is_made_here(unwrap(number)):
                    raise hook.reject("returned an optimizer that was made before; make it there.")
                if callable(build) and not getattr(one, "built", False):
                    call_made(hook, build, variables[name])
        lr = make_rate_for_hooks(rate, optimizers)
        return dataclasses.replace(parts, optimizer=optimizer, optimizers=optimizers, lr=lr)

    def _trace_update(self, parts: Parts) -> None:
        """Runs an ``update_pre`` of the user's on placeholders, so that its variables exist."""
        hook = self.hooks.update_pre
        if hook.is_default:
            return
        kept = frozenset({"output", "batch"} & {*hook.arguments})
        with self._scratch("update_pre") as (_, batch):
            for turn in parts.list_turns():
                made, trained = forward_backward(turn, 1, kept, Share(batch))
                change_gradients(turn, made, made, trained)

    def _trace_evaluation(self, parts: Parts, evaluation: Evaluation | None) -> None:
        """Evaluates placeholders, so that every variable of eval_model and metrics exists."""
        for one in evaluation.sets.values() if evaluation else [None]:
            spec = self.data.share_spec if one is None else one.spec
            with compat.run_layers(False), self._scratch("create_metrics", spec) as (_, batch):
                if parts.eval_model is not None:
                    with self.recording.record_as("create_eval_model"):
                        run_model(parts, batch, training=False)
                if one is not None:
                    add_batch(parts, one, batch, None)


def find_untrainable(variables: Collection[Any], strategy: tf.distribute.Strategy) -> str | None:
    """Says which of the variables of an objective cannot be trained, and why."""
    if not variables:
        return (
            "no trainable_vars: nothing to train; Keras knows the variables that add_weight and "
            "layers of __init__ or build make, and no tf.Variable"
        )
    is_made_here = strategy.extended.variable_created_in_scope
    for variable in variables:
        if strategy.num_replicas_in_sync > 1 and not is_made_here(unwrap(variable)):
            why = "was made outside of the hooks, and so on no replica; make it in create_model"
            return f"{name_variable(variable)}, which {why}"
        if tf.as_dtype(variable.dtype) == tf.float16:
            why = "is in float16, in which most updates are lost; use mixed_float16"
            return f"{name_variable(variable)}, which {why}"
        if getattr(variable, "overwrite_with_gradient", False):  # by quantize("float8")
            why = "is overwritten with its gradient, which replicas cannot sum"
            return f"{name_variable(variable)}, which {why}"
    return None


def make_trackable(value: Any) -> Any:
    """Returns what a ``tf.train.Checkpoint`` can hold: of a function, its layers and variables."""
    try:
        tf.train.Checkpoint(value=value)
    except ValueError:
        holder = tf.Module()
        holder.parts = list(walk(value))
        return holder
    return value
