"""Decides whether XLA compiles the steps of a run, before a batch is drawn or a variable changes.

The decision is made once per run and stored in its checkpoints, because the random numbers of a
compiled step differ from those of an uncompiled step.
"""

from __future__ import annotations

import time

import keras
import tensorflow as tf

from ctl_core.graph import StepFunctions, find_compilation, find_varying_shape
from ctl_core.hooks.table import OBSERVED
from ctl_core.model.components import Compilation, CompilationChoice
from ctl_core.model.state import State
from ctl_core.run.errors import HookFailed, NotCompilable, SetupError
from ctl_core.run.files import relative_path

_BEGUN_WITHOUT = (
    "the run was started without it, and compiled steps would draw other random numbers"
)


def choose_functions(
    state: State, summaries: tf.summary.SummaryWriter, begun: bool | None
) -> StepFunctions:
    """Decides whether steps are compiled, and returns the functions that take them.

    The decision is assigned to ``state.compilation``. With ``jit_compile: auto``, a new run on a
    single GPU is compiled if XLA can compile its steps. A resumed run stays compiled if it was
    started compiled, and uncompiled otherwise.

    Args:
        state: the state of the run
        summaries: writes the summaries of graph hooks
        begun: whether the resumed run is compiled; None for a new run

    Raises:
        SetupError: the resumed run is compiled, but cannot be compiled here.
    """
    setting = state.config.jit_compile
    if setting == "auto" and begun is not False:
        return _choose_automatically(state, summaries, is_new=begun is None)
    if setting is True:
        choice = CompilationChoice(find_compilation(state.components, state.data))
    elif setting is False:
        choice = CompilationChoice(Compilation.NOTHING, "jit_compile is false")
    else:
        choice = CompilationChoice(Compilation.NOTHING, _BEGUN_WITHOUT)
    state.compilation = choice
    return StepFunctions(state, summaries, choice.parts)


def _choose_automatically(
    state: State, summaries: tf.summary.SummaryWriter, is_new: bool
) -> StepFunctions:
    """Returns the functions for ``auto``, for a new run or for a resumed run that is compiled."""
    start = time.monotonic()
    if not is_new:
        reason = find_setting_against(state)
    elif is_on_gpu(state.strategy):
        reason = _find_reason_against_new(state)
    else:
        reason = "training runs on a CPU"
    if reason is None:
        parts = find_compilation(state.components, state.data)
        functions = StepFunctions(state, summaries, parts)
        seconds = None
        if parts is Compilation.STEP:
            reason = find_obstacle(state, functions)
            seconds = time.monotonic() - start
    if reason is None:
        state.compilation = CompilationChoice(parts, seconds=seconds)
        return functions
    if not is_new:
        name = relative_path(state.run_dir)
        raise SetupError(
            f"jit_compile: {name} is compiled by XLA, which is impossible here: {reason}. "
            f"Start another run from it, with other random numbers: --fork {name}; or start "
            "one with --no-jit-compile, which trains the same weights everywhere."
        )
    state.compilation = CompilationChoice(Compilation.NOTHING, reason)
    return StepFunctions(state, summaries, Compilation.NOTHING)


def find_setting_against(state: State) -> str | None:
    """Returns the setting that prevents ``auto`` from compiling a run; None if there is none."""
    config = state.config
    reasons = {
        "deterministic is set": config.deterministic,
        "detect_anomaly is set": config.detect_anomaly,
        "layers compute in float16": "float16" in state.computed_in,
    }
    return next((reason for reason, is_given in reasons.items() if is_given), None)


def _find_reason_against_new(state: State) -> str | None:
    """Returns why a new run is not compiled, before tracing any graph; None if there is no reason.

    Runs on several replicas are not compiled, because XLA may leak threads on them (TensorFlow
    issue 56423). No long run has yet shown that it does not.
    """
    reason = find_setting_against(state)
    if reason is not None:
        return reason
    shape = state.components.shape
    if shape.logical_replicas is not None:
        return "logical_replicas is set"
    if shape.replicas > 1:
        return "there are several replicas"
    return find_varying_shape(shape, state.data.dataset.element_spec)


def is_on_gpu(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether the replicas of a strategy are GPUs."""
    return "GPU" in strategy.extended.worker_devices[0]


def find_obstacle(state: State, functions: StepFunctions) -> str | None:
    """Returns why XLA cannot compile the steps of a run; None if it can.

    The tested steps return every value that some host hook takes as an argument. If XLA can compile
    these steps, it can compile all graphs of the run, unless a hook unfreezes a layer later.
    """
    hooks = state.hooks
    schedules = (*hooks.every_steps.values(), *hooks.at_step.values())
    arguments = {name for group in schedules for hook in group for name in hook.arguments}
    try:
        return functions.find_obstacle(frozenset(arguments & {*OBSERVED}))
    except HookFailed as error:
        if isinstance(error.__cause__, NotCompilable):
            place, _, _ = str(error).partition(": ")
            return f"{place} writes a tf.summary"
        return str(error)  # if the uncompiled step fails too, tracing that step raises the error


def explain_for_gpu(state: State) -> str:
    """Returns a line for ``--check`` that says whether the run would be compiled on a GPU.

    The answer may be incomplete, because the check runs on a CPU. The run itself is not changed.
    """
    if state.config.jit_compile is False:
        return "not compiled on a GPU: jit_compile is false"
    reason = _find_reason_against_new(state)
    if reason is None:
        writer = tf.summary.create_noop_writer()
        reason = find_obstacle(state, StepFunctions(state, writer, Compilation.STEP))
    if reason is not None:
        return f"not compiled on a GPU: {reason}"
    text = "XLA can compile the step as it was traced on a CPU"
    recurrent = list_cudnn_layers(state.recording.layers)
    if recurrent:
        text += (
            f"; on a GPU, however, Keras builds {', '.join(recurrent)} with cuDNN, which XLA "
            "cannot compile, unless use_cudnn is False"
        )
    return text


def list_cudnn_layers(layers: list[keras.Layer]) -> list[str]:
    """Returns the names of the layers for which Keras uses cuDNN on a GPU whenever it can."""
    kinds = (keras.layers.LSTM, keras.layers.GRU)
    return [
        layer.name
        for layer in layers
        if isinstance(layer, kinds) and getattr(layer, "use_cudnn", None) == "auto"
    ]
