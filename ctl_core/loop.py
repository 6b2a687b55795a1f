"""The outer loop: chunks of steps inside one graph call, then the hooks that are due.

The inner loop is in the graph: ``StepFunctions.run`` takes many steps in one call, and
``StepFunctions.observe`` takes one step and returns the values that due hooks name. Everything
else happens here, between two calls: hooks, evaluation, checkpoints, signals.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core.accumulate import joined, take_update
from ctl_core.checkpoint import Checkpoints
from ctl_core.chunks import ChunkLength
from ctl_core.cluster import Cluster, Word, peers
from ctl_core.config import Config
from ctl_core.console import LOG, Console, activate
from ctl_core.errors import CtlError, HookFailed, RunError, SetupError, StopTraining
from ctl_core.evaluation import evaluate, trace_evaluation
from ctl_core.freezing import freeze_flags
from ctl_core.hooks import OBSERVED, Hook, Hooks
from ctl_core.inputs import EMPTY
from ctl_core.precision import policy
from ctl_core.profile import Clock, Profile
from ctl_core.randomness import RANDOM_OPS, spread
from ctl_core.runs import Run
from ctl_core.state import State, create_state
from ctl_core.strategy import read_task

# How long a signal may be repeated without meaning a second one (seconds).
SAME_SIGNAL = 1.0
# Between two checkpoints, metrics and summaries are put on the disk at most so often (seconds).
FLUSH_INTERVAL = 1.0


def train(callbacks: Any, config: Config) -> State:
    """Trains until ``config.steps`` or ``config.epochs``, from the newest checkpoint if any.

    Args:
        callbacks: a module, or any object, with the hooks as attributes
        config: the settings

    Returns:
        The trained state. ``stopped_by`` is set if a signal ended training early.

    Raises:
        SetupError: a setting or a hook cannot work; nothing was trained.
        RunError: a hook raised, or a step or a file failed; the last checkpoint stays usable.
        PeerLost: another process of the cluster is gone.
    """
    if config.workers > 1 and not os.environ.get("TF_CONFIG"):
        raise SetupError(f"workers: needs the command line: ./train.sh --workers {config.workers}")
    if config.steps is None and config.epochs is None:
        raise SetupError("steps: say how long to train, with steps or epochs.")
    task = read_task(config)
    run, console = Run(config, task), Console(shown=task.chief)
    with (
        session(run, console),
        policy(config.precision),
        peers(task),
        Signals() as signals,
    ):
        if task.chief:
            run.lock()
        state = create_state(callbacks, config, run, console)
        checkpoints = Checkpoints(state, console)
        record = checkpoints.restore()
        spread(state.train_model, state.strategy, task)
        start, last = state.step, _last_step(state, console)
        if record and record.learning_rate != config.learning_rate:
            console.say(f"learning_rate is {config.learning_rate:g} from here on.")
            state.lr.assign(config.learning_rate)
        state.functions = StepFunctions(state)
        if start < last:
            state.functions.check(console)
        if task.chief:
            run.open(config, start, new=start < last)
            console.listeners.append(run.write)
        console.say(_opening(state, start, last, resumed=record is not None))
        console.start(start, last)
        profile = Profile(config.profile_steps if task.chief else None, run.path / "tb" / "train")
        state.clock = Clock()
        seconds = time.monotonic()
        try:
            _loop(state, checkpoints, run, console, signals, profile, last)
        finally:
            note = profile.end()
            state.clock.waited = state.data.seconds_waited
        run.flush()
        console.stop()
        if note:
            console.say(note)
        if start < last:
            console.say(state.clock.summary())
        console.say(_closing(state, start, last, time.monotonic() - seconds))
    return state


def _loop(
    state: State,
    checkpoints: Checkpoints,
    run: Run,
    console: Console,
    signals: Signals,
    profile: Profile,
    last: int,
) -> None:
    """Trains to step ``last``: a chunk, then what is due, then the next chunk."""
    schedule = Schedule(state.hooks, state.config, last, profile.marks)
    chunk = ChunkLength(state.config.max_chunk)
    functions: StepFunctions = state.functions
    agree = Agreement(state.cluster, signals)
    step = state.step
    clock = state.clock
    agree(Word(chunk=chunk.limit, step=step, frozen=functions.frozen))
    _evaluate_and_save(state, step, checkpoints, run, console, agree, schedule)
    profile.at(step)
    while step < last and not agree.signal:
        stop = schedule.next_stop(step)
        due = schedule.due(stop)
        wanted = frozenset(name for hook in due for name in hook.arguments if name in OBSERVED)
        before, values, end = step, {}, False
        with _blame(state, step), clock.time("steps"):
            if stop == step + 1 and (wanted or schedule.every_step):
                values = functions.observe(wanted)
                step += 1
            else:
                steps = min(stop - step - bool(wanted), chunk.limit)
                with chunk.timed(steps):
                    functions.run(steps)
                step += steps
        checkpoints.examples += (step - before) * state.config.batch_size
        with clock.time("hooks"):
            for passed in range(before + 1, step + (step != stop)):
                for hook in schedule.deferred(passed):
                    hook(step=passed, dev=functions.devices)
            if step == stop:
                with run.writer("train").as_default(step=step):
                    try:
                        for hook in due:
                            hook(**_host_values(state, functions, step), **values)
                    except StopTraining as asked:
                        console.say(f"step {step}: a hook ends training. {asked}".rstrip())
                        end = True
                checkpoints.done.update(n for n in state.hooks.at_step if n == step)
                functions.refresh()
        word = agree(Word(chunk.limit, 0, checkpoints.asked, end, False, step, functions.frozen))
        chunk.limit, checkpoints.asked = word.chunk, word.save
        if word.end:
            schedule.end_at(step)
            last = step
        if step == stop:
            if note := profile.at(step):
                console.say(note)
            _evaluate_and_save(state, step, checkpoints, run, console, agree, schedule)
    run.flush()
    with clock.time("checkpoints"):
        checkpoints.save(due=True)
    with state.cluster.peers():
        state.statistics.average()
    state.stopped_by = agree.signal if step < last else None


def _host_values(state: State, functions: StepFunctions, step: int) -> dict[str, Any]:
    """What a host hook may name besides the observed values."""
    return {
        "dev": functions.devices,
        "step": step,
        "optimizer": state.optimizer,
        "ckpt": state.ckpt,
        "manager": state.manager,
        **state.parts.given(),
    }


def _evaluate_and_save(
    state: State,
    step: int,
    checkpoints: Checkpoints,
    run: Run,
    console: Console,
    agree: Agreement,
    schedule: Schedule,
) -> None:
    """Evaluates if that is due and not done, then saves: a checkpoint holds what came before."""
    if state.evaluation and schedule.evaluation_due(step) and checkpoints.evaluated != step:
        with (
            _blame(state, step),
            state.clock.time("evaluation"),
            state.statistics.averaged(),
        ):
            values = evaluate(state.evaluation, agree)
        if values is not None:
            state.metrics = values
            checkpoints.evaluated = step
            console.values(step, "eval", values)
    due = schedule.save_due(step)
    saving = due or checkpoints.asked
    run.flush(0.0 if saving else FLUSH_INTERVAL)
    if saving:
        with state.clock.time("checkpoints"):
            checkpoints.save(due=due)


class Schedule:
    """Which hooks, evaluations and checkpoints are due after which step.

    Attributes:
        every_step: whether a hook that is not deferred runs after each step
    """

    def __init__(
        self, hooks: Hooks, config: Config, last: int, marks: tuple[int, ...] = ()
    ) -> None:
        """Plans a run to step ``last``; after the steps in ``marks`` the graph is left, too."""
        self._every = [(n, hook) for n, several in hooks.every_steps.items() for hook in several]
        self._at = hooks.at_step
        self._last = last
        self._marks = marks
        self._ckpt_every, self._eval_every = config.ckpt_every, config.eval_every
        # Whether a step runs in a chunk or on its own must not depend on where a process began,
        # or a resumed run would compute some steps by another graph.
        self.every_step = any(n == 1 and not hook.deferred for n, hook in self._every)
        self._periods = {n for n, hook in self._every if not hook.deferred}
        self._periods |= {n for n in (config.ckpt_every, config.eval_every) if n}

    def end_at(self, step: int) -> None:
        """Makes this step the last one."""
        self._last = step

    def next_stop(self, step: int) -> int:
        """Returns the next step after which the graph has to be left."""
        periodic = (step - step % n + n for n in self._periods)
        once = (n for n in (*self._at, *self._marks) if n > step)
        return min(self._last, *periodic, *once, self._last)

    def due(self, step: int) -> list[Hook]:
        """Returns the hooks to run after a step: every_steps first, each in its own order."""
        return [hook for n, hook in self._every if step % n == 0] + list(self._at.get(step, ()))

    def deferred(self, step: int) -> list[Hook]:
        """Returns the hooks due after a step for which the graph was not left."""
        return [hook for n, hook in self._every if hook.deferred and step % n == 0]

    def evaluation_due(self, step: int) -> bool:
        """Whether an evaluation belongs after this step."""
        return step == self._last or bool(
            step and self._eval_every and step % self._eval_every == 0
        )

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step."""
        return bool(step and self._ckpt_every and step % self._ckpt_every == 0)


