"""What has failed in a graph call: which hook, which op, which line.

With ``detect_anomaly``, TensorFlow checks what each op of a step gives; the first NaN ends
training. The checks are ops of the graphs that are traced within ``check_numerics``. Each step is
a call of its own then, so that it is known which one failed.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from ctl_core.cluster.sync import is_peer_lost
from ctl_core.hooks.hooks import Hooks
from ctl_core.model.state import State
from ctl_core.run import errors

# What a check says: the type of the op, its graph, what it gave, and its name.
_FOUND = re.compile(
    r'graph op "(\w+)".*?Graph name: "(.*?)".*? : Tensor had (.*?) values'
    r"\s+\[\[.*?\{\{node (.*?)/CheckNumericsV2",
    re.DOTALL,
)


@contextlib.contextmanager
def attribute_errors(state: State, functions: Any, step: int) -> Iterator[None]:
    """Turns a failure inside a graph call of ``functions`` into one line that names the hook."""
    hooks = state.hooks
    try:
        yield
    except tf.errors.OutOfRangeError as error:
        if state.data.is_stream:
            raise hooks.make_batches.reject("returned a dataset that ends; repeat it.") from error
        if step == 0:
            raise hooks.create_dataset.reject(state.data.describe_shortage()) from error
        said = f"{hooks.create_dataset}: the training data ended after step {step}."
        raise errors.RunError(said) from error
    except tf.errors.OpError as error:
        if is_peer_lost(state.cluster.task, error):
            raise
        if explanation := state.data.explain_contradiction(error):
            failure = errors.SetupError if step == 0 else errors.RunError
            raise failure(explanation) from error
        if anomaly := describe_anomaly(error, hooks, functions.list_operations()):
            raise errors.RunError(f"step {step + 1}: {anomaly}.") from error
        raise errors.RunError(f"{hooks.attribute_error(error)}, after step {step}.") from error


@contextlib.contextmanager
def check_numerics(wanted: bool) -> Iterator[None]:
    """Within, the graphs that this thread traces check what their ops give, if that is wanted."""
    if wanted:  # TensorFlow cuts long messages off; the stack of an op is read off its graph
        tf.debugging.enable_check_numerics(stack_height_limit=1)
    try:
        yield
    finally:
        if wanted:
            tf.debugging.disable_check_numerics()


def describe_anomaly(error: BaseException, hooks: Hooks, ops: Iterable[Any]) -> str | None:
    """Says which op gave NaN or infinity: ``NaN from RealDiv (norm/truediv), model.py:24``.

    Args:
        error: what a graph call raised; of one about something else, None is returned
        ops: of such calls
    """
    if (found := _FOUND.search(str(error))) is None:
        return None
    kind, graph, values, name = found.groups()
    said = f"{'NaN' if 'NaN' in values else 'infinity'} from {kind} ({name})"
    if "IteratorGetNext" in kind:
        return f"{said}, {hooks.create_dataset}"
    op = next((op for op in ops if op.name == name and op.graph.name == graph), None)
    if op is not None and "gradient" in name:  # of what it takes from the forward pass
        taken = [tensor.op for tensor in op.inputs if "gradient" not in tensor.op.name]
        if taken:
            said, op = f"{said}, in the gradient of {taken[0].name}", taken[0]
    place = op is not None and _find_line(op, hooks)
    return f"{said}, {place}" if place else said


def _find_line(op: Any, hooks: Hooks) -> str | None:
    """Returns the hook that made an op, and its line; or another line of the user's."""
    frames = errors.read_frames(op)
    if made := hooks.find_owner(frames):
        return made
    # Before the engine there may be lines of the program that called it.
    first = max(
        (n for n, frame in enumerate(frames) if frame[0].startswith(errors.ENGINE)), default=0
    )
    users = [at for at in frames[first:] if not any(part in at[0] for part in errors.NOT_THE_USERS)]
    own = [f"{errors.format_file_name(file)}:{line}" for file, line in users]
    return own[-1] if own else None
