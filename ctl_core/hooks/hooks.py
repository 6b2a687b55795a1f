"""The hooks of a run, called by argument name; their failures name the hook and its line."""

import dataclasses
import functools
import inspect
import linecache
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
from ctl_core.types import Batch, BatchSpec, UserObject


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function of the user, or a default, that is called with the arguments that it names.

    Attributes:
        name: the name in messages, such as ``update_pre`` or ``every_steps[10]``
        function: the function that is called
        arguments: the names of its arguments
        common: the values of the arguments that every hook may name
        is_default: whether the function is the engine's own object. A copy of it in callbacks.py is
            the user's. This may change messages and costs, never what is trained.
        is_traced: whether it is called while a graph is traced
        returns: a description of the result, from the table
        accepts: returns whether a result is valid; None accepts any
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
        """Returns the hook as messages name it: ``update_pre (callbacks.py:12)``."""
        return f"{self.name} ({locate(self.function)})"

    def reject(self, problem: str) -> SetupError:
        """Returns the error for a hook that cannot work: its name, its line and the problem."""
        return SetupError(f"{self}: {problem}")

    @property
    def deferred(self) -> bool:
        """Whether the function is marked with ``deferred``."""
        return bool(getattr(self.function, "deferred", False))

    def __call__(self, **values: Any) -> UserObject:
        """Calls the function with those of ``values`` that it names.

        Raises:
            HookFailed: the function raised an error; the message has its line.
            SetupError: the function returned a value that the table does not allow.
        """
        return self._call(call_function, values)

    def trace(self, **values: Any) -> UserObject:
        """Calls the function while a graph is traced, after AutoGraph has converted it."""
        if self.is_default:  # has no control flow on tensors; a conversion takes 25 ms
            return self._call(call_function, values)
        return self._call(convert(call_function), values)

    def _call(self, call: Callable[..., UserObject], values: dict[str, Any]) -> UserObject:
        available = {**self.common, **values}
        try:
            returned = call(self.function, {name: available[name] for name in self.arguments})
        except CtlError:
            raise
        except (Exception, SystemExit, GeneratorExit) as error:
            message = self.describe_failure(error)
            if "batch" in self.arguments and "batch" in values:
                message += f" [batch: {describe(values['batch'])}]"
            raise HookFailed(message) from error
        if self.accepts is not None and not self.accepts(returned):
            raise self.reject(f"returned {name_kind(returned)}, expected {self.returns}.")
        return returned

    def describe_failure(self, error: BaseException) -> str:
        """Describes in one line an error that this hook raised, with the line of the hook."""
        frames = [
            (frame.filename, frame.lineno or 0)
            for frame in traceback.extract_tb(error.__traceback__)
        ]
        # The lines of functions that AutoGraph converted, or that Dataset.map called.
        frames += [*read_translated_stack(error), *parse_frames(str(error))]
        cure = explain_missing_hparam(error, frames, self.common.get("hparams", {}))
        return f"{self.locate(frames)}: {format_error(error)}{cure}"

    def locate(self, frames: Iterable[tuple[str, int]]) -> str:
        """Returns ``update_pre (callbacks.py:14)`` for the last frame in the hook's own file."""
        return f"{self.name} ({self.find_line(frames) or locate(self.function)})"

    def find_line(self, frames: Iterable[tuple[str, int]]) -> str | None:
        """Returns ``callbacks.py:14`` for the last frame in the hook's own file, if any is."""
        code = find_code(self.function)
        if code is None or code.co_filename.startswith(ENGINE):
            return None
        lines = [line for filename, line in frames if filename == code.co_filename]
        if not lines:
            return None
        return f"{format_file_name(code.co_filename)}:{lines[-1]}"

    def has_frame(self, frames: Iterable[tuple[str, int]]) -> bool:
        """Returns whether one of the frames is in the body of the function."""
        code = find_code(self.function)
        if code is None:
            return False
        lines = range(code.co_firstlineno, 1 + max(line or 0 for _, _, line in code.co_lines()))
        return any(file == code.co_filename and line in lines for file, line in frames)