class StepFunctions:
    """The graph functions of the inner loop, traced once for each state of frozen layers.

    Attributes:
        devices: this process's replica devices
    """

    def __init__(self, state: State) -> None:
        self.devices = tuple(state.strategy.extended.worker_devices)
        self._state = state
        self._traced: list[Any] = []
        self._run: dict[tuple[bool, ...], Any] = {}
        self._observe: dict[tuple[tuple[bool, ...], frozenset[str]], Any] = {}
        self._frozen = tuple(freeze_flags(state.train_model))

    def refresh(self) -> None:
        """Notices what hooks have frozen or unfrozen; the next step uses a graph of its own."""
        self._frozen = tuple(freeze_flags(self._state.train_model))

    @property
    def frozen(self) -> int:
        """The state of frozen layers as a number."""
        return hash(self._frozen)

    def run(self, steps: int) -> None:
        """Takes ``steps`` steps in one graph call."""
        if self._frozen not in self._run:
            self._run[self._frozen] = self._concrete(self._trace_run())
        self._run[self._frozen](tf.constant(steps, tf.int64))

    def observe(self, wanted: frozenset[str]) -> dict[str, Any]:
        """Takes one step and returns the wanted values of it, eager."""
        key = (self._frozen, wanted)
        if key not in self._observe:
            self._observe[key] = self._concrete(self._trace_observe(wanted))
        return self._observe[key]()[0]  # type: ignore[no-any-return]

    def trace_counts(self) -> list[int]:
        """Returns how often each graph function was traced."""
        return [function.experimental_get_tracing_count() for function in self._traced]

    def _concrete(self, function: Any) -> Any:
        """Traces; the concrete function spares each call the search for the right trace."""
        self._traced.append(function)
        return function.get_concrete_function()

    def check(self, console: Console) -> None:
        """Traces a step and the evaluation before training starts, and warns of what shows.

        Raises:
            SetupError: a hook raised, or returned something else than it should.
        """
        try:
            function = self._run[self._frozen] = self._concrete(self._trace_run())
            graph = function.graph
            if self._state.evaluation is not None:
                trace_evaluation(self._state.evaluation)
        except HookFailed as error:
            raise SetupError(str(error)) from error.__cause__
        except Exception as error:
            if made := re.search(r"Unable to lift tensor <tf.Tensor '([^']*)/Init", str(error)):
                raise SetupError(
                    f"a hook makes the variable {_base_name(made.group(1))} inside the step; make "
                    "it in create_model. keras.random functions take one of the model's as seed."
                ) from error
            raise
        if names := self._state.parts.without_gradient:
            console.warn(
                f"the loss does not depend on {', '.join(names[:5])}"
                f"{' and others' if len(names) > 5 else ''}: not updated."
            )
        if generators := _foreign_generators(self._state, graph.variables):
            console.warn(
                f"a hook draws random numbers with {', '.join(generators)}, which is no part of "
                "the model: no checkpoint holds its state, and a resumed run draws others. Keep "
                "the generator, or the layer that has it, in an attribute of train_model."
            )
        definition = graph.as_graph_def()
        nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
        if found := sorted({node.op for node in nodes} & RANDOM_OPS):
            console.warn(
                f"a hook or the model draws random numbers with {', '.join(found)}, whose state no "
                "checkpoint can hold: a resumed run will draw others. Use a "
                "keras.random.SeedGenerator of the model, or tf.random.stateless_*."
            )

    def _trace_run(self) -> Any:
        @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
        def run(steps: tf.Tensor) -> None:
            def body(done: tf.Tensor) -> tuple[tf.Tensor]:
                take_update(self._state.parts, self._state.data, frozenset())
                return (done + 1,)

            (done,) = tf.while_loop(lambda done: done < steps, body, (tf.constant(0, tf.int64),))
            self._state.step_variable.assign_add(done)

        return run

    def _trace_observe(self, wanted: frozenset[str]) -> Any:
        results = self._state.strategy.experimental_local_results

        @tf.function(autograph=False)
        def observe() -> tuple[dict[str, Any], Any]:
            values = take_update(self._state.parts, self._state.data, wanted)
            self._state.step_variable.assign_add(1)
            found = {
                name: tf.nest.map_structure(lambda v, n=name: _of_replicas(results(v), n), part)
                for name, part in values.items()
            }
            # What is the same on all replicas is returned of all, though one is used: TensorFlow
            # rewrites arithmetic whose result nobody asks for, which rounds differently, and then
            # the replicas' variables would no longer be equal.
            return found, [results(v)[1:] for v in tf.nest.flatten(values)]

        return observe


