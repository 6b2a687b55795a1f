"""Finds the hook, the op and the line of user code that made a graph call fail.

With ``detect_anomaly``, TensorFlow checks the result of each op, and the first NaN or infinity ends
training. The checks are ops that are added to all graphs traced inside the context
``check_numerics``. Each step is then a separate graph call, so that the number of the failed step
is known.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import tensorflow as tf

from ctl_core.cluster.collectives import count_local_replicas
from ctl_core.cluster.sync import is_peer_gone, is_peer_lost
from ctl_core.cluster.task import Task, are_others_there
from ctl_core.compat import check_float8, leave_constants_unchecked
from ctl_core.hooks.hooks import READING, Hooks
from ctl_core.model.state import State
from ctl_core.run import errors

# Matches the error message of a numeric check. The groups are the op's type, graph, values and
# name.
_CHECK_MESSAGE = re.compile(
    r'graph op "(?P<type>\w+)".*?Graph name: "(?P<graph>.*?)".*? : Tensor had (?P<values>.*?) '
    r"values\s+\[\[.*?\{\{node (?P<name>.*?)/CheckNumericsV2",
    re.DOTALL,
)
# Matches the error message of a step that XLA cannot compile.
_XLA_MESSAGE = re.compile(r"\bXLA\b|compile-time constant|trying to compile")


class GraphFunctions(Protocol):
    """The graph functions that training calls."""

    def list_operations(self) -> Iterator[tf.Operation]:
        """Yields the ops of all graphs that have been traced."""


@contextlib.contextmanager
def attribute_errors(
    state: State, functions: GraphFunctions, step: int, repeat: Callable[[], object]
) -> Iterator[None]:
    """Turns a failed graph call into a one-line error that names the hook.

    Args:
        state: the state of the run
        functions: the graph functions that are called inside the context
        step: the number of steps taken before the context is entered
        repeat: repeats what failed, in such a way that its error says why; see ``_find_reason``
    """
    hooks = state.hooks
    try:
        yield
    except tf.errors.OutOfRangeError as error:
        raise _describe_end_of_data(state, step) from error
    except tf.errors.OpError as error:
        task = state.cluster.task
        has_several_devices = count_local_replicas(state.strategy) > 1
        is_cancelled = has_several_devices and isinstance(error, tf.errors.CancelledError)
        is_cancelled = is_cancelled and not is_peer_gone(error)
        # An op may also be canceled because a device of this process has failed. In that case, the
        # other processes still answer, and the error is reported here.
        if is_peer_lost(task, error) and not (is_cancelled and are_others_there(task)):
            raise
        contradiction = state.data.explain_contradiction(error)
        if contradiction is not None and step == 0:
            raise errors.SetupError(contradiction) from error
        if contradiction is not None:
            raise errors.RunError(contradiction) from error
        anomaly = describe_anomaly(error, hooks, functions.list_operations())
        if anomaly is not None:
            raise errors.RunError(f"step {step + 1}: {anomaly}.") from error
        reason: Exception | None = error
        if is_cancelled:
            reason = _find_reason(repeat, task)
        if isinstance(reason, errors.CtlError):
            raise reason from error
        if reason is None:
            raise errors.RunError(
                f"a device failed after step {step}; with several devices, TensorFlow does not "
                "report why. Train on one device (--strategy one_device), which names the hook."
            ) from error
        where = hooks.attribute_error(reason)
        raise errors.RunError(f"{where}, after step {step}{_find_cure(state, reason)}.") from reason


def _describe_end_of_data(state: State, step: int) -> Exception:
    """Returns the error that says that there are no more training data after a step."""
    hooks = state.hooks
    if state.data.is_stream:
        return hooks.make_batches.reject("returned a dataset that ends; repeat it.")
    if step == 0:
        return hooks.create_dataset.reject(state.data.describe_shortage())
    return errors.RunError(f"{hooks.create_dataset}: the training data ended after step {step}.")


def _find_reason(repeat: Callable[[], object], task: Task) -> Exception | None:
    """Returns the error behind a canceled graph call; None if it is not found.

    A function that all devices call has failed on one of them. The devices wait for each other's
    sums, so TensorFlow cancels all of them, even the failed device, before the function can return
    the reason.

    Args:
        repeat: repeats what failed, in such a way that its error says why
        task: the task of this process. Other processes would have to take part in the repetition
    """
    if task.processes > 1:
        return None
    try:
        repeat()
    except (tf.errors.OpError, errors.CtlError) as reason:
        return None if isinstance(reason, tf.errors.CancelledError) else reason
    except Exception:  # the repetition itself failed, for example because the data ended
        return None
    return None


def _find_cure(state: State, error: BaseException) -> str:
    """Returns the end of a message that says what to do about an error; empty if unknown."""
    # XLA also compiles functions that the user has marked, whatever the setting is.
    if state.compilation.is_compiled and _XLA_MESSAGE.search(str(error)):
        return "; train with --no-jit-compile"
    return _describe_damaged_element(state, error)


def _describe_damaged_element(state: State, error: BaseException) -> str:
    """Returns a phrase that names the element that cannot be read; "" if it is not found."""
    reading = READING.search(str(error))
    if reading is None or reading.group(1).startswith("AsOptional"):  # an evaluation reads this way
        return ""
    element = state.data.find_damaged_element()
    if element is None:
        return ""
    return f"; {element} cannot be read, so repair it or leave it out"


@contextlib.contextmanager
def check_numerics(is_wanted: bool) -> Iterator[None]:
    """Adds checks for NaN and infinity to the graphs that this thread traces inside the context.

    Does nothing if ``is_wanted`` is False.
    """
    if not is_wanted:
        yield
        return
    # TensorFlow truncates long messages, so the message contains only one line of the stack. The
    # whole stack of an op is read from its graph instead.
    tf.debugging.enable_check_numerics(stack_height_limit=1)
    try:
        with leave_constants_unchecked(), check_float8():
            yield
    finally:
        tf.debugging.disable_check_numerics()


def describe_anomaly(
    error: BaseException, hooks: Hooks, operations: Iterable[tf.Operation]
) -> str | None:
    """Describes the op that returned NaN or infinity, and the line that created the op.

    An example is ``NaN from RealDiv (norm/truediv), create_model (model.py:24)``.

    Args:
        error: the error that a graph call raised
        hooks: the hooks of the run
        operations: the ops of the graphs that can be called

    Returns:
        The description; None if the error does not come from a numeric check.
    """
    message = _CHECK_MESSAGE.search(str(error))
    if message is None:
        return None
    value = "NaN" if "NaN" in message["values"] else "infinity"
    description = f"{value} from {message['type']} ({message['name']})"
    if "IteratorGetNext" in message["type"]:
        return f"{description}, {hooks.create_dataset}"
    failed = _find_op(operations, message["graph"], message["name"])
    if failed is None:
        return description
    forward_op = _find_forward_op(failed)
    if forward_op is not None:
        description += f", in the gradient of {forward_op.name}"
    line = find_line(failed, hooks)
    if line is not None:
        description += f", {line}"
    return description


def _find_op(operations: Iterable[tf.Operation], graph: str, name: str) -> tf.Operation | None:
    """Returns the op with the given name in the graph with the given name, or None."""
    for op in operations:
        if op.name == name and getattr(op.graph, "name", None) == graph:
            return op
    return None


def _find_forward_op(op: tf.Operation) -> tf.Operation | None:
    """Returns the op of the forward pass whose gradient a given op computes.

    Returns None for an op that is not in the backward pass. Only the stack of the forward op
    contains the hook and its line.
    """
    if "gradient" not in op.name:
        return None
    for tensor in op.inputs:
        if "gradient" not in tensor.op.name:
            return tensor.op
    return None


def find_line(op: tf.Operation, hooks: Hooks) -> str | None:
    """Returns the hook that created an op, with its line: ``create_model (model.py:24)``.

    If no hook created the op, returns only the line of user code that did; None if there is no such
    line. For an op of the backward pass, returns the line of the op that it differentiates.
    """
    frames = errors.read_frames(_find_forward_op(op) or op)
    owner = hooks.find_owner(frames)
    if owner is not None:
        return owner
    engine_frames = [
        index for index, (file, _) in enumerate(frames) if file.startswith(errors.ENGINE)
    ]
    # All frames before the engine's last frame belong to the program that started the training.
    first = max(engine_frames, default=0)
    lines = [
        f"{errors.format_file_name(file)}:{line}"
        for file, line in frames[first:]
        if not any(place in file for place in errors.NOT_THE_USERS)
    ]
    return lines[-1] if lines else None
