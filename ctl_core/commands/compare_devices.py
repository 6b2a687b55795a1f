"""Compares one CPU device with three, for ``train --check``.

This finds any kind of mistake that makes a value of a training step or of an evaluation differ
between one device and three. The shares of the three devices differ in size, as they do for any
batch size that is not divisible by the number of devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ctl_core.build import create_state
from ctl_core.checkpoint.checkpoints import reject_unsaved
from ctl_core.cluster.task import Task
from ctl_core.commands.check_console import CheckConsole
from ctl_core.commands.differences import Measurement, describe_differences, find_differences
from ctl_core.commands.observation import ExtraLossHook, NoisySteps, Observer
from ctl_core.evaluation.sets import EvaluationSet
from ctl_core.hooks.hooks import Hooks
from ctl_core.input.own_rows import repeat_marked_examples
from ctl_core.model.state import State
from ctl_core.numerics.rounding import round_coarsely
from ctl_core.run.errors import CtlError, RunError, SetupError, format_error
from ctl_core.run.settings import Config
from ctl_core.session.process import prepare_process
from ctl_core.session.run import Run, open_session

DEVICES = 3


def compare_devices(hooks: Hooks, config: Config, console: CheckConsole, by_rows: bool) -> None:
    """Compares a step and an evaluation on one device and on three.

    In the evaluation, one of the three devices has no rows. With ``accumulate_steps``, one device
    is also compared with one device that takes micro-batches. Differences between these two are
    only printed as warnings.

    Args:
        hooks: the hooks of the run
        config: the settings of the run
        console: prints a summary of the comparison, and the differences
        by_rows: whether the share of a replica consists of rows of a batch, rather than of elements
            of the dataset

    Raises:
        SetupError: a value differs; all differences were printed, the most probable cause first.
        RunError: a comparison was not possible; the message gives the reason.
    """
    sizes = [choose_uneven_size(config), choose_even_size(config)]
    has_fixed_model = "per_replica_batch_size" in hooks.create_model.arguments
    if has_fixed_model or not by_rows:
        del sizes[0]
    problems: list[str] = []
    for batch_size in sizes:
        comparison = Comparison(hooks, config, batch_size, console)
        try:
            comparison.measure()
        except CtlError as error:
            problems.append(str(error))
            continue
        except tf.errors.OpError as error:
            problems.append(format_error(error))
            continue
        if not problems:
            comparison.report()
            return
        uneven = describe_problem(sizes[0], problems[0])
        console.warn(uneven)
        comparison.report()
        raise RunError(f"check: {uneven}")
    raise RunError(f"check: one device cannot be compared with {DEVICES}: {problems[-1]}")


def describe_problem(batch_size: int, problem: str) -> str:
    """Returns a message for devices that cannot be compared when they share a batch unequally.

    Args:
        batch_size: the size of the batch
        problem: the error that prevented the comparison
    """
    return (
        f"one device cannot be compared with {DEVICES} for a batch of {batch_size}, which "
        f"{DEVICES} cannot share equally: {problem}"
    )


def choose_even_size(config: Config) -> int:
    """Returns a batch size that devices, and micro-batches within a device, can share equally."""
    shares = DEVICES * config.accumulate_steps
    return max(1, config.batch_size // shares) * shares


def choose_uneven_size(config: Config) -> int:
    """Returns a batch size that neither devices nor micro-batches can share equally.

    Each share has at least one row. The result is the largest such size up to the batch size of the
    run; if there is none, it is the smallest such size above.
    """
    divisors = {DEVICES, config.accumulate_steps} - {1}
    smallest = max(divisors) + 1
    lower = range(config.batch_size, smallest - 1, -1)
    candidates = itertools.chain(lower, itertools.count(smallest))
    return next(size for size in candidates if all(size % divisor for divisor in divisors))


class Comparison:
    """Compares devices for one batch size."""

    def __init__(
        self, hooks: Hooks, config: Config, batch_size: int, console: CheckConsole
    ) -> None:
        self._hooks = repeat_data(hooks, config.batch_size, batch_size)
        self._config = dataclasses.replace(
            config, batch_size=batch_size, eval_batch_size=DEVICES - 1, limit_eval=DEVICES
        )
        self._console = console
        self._evaluation_sets: dict[str, EvaluationSet] = {}
        self._noisy_steps = NoisySteps.UNKNOWN

    def measure(self) -> None:
        """Measures values on one device, on three, and in micro-batches if the run has them."""
        micro_batches = self._config.accumulate_steps
        self._on_one = self._measure_on(1)
        self._on_three = self._measure_on(DEVICES)
        self._in_micro_batches = None
        if micro_batches > 1:
            self._in_micro_batches = self._measure_on(1, micro_batches=micro_batches)

    def report(self) -> None:
        """Prints a summary of the comparison, and all differences.

        Raises:
            SetupError: values differ on three devices, or a step writes a variable that was created
                outside of the hooks.
        """
        refuse_shared_variables(self._on_one)
        self._console.print(
            f"  a step and an evaluation on one and on {DEVICES} devices were compared, with "
            f"batches of {self._config.batch_size}"
        )
        if self._in_micro_batches is not None:
            for line in self._describe_differences(self._in_micro_batches, "in micro-batches"):
                self._console.warn(line)
        lines = self._describe_differences(self._on_three, "three")
        if not lines:
            return
        if len(lines) > 1:
            self._console.print("  differences, the most probable cause first:")
            for line in lines:
                self._console.print(f"  - {line}")
        raise SetupError(f"check: {lines[0]}")

    def _describe_differences(self, measurement: Measurement, where: str) -> list[str]:
        differences = find_differences(self._on_one, measurement)
        if differences:
            differences = find_differences(self._on_one, measurement, self._rounded)
        return describe_differences(self._on_one, differences, where)

    @functools.cached_property
    def _rounded(self) -> Measurement | None:
        """A measurement on one device that rounds coarsely; None if it is not possible."""
        try:
            return self._measure_on(1, round_coarsely)
        except (CtlError, tf.errors.OpError, ValueError, TypeError):
            return None

    def _measure_on(
        self,
        devices: int,
        trace: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        micro_batches: int = 1,
    ) -> Measurement:
        """Returns the values of a run.

        Args:
            devices: the number of devices
            trace: a context in which the steps and the evaluation are traced
            micro_batches: the number of micro-batches
        """
        config = dataclasses.replace(
            self._config, accumulate_steps=micro_batches, virtual_devices=devices
        )
        grad_pre = ExtraLossHook.wrap(self._hooks.grad_pre)
        hooks = dataclasses.replace(self._hooks, grad_pre=grad_pre)
        with open_on_devices(hooks, config, self._console) as state:
            share_evaluation_data(state, self._evaluation_sets)
            observer = Observer(state, self._noisy_steps)
            with trace():
                observations = observer.observe()
            assert observer.graph is not None
            self._noisy_steps = observer.noisy_steps
        return Measurement(state, observer.graph, observations, sorted(grad_pre.adding_layers))


@contextlib.contextmanager
def open_on_devices(hooks: Hooks, config: Config, console: CheckConsole) -> Iterator[State]:
    """Builds the state of a run on ``virtual_devices`` CPU devices, even if there are GPUs.

    Args:
        hooks: the hooks of the run
        config: the settings of the run
        console: prints warnings
    """
    names = [f"CPU:{index}" for index in range(config.virtual_devices)]
    strategy: tf.distribute.Strategy
    if len(names) == 1:
        strategy = tf.distribute.OneDeviceStrategy(names[0])
    else:
        on_one = tf.distribute.ReductionToOneDevice()
        strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=on_one)
    run = Run(config, Task(), reading=True)
    with open_session(run, console), prepare_process(config):
        yield create_state(hooks, config, run, console, strategy)


def share_evaluation_data(state: State, evaluation_sets: dict[str, EvaluationSet]) -> None:
    """Makes each measurement evaluate the same batches as the first measurement.

    Args:
        state: the state of the run in the current measurement
        evaluation_sets: the evaluation sets of the first measurement by name; the first call adds
            them
    """
    if state.evaluation is None:
        return
    for name, evaluation_set in state.evaluation.sets.items():
        first = evaluation_sets.setdefault(name, evaluation_set)
        evaluation_set.make = first.make
        evaluation_set.element_spec = first.element_spec


def repeat_data(hooks: Hooks, batch_size: int, compared_size: int) -> Hooks:
    """Returns hooks whose datasets never end, for a comparison with another batch size.

    Otherwise, a dataset of a single batch might not fill the batches of the comparison. The hook
    ``create_dataset`` is never passed a larger batch size than in the run, because it may drop the
    last incomplete batch, and then there might be no batch left.

    Args:
        hooks: the hooks of the run
        batch_size: the batch size of the run
        compared_size: the batch size of the comparison
    """
    create_dataset = hooks.create_dataset

    @functools.wraps(create_dataset.function)
    def create_repeated(**values: Any) -> Any:
        for name in {"global_batch_size", "per_replica_batch_size"} & values.keys():
            if values[name] == compared_size:
                values[name] = min(batch_size, compared_size)
        with repeat_marked_examples() as marked:
            dataset = create_dataset.function(**values)
        if marked:
            return dataset
        is_pipeline = isinstance(dataset, tf.data.Dataset)
        if is_pipeline and dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
            return dataset.repeat()
        return dataset

    return dataclasses.replace(
        hooks, create_dataset=dataclasses.replace(create_dataset, function=create_repeated)
    )


def refuse_shared_variables(measurement: Measurement) -> None:
    """Rejects a step that writes a variable that several replicas would share.

    Raises:
        SetupError: the variable was created outside of the hooks, when the file was imported.
    """
    state = measurement.state
    written = set(map(id, state.recording.find_written(measurement.graph, state.strategy)))
    for name, variable in state.recording.variables.items():
        if name.startswith("elsewhere") and id(variable) in written:
            raise reject_unsaved(variable.name.split(":")[0])
