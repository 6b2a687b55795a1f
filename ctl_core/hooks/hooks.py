"""The hooks of a run, called by argument name; their failures name the hook and its line."""

import dataclasses
import functools
import inspect
import re
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from ctl_core.compat import read_translated_stack
from ctl_core.run.errors import (
    ENGINE,
    CtlError,
    HookFailed,
    SetupError,
    find_code,
    format_error,
    format_file_name,
    locate,
    parse_frames,
)


@dataclasses.dataclass(frozen=True)
class Hook:
    """One function of the user's, or a default, that is called with the arguments it names.

    Attributes:
        name: as messages have it: ``update_pre``, ``every_steps[10]``
        function: what is called
        arguments: which it names
        common: values that every hook may name
        is_default: whether the function is the engine's own object. A copy of it in callbacks.py is
            the user's. This may change messages and costs, never what is trained.
        is_traced: whether it is called while a graph is traced
        returns: what it has to return, as the table says
        accepts: whether a value is that; None takes any
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    common: Mapping[str, Any]
    is_default: bool
    is_traced: bool = False
    returns: str = ""
    accepts: Callable[[Any], bool] | None = None

    def __str__(self) -> str:
        """The hook as messages name it: ``update_pre (callbacks.py:12)``."""
        return f"{self.name} ({locate(self.function)})"

    def reject(self, problem: str) -> SetupError:
        """Returns the error for a hook that cannot work: its name, its line and the problem."""
        return SetupError(f"{self}: {problem}")

    @property
    def deferred(self) -> bool:
        """Whether the function is marked with ``deferred``."""
        return bool(getattr(self.function, "deferred", False))

    def __call__(self, **values: Any) -> Any:
        """Calls the function with those of ``values`` that it names.

        Raises:
            HookFailed: the function raised; the message says at which line.
            SetupError: it returned something else than the table says.
        """
        return self._call(call_function, values)

    def trace(self, **values: Any) -> Any:
        """The same while a graph is traced: Python control flow on tensors works (AutoGraph)."""
        # The defaults need no converting, which costs a fortieth of a second each.
        call = call_function if self.is_default else convert(call_function)
        return self._call(call, values)

    def _call(self, call: Callable[..., Any], values: dict[str, Any]) -> Any:
        available = {**self.common, **values}
        try:
            returned = call(self.function, {name: available[name] for name in self.arguments})
        except (CtlError, BrokenPipeError):
            raise
        except (Exception, SystemExit) as error:
            message = self.describe_failure(error)
            if "batch" in self.arguments and "batch" in values:
                message += f" [batch: {describe(values['batch'])}]"
            raise HookFailed(message) from error
        if self.accepts is not None and not self.accepts(returned):
            raise self.reject(f"returned {name_kind(returned)}, expected {self.returns}.")
        return returned

    def describe_failure(self, error: BaseException) -> str:
        """Says in one line that this hook raised ``error``, and at which line of it."""
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
        # Functions that AutoGraph converted on the way, or one of Dataset.map.
        frames += [*read_translated_stack(error), *parse_frames(str(error))]
        return f"{self.locate(frames)}: {format_error(error)}"

    def locate(self, frames: Iterable[tuple[str, int]]) -> str:
        """Returns ``update_pre (callbacks.py:14)`` for the last frame in the hook's own file."""
        return f"{self.name} ({self.find_line(frames) or locate(self.function)})"

    def find_line(self, frames: Iterable[tuple[str, int]]) -> str | None:
        """Returns ``callbacks.py:14`` for the last frame in the hook's own file, if any is."""
        code = find_code(self.function)
        if code is None or code.co_filename.startswith(ENGINE):
            return None
        found = [line for filename, line in frames if filename == code.co_filename]
        return f"{format_file_name(code.co_filename)}:{found[-1]}" if found else None

    def has_frame(self, frames: Iterable[tuple[str, int]]) -> bool:
        """Whether one of the frames is in the hook's own body."""
        if (code := find_code(self.function)) is None:
            return False
        lines = range(code.co_firstlineno, 1 + max(line or 0 for _, _, line in code.co_lines()))
        return any(file == code.co_filename and line in lines for file, line in frames)


