"""What is said of a NaN or an infinity: where it arose, of which examples, and what helps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ctl_core.autograph import file_name
from ctl_core.debugging.replay import Finding
from ctl_core.hooks import Hooks
from ctl_core.pipeline import Pipeline
from ctl_core.run_state.tracking import ENGINE, is_own_file

_MOST = 8  # examples that are named
_LOG = (
    "tf.math.log(tf.maximum(x, 1e-7)); a cross-entropy takes logits, as "
    "tf.nn.softmax_cross_entropy_with_logits does"
)
_DIVISION = "tf.math.divide_no_nan(x, y), or divide by tf.maximum(y, 1e-6)"
_ROOT = "tf.sqrt(tf.maximum(x, 1e-12))"
_CURES = {
    "Log": f"the logarithm of 0 is infinite, of less NaN: {_LOG}",
    "Log1p": f"the logarithm of 0 is infinite, of less NaN: {_LOG}",
    "RealDiv": f"a division by 0: {_DIVISION}",
    "Div": f"a division by 0: {_DIVISION}",
    "Reciprocal": f"a division by 0: {_DIVISION}",
    "Xdivy": f"a division by 0: {_DIVISION}",
    "Sqrt": f"the root of a negative number is NaN: {_ROOT}",
    "Rsqrt": "1 / sqrt(x) is infinite at 0, and NaN below: tf.math.rsqrt(tf.maximum(x, 1e-12))",
    "Pow": "a power that is not whole is NaN below 0, and a negative one infinite at 0",
    "Exp": "exp is infinite above 88: subtract the largest first, as tf.nn.softmax and "
    "tf.reduce_logsumexp do",
    "Mean": "the mean of nothing is NaN, as behind a mask that leaves nothing: divide the sum by "
    "tf.maximum(count, 1.0)",
}
_GRADIENT_CURES = {
    "Log": "the gradient of log at 0 is infinite: tf.math.log(tf.maximum(x, 1e-7))",
    "Log1p": "the gradient of log at 0 is infinite: tf.math.log(tf.maximum(x, 1e-7))",
    "Sqrt": f"the gradient of a root, or of a norm, at 0 is infinite: {_ROOT}",
    "Rsqrt": "the gradient of 1 / sqrt(x) at 0 is infinite: tf.math.rsqrt(tf.maximum(x, 1e-12))",
    "Pow": "the gradient of x ** p at 0 is infinite for p below 1: (x + 1e-12) ** p",
    "RealDiv": f"a division by 0, or by nearly 0: {_DIVISION}",
    "Acos": "the gradient at -1 and 1 is infinite: clip x to -1 + 1e-6 and 1 - 1e-6 first",
    "Asin": "the gradient at -1 and 1 is infinite: clip x to -1 + 1e-6 and 1 - 1e-6 first",
}
# Numbers from here on, and gradients, are on their way to infinity (float32: 3e38).
_LARGE = 1e15
_OVERFLOW = (
    "up to {:.2g} comes into it, and it overflows: lower learning_rate, clip gradients in "
    "update_pre, or normalise the inputs"
)
_LOOK = "what comes into it is finite, up to {:.2g}: load the batch, and look at it there"
_HALF = (
    "float16 holds no number above 65504: take --precision bfloat16, or dtype='float32' for that "
    "layer"
)
_MASK = (
    "an infinity that stands in the program, as that of a mask, comes into it: where all is masked "
    "softmax is NaN, and 0 times infinity is; mask with -1e9 (in float16 -6e4) instead"
)
# Of functions of step.py, the hook whose work they do; or what they do.
_DOES = {
    "run_model": "create_model",
    "loss_of": "create_loss",
    "apply_gradients": "create_opt",
    "_summed": "the sum over replicas and micro-batches",
    "batch_sum": "the sum of the loss over the batch",
    "objectives": "the objective",
}


def describe_finding(found: Finding, hooks: Hooks, file: str, data: Pipeline) -> str:
    """Says in one line where something that is not finite arose, of which examples, what helps.

    Args:
        found: what was found
        hooks: of the run
        file: where the batch is
        data: what makes it
    """
    origin, examples = found.origin, _examples(found, file)
    if found.part is not None:
        return (
            f"{data.name}: {found.part} of the batch has {origin.kind}{examples}; fill in "
            "missing values there, or leave such examples out."
        )
    if found.variable is not None:
        return (
            f"{found.variable} has {origin.kind} before the step, by a hook that assigns it or "
            "by what the run began from (a checkpoint, init_from, create_model)."
        )
    where = f" of the layer {found.layer}" * (found.layer is not None)
    half = any(one.dtype == tf.float16 for one in origin.op.outputs)
    cures, kind = _GRADIENT_CURES if origin.backward else _CURES, origin.op.type
    if origin.masked:
        cure = (
            "tf.where masks its value, but not its gradient, which is 0 times infinity: give "
            f"{kind} a safe value first, f(tf.where(mask, x, 1.0)), and mask its result again"
        )
    elif origin.intended:
        cure = _MASK
    elif half and (found.largest > 1.0 or kind not in cures):
        cure = _HALF
    elif found.largest > _LARGE:
        cure = _OVERFLOW.format(found.largest)
    else:
        cure = cures.get(kind, _LOOK.format(found.largest))
    gradient = "the gradient of " * origin.backward
    what = f"{origin.kind} first arises in {gradient}{kind}{where}, {place_of(origin.op, hooks)}"
    return f"{what}{examples}; {cure}."


def describe_update(variable: str, kind: str, norm: float, rate: float, hooks: Hooks) -> str:
    """Says in one line that an update of finite gradients has made a variable not finite.

    Args:
        variable: the path of the variable
        kind: what it has
        norm: the global norm of the gradients
        rate: the learning rate
        hooks: of the run
    """
    after = f" or {hooks.update_post}" * (hooks.update_post is not None)
    return (
        f"the update, by {hooks.create_opt}{after}, gives {variable} {kind}, of finite gradients "
        f"(global norm {norm:.3g}, lr {rate:.3g}); lower learning_rate, or clip in update_pre."
    )


def _examples(found: Finding, file: str) -> str:
    """Says which examples, and where they are."""
    numbers = found.examples
    if not numbers:
        return f" (the batch is in {file})"
    shown = ", ".join(map(str, numbers[:_MOST]))
    if len(numbers) > _MOST:
        shown += f" and {len(numbers) - _MOST} more"
    some = "for example" + "s" * (len(numbers) > 1)
    if not found.only and len(numbers) > 1:
        some, shown = "for some of the examples", f"{numbers[0]} to {numbers[-1]}"
    return f", {some} {shown} of the global batch, which is in {file}"


def place_of(op: tf.Operation, hooks: Hooks) -> str:
    """Returns the hook that an op belongs to, with the line: ``create_model (callbacks.py:24)``."""
    stack = list(op.traceback or ())
    frames = [(frame.filename, frame.lineno) for frame in stack]
    if made := hooks.made(frames):
        return made
    steps = [frame.name for frame in stack if frame.filename == f"{ENGINE}/step.py"]
    does = next((_DOES[name] for name in reversed(steps) if name in _DOES), "the step")
    line = next((frame for frame in reversed(frames) if is_own_file(frame[0])), None)
    shown = f"{file_name(line[0])}:{line[1]}" if line else ""
    hook: Any = getattr(hooks, does, None)
    if hook is None:
        return does
    # Where a program has begun is no line of the hook's.
    own = hook.line_in(frames) or (shown if line and not _is_main(line, frames) else hook.where)
    return f"{does} ({own})"


def _is_main(line: tuple[str, int], frames: list[tuple[str, int]]) -> bool:
    """Whether the line is of what has called the engine, and not of what that has called."""
    inner = [index for index, (name, _) in enumerate(frames) if name.startswith(ENGINE)]
    return not inner or frames.index(line) < inner[-1]
