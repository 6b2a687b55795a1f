"""The hooks of a run: read off callbacks.py, and called by argument name.

Which there are, and what each may name, is in table.py; their defaults are in defaults.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core import defaults
from ctl_core.autograph import code_of, file_name, frames_in, original_lines, traceable, where
from ctl_core.checks.hooks import (
    arguments_of,
    check_required,
    in_order,
    listed,
    misspelt,
    scheduled,
)
from ctl_core.compat import translated_stack
from ctl_core.errors import CtlError, HookFailed, SetupError, brief
from ctl_core.settings import Config
from ctl_core.table import DATA_HOOKS, TABLE, Spec


@dataclasses.dataclass(frozen=True)
class Hook:
    """One function of the user's, or a default, that is called with the arguments it names."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    common: Mapping[str, Any]
    traced: Callable[..., Any]

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
        return self._call(self.function, values)

    def in_graph(self, **values: Any) -> Any:
        """The same while a graph is traced: Python control flow on tensors works (AutoGraph)."""
        return self._call(self.traced, values)

    def _call(self, function: Callable[..., Any], values: dict[str, Any]) -> Any:
        available = {**self.common, **values}
        try:
            return function(**{name: available[name] for name in self.arguments})
        except (CtlError, BrokenPipeError):
            raise
        except (Exception, SystemExit) as error:
            message = self.failure(error)
            if "batch" in self.arguments and "batch" in values:
                message += f" [batch: {describe(values['batch'])}]"
            raise HookFailed(message) from error

    def failure(self, error: BaseException) -> str:
        """Says in one line that this hook raised ``error``, and at which line of it."""
        return f"{self.name} ({self._line_of(error)}): {brief(error)}"

    def _line_of(self, error: BaseException) -> str:
        """Finds the innermost line in the hook's own file that the exception went through."""
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
        # A function that AutoGraph converted on the way, such as a helper, or one of Dataset.map.
        frames += translated_stack(error)
        return self.line_in([*frames, *frames_in(str(error))]) or self.where

    def line_in(self, frames: Iterable[tuple[str, int]]) -> str | None:
        """Returns ``callbacks.py:14`` for the last frame in the hook's own file, if any is."""
        code = code_of(self.function)
        if code is None or code.co_filename == defaults.__file__:
            return None
        lines = original_lines(self.traced)
        found = None
        for frame in frames:
            filename, lineno = lines.get(frame, frame)
            if filename == code.co_filename:
                found = lineno
        return f"{file_name(code.co_filename)}:{found}" if found else None

    def made(self, frames: Iterable[tuple[str, int]]) -> bool:
        """Whether one of the frames is the hook's own body, perhaps as AutoGraph converted it."""
        lines = set(original_lines(self.traced))
        if self.traced is self.function and (code := code_of(self.function)):
            lines = {(code.co_filename, line) for _, _, line in code.co_lines() if line}
        return any(frame in lines for frame in frames)


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

    def graph_names(self, argument: str) -> bool:
        """Whether a hook of the graph names an argument."""
        hooks = (getattr(self, spec.name) for spec in TABLE if spec.in_graph)
        return any(argument in hook.arguments for hook in hooks if hook is not None)

    def data_functions(self) -> dict[str, Any]:
        """The functions of the hooks that make data, by name."""
        hooks = {name: getattr(self, name) for name in DATA_HOOKS}
        return {name: hook.function for name, hook in hooks.items() if hook is not None}

    def functions(self) -> dict[str, Any]:
        """The functions of the hooks by name, but for those that make data."""
        found: dict[str, Any] = {}
        for spec in TABLE:
            hooks = getattr(self, spec.name)
            if spec.scheduled or spec.several:
                several = itertools.chain(*hooks.values()) if spec.scheduled else hooks
                for index, function in enumerate(hook.function for hook in several):
                    name = f"{spec.name}/{getattr(function, '__name__', '')}"
                    found[f"{name}-{index}" if name in found else name] = function
            elif isinstance(hooks, Hook) and spec.name not in DATA_HOOKS:
                found[spec.name] = hooks.function
        return found

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
            line = hook.line_in(frames) or hook.where
            return f"{hook.name} ({line}): reading the data: {brief(error)}"
        if made := self.made(frames):
            return f"{made}: {brief(error)}"
        inside = self.create_model.line_in(frames)
        return f"{otherwise}{f' ({inside})' if inside else ''}: {brief(error)}"

    def made(self, frames: list[tuple[str, int]]) -> str | None:
        """Returns the hook of the graph, and the line, that an op of these frames is of, if any."""
        for spec in TABLE:
            hook = getattr(self, spec.name)
            if spec.in_graph and hook is not None and hook.made(frames):
                return f"{spec.name} ({hook.line_in(frames) or hook.where})"
        return None


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

        def hook(name: str, function: Any, spec: Spec = spec) -> Hook:
            arguments = arguments_of(spec, name, function, origin)
            traced = traceable(function) if spec.in_graph else function
            return Hook(name, function, arguments, common, traced)

        value = getattr(callbacks, spec.name, getattr(defaults, spec.name, None))
        if value is None and spec.optional:
            found[spec.name] = None
        elif spec.listed:
            found[spec.name] = listed(spec, value, origin)
        elif spec.several:
            found[spec.name] = tuple(hook(*one) for one in in_order(spec, value))
        elif spec.scheduled:
            found[spec.name] = {
                key: tuple(hook(f"{spec.name}[{key}]", function) for function in several)
                for key, several in scheduled(spec, value, origin).items()
            }
        else:
            found[spec.name] = hook(spec.name, value)
    return Hooks(**found), misspelt(callbacks, origin)