def call_function(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Calls a function by argument names."""
    return function(**values)


convert = functools.cache(tf.autograph.to_graph)  # what a function calls is converted, too


# In the message of an op that failed: it was one of the data's, since reading had to stop for it.
READING = re.compile(r"\[\[[^\[\]]*IteratorGetNext(\w*)(?:\}\})?\]\]")


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Every hook of a run, the user's or the default; None where the engine does without."""

    create_dataset: Hook
    make_batches: Hook
    count_examples: Hook
    create_model: Hook
    create_eval_model: Hook | None
    create_inference_model: Hook | None
    serve: Hook | None
    create_loss: Hook
    create_opt: Hook
    create_ckpt: Hook
    input_pre: Hook
    loss_pre: Hook
    batch_weight: Hook | None
    grad_pre: Hook
    update_pre: Hook
    update_post: Hook | None
    turns: tuple[str, ...]
    create_train_metrics: Hook
    train_metric_pre: Hook
    every_steps: dict[int, tuple[Hook, ...]]
    at_step: dict[int, tuple[Hook, ...]]
    create_eval_dataset: Hook | None
    create_metrics: Hook
    metric_pre: Hook
    eval_pre: Hook
    after_eval: tuple[Hook, ...]
    at_end: tuple[Hook, ...]

    def list_graph_hooks(self) -> list[Hook]:
        """The hooks that are traced, but for those that the engine does without."""
        return [hook for hook in vars(self).values() if isinstance(hook, Hook) and hook.is_traced]

    def attribute_error(self, error: BaseException, otherwise: str = "the step") -> str:
        """Says in one line which hook an op belongs to that failed while a graph was running.

        The message of a tf.errors.OpError names the op and the stack that it was made at.
        """
        text = str(error)
        frames = parse_frames(text)
        if reading := READING.search(text):
            evaluating = reading.group(1).startswith("AsOptional")
            hook = (self.create_eval_dataset if evaluating else None) or self.create_dataset
            return f"{hook.locate(frames)}: reading the data: {format_error(error)}"
        if made := self.find_owner(frames):
            return f"{made}: {format_error(error)}"
        inside = self.create_model.find_line(frames)
        return f"{otherwise}{f' ({inside})' if inside else ''}: {format_error(error)}"

    def find_owner(self, frames: list[tuple[str, int]]) -> str | None:
        """Returns the hook of the graph, and the line, that an op of these frames is of, if any."""
        hook = self.find_hook(frames)
        return None if hook is None else hook.locate(frames)

    def find_hook(self, frames: list[tuple[str, int]]) -> Hook | None:
        """Returns the hook of the graph that an op of these frames is of, if any."""
        hooks = (hook for hook in self.list_graph_hooks() if hook.has_frame(frames))
        return next(hooks, None)


def name_kind(value: Any) -> str:
    """Says what a value is, for a message that expected something else."""
    if value is None:
        return "nothing"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, types.FunctionType):
        return f"a function {inspect.signature(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} value{'s' * (len(value) != 1)}"
    if tf.is_tensor(value) and not isinstance(value, tf.Variable):
        return describe(value)
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'aeiou')} {name}"


def describe(element: Any) -> str:
    """Writes down the structure of a batch: ``(float32[32, 8, 8], int64[32])``."""
    if isinstance(element, dict):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in element.items()) + "}"
    if isinstance(element, tuple | list):
        return "(" + ", ".join(describe(part) for part in element) + ")"
    if hasattr(element, "dtype") and hasattr(element, "shape"):
        shape = "" if element.shape.rank is None else element.shape.as_list()
        return f"{tf.as_dtype(element.dtype).name}{shape}"
    return type(element).__name__
