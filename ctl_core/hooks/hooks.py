"""Calls the hooks of a run by argument name, and adds their names and lines to errors."""

import dataclasses
import functools
import inspect
import linecache
import os
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
    """A user's function, or a default, that is called with the arguments that it names.

    Attributes:
        name: the name in messages, such as ``update_pre`` or ``every_steps[10]``
        function: the function that is called
        arguments: the names of its arguments
        common: the values of the arguments that every hook may name
        is_default: whether the function is the engine's default. A copy of the default in
            callbacks.py counts as the user's function. The difference affects messages and speed,
            but never the result of training.
        is_traced: whether the function is called while a graph is traced
        returns: a description of the result, from the table
        accepts: a function that returns whether a result is valid; None if any result is valid
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
        """Returns the hook's name and line for messages: ``update_pre (callbacks.py:12)``."""
        return f"{self.name} ({locate(self.function)})"

    def reject(self, problem: str) -> SetupError:
        """Returns an error that names the hook, its line and the problem."""
        return SetupError(f"{self}: {problem}")

    @property
    def deferred(self) -> bool:
        """True if the function is marked with ``deferred``."""
        return bool(getattr(self.function, "deferred", False))

    def __call__(self, **values: Any) -> UserObject:
        """Calls the function with the values that it names as arguments.

        Raises:
            HookFailed: the function raised an error; the message has its line.
            SetupError: the function returned a value that the table does not allow.
        """
        return self._call(call_function, values)

    def trace(self, **values: Any) -> UserObject:
        """Calls the function while a graph is traced, after AutoGraph has converted it."""
        # Defaults have no control flow that depends on tensors, so the conversion, which takes 25
        # ms, is not necessary.
        if self.is_default:
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
        """Describes in one line an error that this hook raised, including file and line number."""
        frames = [
            (frame.filename, frame.lineno or 0)
            for frame in traceback.extract_tb(error.__traceback__)
        ]
        # Add the lines of functions that AutoGraph converted, or that Dataset.map called.
        frames += [*read_translated_stack(error), *parse_frames(str(error))]
        cure = explain_missing_hparam(error, frames, self.common.get("hparams", {}))
        cure += self._explain_relative_path(error)
        return f"{self.locate(frames)}: {format_error(error)}{cure}"

    def _explain_relative_path(self, error: BaseException) -> str:
        """Returns how to find a file that is next to the hooks; "" for any other error.

        The hooks of a run that is loaded elsewhere, as in a web server, are not in the current
        folder.
        """
        code = find_code(self.function)
        name = getattr(error, "filename", None)
        if code is None or not isinstance(error, FileNotFoundError) or not isinstance(name, str):
            return ""
        folder = os.path.dirname(code.co_filename)
        if os.path.isabs(name) or not os.path.exists(os.path.join(folder, name)):
            return ""
        return (
            f"; the file is in {folder}, which is not the current folder: write "
            f"Path(__file__).parent / {name!r}"
        )

    def locate(self, frames: Iterable[tuple[str, int]]) -> str:
        """Returns ``update_pre (callbacks.py:14)`` for the last frame in the hook's own file."""
        return f"{self.name} ({self.find_line(frames) or locate(self.function)})"

    def find_line(self, frames: Iterable[tuple[str, int]]) -> str | None:
        """Returns ``callbacks.py:14`` for the last frame in the hook's own file.

        Returns None if no frame is in that file.
        """
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
        frames: the files and lines of its stack
        hparams: the existing hyperparameters
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
    """Calls a function with keyword arguments."""
    return function(**values)


# Converting ``call_function`` also converts the hook that it calls.
convert = functools.cache(tf.autograph.to_graph)


# Matches the error message of an op that failed because an op of the data pipeline failed.
READING = re.compile(r"\[\[[^\[\]]*IteratorGetNext(\w*)(?:\}\})?\]\]")


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The hooks of a run.

    Each hook is the user's function, or the default. Hooks without a default are None if the user
    does not define them.
    """

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
        """Describes in one line the failure of an op in a running graph, and names the op's hook.

        Args:
            error: a tf.errors.OpError, whose message contains the op and the stack that created it
            otherwise: the name to use if no hook created the op
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
        """Returns the hook in the stack that created an op; None if no hook is in the stack."""
        for hook in self.list_graph_hooks():
            if hook.has_frame(frames):
                return hook
        return None


def name_kind(value: UserObject) -> str:
    """Describes a value of the wrong kind, for messages."""
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
    """Returns the structure of a batch as a string: ``(float32[32, 8, 8], int64[32])``."""
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