def _foreign_generators(state: State, used: Any) -> list[str]:
    """Names the states of random generators that a step uses but the model does not own."""
    variables = getattr(state.train_model, "variables", ())
    own = {_base_name((v.value if isinstance(v, keras.Variable) else v).name) for v in variables}
    names = {_base_name(variable.name) for variable in used} - own
    return sorted(name for name in names if name.endswith(("seed_generator_state", "StateVar")))


def _base_name(name: str) -> str:
    """Leaves out which replica's copy of a variable the name means."""
    return name.split(":")[0].split("/replica_")[0]


def _of_replicas(values: tuple[Any, ...], name: str) -> Any:
    """Makes one value out of those of the replicas.

    Outputs and batches are concatenated along the batch axis; scalars in them become a vector
    with an entry per replica. What was reduced is the same everywhere.
    """
    return joined(values) if name in ("output", "batch") else values[0]


class Agreement:
    """What all processes have agreed on; asked after each graph call.

    Attributes:
        signal: the signal that ends training, or 0; on every process the same
    """

    def __init__(self, cluster: Cluster, signals: Signals) -> None:
        self.signal = 0
        self._cluster = cluster
        self._signals = signals

    def __call__(self, word: Word) -> Word:
        """Takes this process's word, adds the signal it received, and returns that of all."""
        word = self._cluster.agree(
            dataclasses.replace(word, signal=self.signal or self._signals.received or 0)
        )
        self.signal = word.signal
        return word