def explain_missing_hparam(
    error: BaseException, frames: Iterable[tuple[str, int]], hparams: Mapping[str, Any]
) -> str:
    """Returns where to add the hyperparameter that was not found; "" for any other error.

    Args:
        error: the error that a hook raised
        frames: the files and lines that it went through
        hparams: the hyperparameters that there are
    """
    if not isinstance(error, KeyError) or not error.args or error.args[0] in hparams:
        return ""
    name = error.args[0]
    reads = (f"hparams[{name!r}]", f'hparams["{name}"]')
    lines = [linecache.getline(file, number) for file, number in frames]
    if not any(read in line for line in lines for read in reads):
        return ""
    there = ", ".join(hparams) or "nothing"
    return f"; add it to hparams in config.yaml, which has {there}"


def call_function(function: Callable[..., UserObject], values: dict[str, Any]) -> UserObject:
    """Calls a function by argument names."""
    return function(**values)


# AutoGraph converts the functions that a function calls, too.
convert = functools.cache(tf.autograph.to_graph)


# Matches the message of an op that failed because an op of the data pipeline did.
READING = re.compile(r"\[\[[^\[\]]*IteratorGetNext(\w*)(?:\}\})?\]\]")


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The hooks of a run: the user's or the defaults; None where the engine needs no default."""

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
        """Returns the hooks that are traced."""
        return [hook for hook in vars(self).values() if isinstance(hook, Hook) and hook.is_traced]

    def attribute_error(self, error: BaseException, otherwise: str = "the step") -> str:
        """Describes in one line an op that failed in a running graph, with the hook it is of.

        Args:
            error: a tf.errors.OpError, whose message has the op and the stack that created it
            otherwise: named if the op is of no hook
        """
        text = str(error)
        frames = parse_frames(text)
        reading = READING.search(text)
        if reading:
            hook = self.create_dataset
            is_evaluating = reading.group(1).startswith("AsOptional")
            if is_evaluating and self.create_eval_dataset is not None:
                hook = self.create_eval_dataset
            return f"{hook.locate(frames)}: reading the data: {format_error(error)}"
        owner = self.find_owner(frames)
        if owner is None:
            owner = otherwise
            line_of_model = self.create_model.find_line(frames)
            if line_of_model is not None:
                owner += f" ({line_of_model})"
        return f"{owner}: {format_error(error)}"

    def find_owner(self, frames: list[tuple[str, int]]) -> str | None:
        """Returns the hook that created an op, with its line; None if no hook did."""
        hook = self.find_hook(frames)
        if hook is None:
            return None
        return hook.locate(frames)

    def find_hook(self, frames: list[tuple[str, int]]) -> Hook | None:
        """Returns the hook that created an op, whose stack is given; None if no hook did."""
        for hook in self.list_graph_hooks():
            if hook.has_frame(frames):
                return hook
        return None


def name_kind(value: UserObject) -> str:
    """Returns a description of a value of the wrong kind, for messages."""
    if value is None:
        return "nothing"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, types.FunctionType):
        return f"a function {inspect.signature(value)}"
    if isinstance(value, tuple | list):
        noun = "values"
        if len(value) == 1:
            noun = "value"
        return f"a {type(value).__name__} of {len(value)} {noun}"
    if tf.is_tensor(value) and not isinstance(value, tf.Variable):
        return describe(value)
    name = type(value).__name__
    article = "a"
    if name[0] in "aeiou":
        article = "an"
    return f"{article} {name}"


def describe(element: Batch | BatchSpec) -> str:
    """Returns the structure of a batch as text: ``(float32[32, 8, 8], int64[32])``."""
    if isinstance(element, dict):
        items = [f"{key}: {describe(value)}" for key, value in element.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(element, tuple | list):
        return f"({', '.join(map(describe, element))})"
    if hasattr(element, "dtype") and hasattr(element, "shape"):
        text: str = tf.as_dtype(element.dtype).name
        if element.shape.rank is not None:
            text += str(element.shape.as_list())
        return text
    return type(element).__name__
