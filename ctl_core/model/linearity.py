"""Tests before training whether a backward pass is linear.

A gradient function of the user may clip, normalize or quantize the gradient that it receives. If
the loss is divided by the weight of the batch only after such a backward pass, the function
receives gradients of the wrong size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from ctl_core.cluster.replica_contexts import LoneReplica
from ctl_core.compat import get_seed_generator, run_replica
from ctl_core.input.batches import count_rows, find_first_replica, take_batch_rows
from ctl_core.model.components import Division, StepContext, TraceContext, choose_division
from ctl_core.model.copies import ReplicaCopies
from ctl_core.model.forward import compute_objectives
from ctl_core.model.state import State
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.run.console import Console
from ctl_core.run.errors import SetupError
from ctl_core.types import Batch

# The upstream gradient is multiplied by these factors. They are powers of two, so that the gradient
# of a linear backward pass is multiplied exactly.
_FACTORS = (2.0**-12, 1.0, 2.0**12)
# The number of batches to try, and the maximum number of rows of each batch.
_BATCHES = 3
_MAX_ROWS = 64
# The largest difference between gradients, divided by their norm, that counts as equal.
_TOLERANCE = 1e-4


def check_division(state: State, console: Console) -> None:
    """Checks that the loss can be divided by ``batch_weight`` after the backward pass.

    Does nothing if it is divided earlier, or if all gradients are those of TensorFlow. A backward
    pass that draws random numbers or writes variables cannot be tested, so it is only reported.

    Raises:
        SetupError: the backward pass is not linear.
    """
    components = state.components
    hook = state.hooks.batch_weight
    context = TraceContext(components, compilation=state.compilation.parts)
    is_after = choose_division(context) is Division.AFTER_BACKWARD
    if hook is None or not components.own_gradients or not is_after:
        return
    setting = _name_setting(state)
    line = components.own_gradients[0]
    cure = f"leave out {setting}, or let batch_weight depend only on batch"
    if components.unjudged_gradients:
        line = components.unjudged_gradients[0]
        console.warn(
            f"{line}: the backward pass draws random numbers or writes variables, so it was not "
            f"tested. If it is not linear, {cure}: with {setting}, the gradients are divided by "
            "the weight of the batch only after the backward pass."
        )
        return
    is_linear = is_backward_pass_linear(state)
    # Each process has tested its own rows, and all must continue or end together.
    results = state.cluster.gather([is_linear is None, is_linear is False])
    if results[:, 1].any():
        raise SetupError(
            f"{line}: the backward pass is not linear, but with {setting}, gradients are divided "
            f"by a batch_weight that takes output only after it; {cure}."
        )
    if results[:, 0].any():
        console.warn(
            f"{line}: it could not be tested whether the backward pass is linear. If it is not, "
            f"{cure}."
        )


def explain_scaled_gradients(state: State) -> str | None:
    """Returns a line for ``--check`` if a backward pass that is not linear sees the scaled loss.

    Returns None if there is no loss scale, or if the backward pass is linear or cannot be tested.
    """
    components = state.components
    if components.loss_scale is None or not components.own_gradients:
        return None
    if components.unjudged_gradients or is_backward_pass_linear(state) is not False:
        return None
    return (
        f"{components.own_gradients[0]}: the backward pass is not linear; in float16, it computes "
        "with the gradients of the scaled loss"
    )


def _name_setting(state: State) -> str:
    """Returns the setting that prevents an earlier division."""
    if state.config.accumulate_steps > 1:
        return "accumulate_steps"
    if state.config.logical_replicas is not None:
        return "logical_replicas"
    return "jit_compile"


def is_backward_pass_linear(state: State) -> bool | None:
    """Returns whether the backward pass is linear in the gradient of the loss.

    The gradients of one forward pass are computed for small and large gradients of the loss.
    Variables and random numbers are the same as before afterwards.

    Returns:
        The result for a few batches; None if no batch could be computed.
    """
    try:
        with keep_seeds(), _compute_in_float32(state):
            return _try_batches(state)
    except Exception:  # training reports any real problem
        return None


@contextlib.contextmanager
def _compute_in_float32(state: State) -> Iterator[None]:
    """Lets the layers compute in float32, because large gradients would overflow in float16."""
    policies: list[tuple[keras.Layer, keras.DTypePolicy]] = []
    try:
        for layer in state.recording.layers:
            if layer.compute_dtype == "float16":
                policies.append((layer, layer.dtype_policy))
                layer.dtype_policy = keras.DTypePolicy("float32")
        yield
    finally:
        for layer, policy in policies:
            layer.dtype_policy = policy


def _try_batches(state: State) -> bool | None:
    """Returns whether the backward pass is linear for some batches; None if there is no batch."""
    strategy = state.strategy
    generator = get_seed_generator()
    context = TraceContext(state.components)

    @tf.function(autograph=False)
    def measure(batch: Batch) -> tf.Tensor:
        with LoneReplica(strategy, find_first_replica(strategy)), run_replica(generator):
            return tf.reduce_max([_measure(turn, batch) for turn in context.list_turns()])

    batches = []
    for batch in state.data.make_pass().take(_BATCHES):
        if state.components.shape.by_rows:
            rows = min(int(count_rows(batch)), _MAX_ROWS)
            batch = take_batch_rows(batch, 0, rows)
        batches.append(batch)
    if not batches:
        return None
    with strategy.scope():
        graph = measure.get_concrete_function(batches[0]).graph
        copies = ReplicaCopies(strategy, state.recording.find_written(graph, strategy))
        with copies.put_back_after():
            return all(float(measure(batch)) <= _TOLERANCE for batch in batches)


def _measure(context: StepContext, batch: Batch) -> tf.Tensor:
    """Returns by how much the gradients of a batch depend on the size of the loss's gradient.

    Args:
        context: the context of a step, or of a turn
        batch: the batch

    Returns:
        The largest difference between the gradients, divided by their norm; 0 if they are linear.
    """
    examples = context.components.count_examples(batch)
    with tf.GradientTape(persistent=True) as tape:
        objectives = compute_objectives(context, batch, examples).objectives
    differences = []
    for objective in objectives.values():
        small, middle, large = (
            _flatten(
                factor, tape.gradient(
                    objective.value, objective.variables,
                    output_gradients=tf.constant(factor, objective.value.dtype),
                )
            )
            for factor in _FACTORS
        )  # fmt: skip
        norm = tf.norm(middle)
        for other in (small, large):
            differences.append(tf.math.divide_no_nan(tf.norm(other - middle), norm))
    return tf.reduce_max(differences)


def _flatten(factor: float, gradients: list[tf.Tensor | None]) -> tf.Tensor:
    """Returns gradients that were multiplied by a factor, without the factor, as one vector."""
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    return tf.concat([tf.reshape(tf.cast(each, tf.float64), [-1]) / factor for each in dense], 0)
