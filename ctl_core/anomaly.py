"""``detect_anomaly``: TensorFlow checks what each op of a step gives; the first NaN ends training.

The checks are ops of the graphs that are traced within ``numerics_checked``. Each step is a call of
its own then, so that it is known which one failed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from ctl_core.hooks import Hook, Hooks
from ctl_core.source_lines import ENGINE, file_name, frames_of, is_own_file

# What a check says: the type of the op, its graph, what it gave, and its name.
_FOUND = re.compile(
    r'graph op "(\w+)".*?Graph name: "(.*?)".*? : Tensor had (.*?) values'
    r"\s+\[\[.*?\{\{node (.*?)/CheckNumericsV2",
    re.DOTALL,
)
# The hooks whose work functions of these files do.
_STEP = (f"{ENGINE}/step.py", f"{ENGINE}/forward.py")
_DOES = {
    "run_model": "create_model",
    "compute_loss": "create_loss",
    "apply_gradients": "create_opt",
}
# Of the names of all ops that compute gradients.
_SCOPE = "gradient_tape/"


@contextlib.contextmanager
def numerics_checked(wanted: bool) -> Iterator[None]:
    """Within, the graphs that this thread traces check what their ops give, if that is wanted."""
    if not wanted:
        yield
        return
    # TensorFlow cuts long messages off; the stack of an op is read off its graph.
    tf.debugging.enable_check_numerics(stack_height_limit=1)
    try:
        yield
    finally:
        tf.debugging.disable_check_numerics()


def describe_anomaly(error: BaseException, hooks: Hooks, ops: Iterable[Any]) -> str | None:
    """Says in one line which op gave NaN or infinity, and at which of the user's lines it was made.

    Args:
        error: what a graph call raised
        hooks: of the run
        ops: of such calls

    Returns:
        ``NaN from RealDiv (norm/truediv), create_model (model.py:24)``; None if the error
        is about something else.
    """
    if (found := _FOUND.search(str(error))) is None:
        return None
    kind, graph, values, name = found.groups()
    said, ops = f"{'NaN' if 'NaN' in values else 'infinity'} from {kind} ({name})", list(ops)
    made = [op for op in ops if op.name == name and op.graph.name == graph]
    if forward := [one for op in made for one in _forward_ops(op, ops)]:
        said += f", in the gradient of {forward[0].type}"
    places = {_place(op, hooks) for op in forward or made}
    if "IteratorGetNext" in kind:
        places = {str(hooks.create_dataset)}
    return f"{said}, {' or '.join(sorted(places)) or 'the step'}"


def _forward_ops(op: Any, ops: list[Any]) -> list[Any]:
    """Returns the op whose gradient an op computes; in tf.functions, those that have its name."""
    if found := re.search(r"gradients/(.*)_grad/", op.name):
        return [other for other in ops if other.name == found[1]]
    # Each gradient is built by a function of TensorFlow's with the name of the op.
    kinds = [found[1] for one in op.traceback if (found := re.match(r"_(\w+)Grad", one.name))]
    queue = [op] if _SCOPE in op.name and kinds else []
    for gradient in queue:  # the nearest first: what it is made of leads to the whole model
        for tensor in gradient.inputs:
            if _SCOPE in tensor.op.name:
                queue += [tensor.op] * (tensor.op not in queue)
                continue
            for near in (tensor.op, *tensor.consumers()):
                if near.type == kinds[-1] and _SCOPE not in near.name:
                    return [near]
    return []


def _place(op: Any, hooks: Hooks) -> str:
    """Returns the hook that made an op, and the user's line: ``create_model (model.py:24)``."""
    frames = frames_of(op)
    if made := hooks.made(frames):
        return made
    # Before the step there may be lines of the program that called the engine.
    first = next((n for n, frame in enumerate(frames) if frame[0] in _STEP), 0)
    own = [f"{file_name(file)}:{line}" for file, line in frames[first:] if is_own_file(file)]
    inside = [frame.name for frame in op.traceback if frame.filename in _STEP]
    does = next((_DOES[name] for name in reversed(inside) if name in _DOES), None)
    if does is None:
        return f"the step ({own[-1]})" if own else "the step"
    hook: Hook = getattr(hooks, does)
    return f"{does} ({own[-1] if own else hook.where})"
