"""The hooks of a run: read off callbacks.py, and called by argument name.

Which there are, and what each may name, is in table.py; their defaults are in defaults.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core import defaults
from ctl_core.checks.hooks import (
    arguments_of,
    check_required,
    in_order,
    is_default,
    listed,
    misspelt,
    scheduled,
)
from ctl_core.compat import translated_stack
from ctl_core.errors import CtlError, HookFailed, SetupError, brief
from ctl_core.settings import Config
from ctl_core.source_lines import code_of, file_name, frames_in, where
from ctl_core.table import TABLE, Spec


@dataclasses.dataclass(frozen=True)
class Hook:
    """One function of the user's, or a default, that is called with the arguments it names.

    ``is_default``: it does what the engine's default does, such as the copy in callbacks.py.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    common: Mapping[str, Any]
    is_default: bool

    @property
    def where(self) -> str:
        """``callbacks.py:12`` for the function's definition, or its module's name."""
        return where(self.function)

    def __str__(self) -> str:
        """The hook as messages name it: ``update_pre (callbacks.py:12)``."""
        return f"{self.name} ({self.where})"

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
        """
        return self._call(call_function, values)

    def in_graph(self, **values: Any) -> Any:
        """The same while a graph is traced: Python control flow on tensors works (AutoGraph)."""
        # The defaults need no converting, which costs a fortieth of a second each.
        return self._call(call_function if self.is_default else convert_call(), values)

    def _call(self, call: Callable[..., Any], values: dict[str, Any]) -> Any:
        available = {**self.common, **values}
        try:
            return call(self.function, {name: available[name] for name in self.arguments})
        except (CtlError, BrokenPipeError):
            raise
        except (Exception, SystemExit) as error:
            message = self.failure(error)
            if "batch" in self.arguments and "batch" in values:
                message += f" [batch: {describe(values['batch'])}]"
            raise HookFailed(message) from error

    def failure(self, error: BaseException) -> str:
        """Says in one line that this hook raised ``error``, and at which line of it."""
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
        # Functions that AutoGraph converted on the way, or one of Dataset.map.
        frames += [*translated_stack(error), *frames_in(str(error))]
        return f"{self.locate(frames)}: {brief(error)}"

    def locate(self, frames: Iterable[tuple[str, int]]) -> str:
        """Returns ``update_pre (callbacks.py:14)`` for the last frame in the hook's own file."""
        return f"{self.name} ({self.line_in(frames) or self.where})"

    def line_in(self, frames: Iterable[tuple[str, int]]) -> str | None:
        """Returns ``callbacks.py:14`` for the last frame in the hook's own file, if any is."""
        code = code_of(self.function)
        if code is None or code.co_filename == defaults.__file__:
            return None
        found = [line for filename, line in frames if filename == code.co_filename]
        return f"{file_name(code.co_filename)}:{found[-1]}" if found else None

    def made(self, frames: Iterable[tuple[str, int]]) -> bool:
        """Whether one of the frames is in the hook's own body."""
        if (code := code_of(self.function)) is None:
            return False
        lines = range(code.co_firstlineno, 1 + max(line or 0 for _, _, line in code.co_lines()))
        return any(file == code.co_filename and line in lines for file, line in frames)


def call_function(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Calls a function by argument names."""
    return function(**values)


@functools.cache
def convert_call() -> Any:
    """Returns ``call_function`` as AutoGraph converts it: what it calls is converted, too."""
    return tf.autograph.to_graph(call_function)


def describe(element: Any) -> str:
    """Writes down the structure of a batch: ``(float32[32, 8, 8], int64[32])``."""
    if isinstance(element, dict):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in element.items()) + "}"
    if isinstance(element, tuple | list):
        return "(" + ", ".join(describe(part) for part in element) + ")"
    if hasattr(element, "dtype") and hasattr(element, "shape"):
        return f"{tf.as_dtype(element.dtype).name}{element.shape.as_list()}"
    return type(element).__name__


HooksByStep = dict[int, tuple[Hook, ...]]
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
    every_steps: HooksByStep
    at_step: HooksByStep
    create_eval_dataset: Hook | None
    create_metrics: Hook
    metric_pre: Hook
    eval_pre: Hook
    after_eval: tuple[Hook, ...]
    at_end: tuple[Hook, ...]

    def graph_hooks(self) -> list[Hook]:
        """The hooks that are traced, but for those that the engine does without."""
        hooks = (getattr(self, spec.name) for spec in TABLE if spec.kind == "in the graph")
        return [hook for hook in hooks if hook is not None]

    def data_functions(self) -> list[Callable[..., Any]]:
        """The functions of the hooks that make data."""
        hooks = (self.create_dataset, self.make_batches, self.create_eval_dataset)
        return [hook.function for hook in hooks if hook is not None]

    def attribute_error(self, error: BaseException, otherwise: str = "the step") -> str:
        """Says in one line which hook an op belongs to that failed while a graph was running.

        Args:
            error: a tf.errors.OpError, whose message names the op and the stack it was made at
            otherwise: what it belongs to if to no hook
        """
        text = str(error)
        frames = frames_in(text)
        if reading := READING.search(text):
            evaluating = reading.group(1).startswith("AsOptional")
            hook = (self.create_eval_dataset if evaluating else None) or self.create_dataset
            return f"{hook.locate(frames)}: reading the data: {brief(error)}"
        if made := self.made(frames):
            return f"{made}: {brief(error)}"
        inside = self.create_model.line_in(frames)
        return f"{otherwise}{f' ({inside})' if inside else ''}: {brief(error)}"

    def made(self, frames: list[tuple[str, int]]) -> str | None:
        """Returns the hook of the graph, and the line, that an op of these frames is of, if any."""
        hooks = (hook for hook in self.graph_hooks() if hook.made(frames))
        return next((hook.locate(frames) for hook in hooks), None)


def load_hooks(callbacks: Any, config: Config) -> tuple[Hooks, list[str]]:
    """Reads the hooks off a module, any object with these attributes, or a dict; checks each.

    ``Hooks`` are returned as they are.

    Returns:
        The hooks, and warnings about names that look like a misspelt hook.

    Raises:
        SetupError: a required hook is missing, something is no function, names an argument that
            does not exist, or a schedule's key is no positive whole number.
    """
    if isinstance(callbacks, Hooks):
        return callbacks, []
    if isinstance(callbacks, Mapping):
        callbacks = types.SimpleNamespace(**callbacks)
    common = {"config": config, "hparams": config.hparams}
    origin = Path(getattr(callbacks, "__file__", None) or "callbacks").name
    check_required(callbacks, origin)
    found: dict[str, Any] = {}
    for spec in TABLE:
        name = spec.name

        def make_hook(name: str, function: Any, spec: Spec = spec) -> Hook:
            arguments = arguments_of(spec, name, function, origin)
            return Hook(name, function, arguments, common, is_default(name, function))

        value = getattr(callbacks, name, getattr(defaults, name, None))
        if spec.kind == "names":
            found[name] = listed(spec, value, origin)
        elif spec.kind == "one or several":
            found[name] = tuple(make_hook(*one) for one in in_order(spec, value))
        elif spec.kind == "by step":
            found[name] = {
                step: tuple(make_hook(f"{name}[{step}]", function) for function in functions)
                for step, functions in scheduled(spec, value, origin).items()
            }
        elif value is None and spec.kind != "required" and not hasattr(defaults, name):
            found[name] = None
        else:
            found[name] = make_hook(name, value)
    return Hooks(**found), misspelt(callbacks, origin)
