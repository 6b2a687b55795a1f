"""Compares results on one CPU device bit by bit with those on several, for ``train --check``.

A run with ``logical_replicas`` promises the same bits on any number of devices. It is not possible
to list all ops that break this promise, such as an op that counts the devices. Therefore, two steps
and an evaluation are run on one device and on three, with the same noise and batch statistics as in
training.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.commands.check_console import CheckConsole
from ctl_core.commands.compare_devices import (
    DEVICES,
    open_on_devices,
    repeat_data,
    share_evaluation_data,
)
from ctl_core.commands.differences import describe_layer
from ctl_core.commands.observation import (
    FETCHES,
    GRADIENT,
    ORDER,
    VARIABLE,
    Array,
    ValueKey,
    Values,
    read_evaluation,
    read_step,
)
from ctl_core.evaluation.sets import EvaluationSet
from ctl_core.graph import StepFunctions, begin_reading
from ctl_core.hooks.hooks import Hooks
from ctl_core.model.components import Compilation
from ctl_core.model.copies import list_local_components
from ctl_core.model.state import State
from ctl_core.run.errors import RunError, SetupError
from ctl_core.run.settings import Config

STEPS = 2


def compare_bits(hooks: Hooks, config: Config, console: CheckConsole) -> None:
    """Compares two steps and an evaluation on one device with those on three.

    With two logical replicas, the second run is on two devices. With a single logical replica, or
    without ``logical_replicas``, nothing is compared.

    Args:
        hooks: the hooks of the run
        config: the settings of the run
        console: prints a summary of the comparison

    Raises:
        SetupError: a value has different bits on several devices; the message names the first such
            value.
        RunError: a step or an evaluation failed.
    """
    if config.logical_replicas is None or config.logical_replicas == 1:
        return
    devices = min(DEVICES, config.logical_replicas)
    hooks = repeat_data(hooks, config.batch_size, config.batch_size)
    config = dataclasses.replace(config, limit_eval=DEVICES)
    evaluation_sets: dict[str, EvaluationSet] = {}
    measurements: list[list[Values]] = []
    for count in (1, devices):
        counted_config = dataclasses.replace(config, virtual_devices=count)
        with open_on_devices(hooks, counted_config, console) as state:
            share_evaluation_data(state, evaluation_sets)
            try:
                measurements.append(_measure(state))
            except tf.errors.OpError as error:
                raise RunError(f"check: {hooks.attribute_error(error)}") from error
    for expected, actual in zip(*measurements, strict=True):
        key = find_other_bits(expected, actual)
        if key is not None:
            raise _reject(state, key, devices)
    console.print(
        f"  {STEPS} steps and an evaluation have the same bits on one and on {devices} devices"
    )


def _measure(state: State) -> list[Values]:
    """Returns the values after each step, followed by those of an evaluation."""
    functions = StepFunctions(state, tf.summary.create_noop_writer(), Compilation.NOTHING)
    begin_reading(state.data, Compilation.NOTHING)
    measurement = []
    for _ in range(STEPS):
        values = read_step(state, functions.take_steps(1, FETCHES))
        for name, variable in state.recording.variables.items():
            components = list_local_components(state.strategy, [variable])
            values[VARIABLE, name] = [component.numpy() for component in components]
        measurement.append(values)
    measurement.append(read_evaluation(state))
    return measurement


def find_other_bits(expected: Values, actual: Values) -> ValueKey | None:
    """Returns the first value, in the order of computation, that has different bits.

    Variables come last, because the update changes them.

    Args:
        expected: the values on one device
        actual: the values on several devices; a value may have an array for each device
    """
    order = [*(kind for kind in ORDER if kind is not VARIABLE), VARIABLE]
    for key in sorted(expected, key=lambda key: order.index(key[0])):
        bits = _read_bits(expected[key][0])
        if any(_read_bits(array) != bits for array in actual[key]):
            return key
    return None


def _read_bits(value: Array) -> list[tuple[Any, ...]]:
    """Returns the shape, dtype and bits of an array, or of each component of a ragged tensor."""
    tensors = tf.nest.flatten(value, expand_composites=True)
    arrays = [np.asarray(tensor) for tensor in tensors]
    return [(array.shape, array.dtype, _read_bytes(array)) for array in arrays]


def _read_bytes(array: np.ndarray) -> Any:
    if array.dtype == object:  # an array of strings
        return array.tolist()
    return array.tobytes()


def _reject(state: State, key: ValueKey, devices: int) -> SetupError:
    """Returns the error for a value that has different bits on several devices."""
    kind, name = key
    # If outputs and losses agree and a gradient differs, the cause is an op of the model.
    hook = state.hooks.create_model
    if kind is not GRADIENT:
        hook = getattr(state.hooks, kind.hooks[-1])
    noun = f"{kind.noun} {name}".rstrip()
    return SetupError(
        f"check: {hook}: the {noun}{describe_layer(state, name)} has different bits on "
        f"{devices} devices than on one; replace the op that depends on the number of devices, "
        "or leave out logical_replicas."
    )