class Signals:
    """Notes SIGTERM and SIGINT instead of dying of them; a second one is not held back.

    What comes within a second of the first is taken for the same: a process manager may signal
    a whole cluster, of which the supervisor passes it on as well.

    Attributes:
        received: the number of the first one, or None
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread: the program there decides
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = number, now
        elif now - self._at > SAME_SIGNAL:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)


@contextmanager
def session(run: Run, console: Console) -> Iterator[None]:
    """Opens the run's log and console, and closes them however the run ends."""
    activate(console)
    try:
        yield
    except CtlError as error:
        LOG.error(str(error), exc_info=error.__cause__ or error)
        raise
    except BaseException as error:
        LOG.error("failed", exc_info=error)
        raise
    finally:
        console.stop()
        activate(None)
        run.close()


@contextmanager
def _blame(state: State, step: int) -> Iterator[None]:
    """Turns a failure of TensorFlow's inside a graph call into one line that names the hook."""
    hooks = state.hooks
    try:
        yield
    except tf.errors.OutOfRangeError as error:
        where = f"create_dataset ({hooks.create_dataset.where})"
        if step == 0:
            raise SetupError(f"{where}: {EMPTY}") from error
        raise RunError(f"{where}: the training data ended after step {step}.") from error
    except tf.errors.OpError as error:
        with state.cluster.peers():
            if state.cluster.lost(error):
                raise
        raise RunError(f"{hooks.blame(error)}, after step {step}.") from error


def _last_step(state: State, console: Console) -> int:
    """Returns the step at which training ends.

    Raises:
        SetupError: epochs are asked for, but the data has no end.
    """
    if state.config.epochs is None:
        assert state.config.steps is not None
        return state.config.steps
    steps = state.data.steps_per_epoch()
    if steps is None:
        raise SetupError(
            "epochs: create_dataset or make_batches gives an endless dataset, which has no "
            "epochs; use steps."
        )
    console.say(f"an epoch has {steps} steps.")
    return steps * state.config.epochs


def _opening(state: State, start: int, last: int, resumed: bool) -> str:
    config, replicas = state.config, state.parts.replicas
    batch = f"batch size {config.batch_size}"
    if config.accumulate_steps > 1:
        batch += f" in {config.accumulate_steps} micro-batches"
    where = f"{replicas} replica{'s' * (replicas > 1)} on {_devices(state)}"
    if config.precision != "float32":
        where += f", in {config.precision}"
    if start >= last:
        return f"{state.run_dir}: at step {start} of {last} already, nothing left to train."
    doing = f"resuming at step {start}" if resumed else "training"
    return f"{state.run_dir}: {doing}, to step {last}, {batch}, {where}."


def _devices(state: State) -> str:
    kinds = [device.split("device:")[-1].split(":")[0] for device in state.functions.devices]
    return ", ".join(sorted(set(kinds)))


def _closing(state: State, start: int, last: int, seconds: float) -> str:
    step = state.step
    values = "  ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
    parts = [f"step {step}", f"{step - start} steps in {seconds:.1f} s"]
    if values:
        parts.append(f"evaluation: {values}")
    if state.stopped_by is not None:
        name = signal.Signals(state.stopped_by).name
        again = f"--run-name {Path(state.run_dir).name}"
        head = f"stopped by {name}, saved; goes on from here with {again}"
    else:
        head = "done"
    return f"{head}: {'; '.join(parts)}. Everything is in {Path(state.run_dir).resolve()}"
