"""The hooks of a run: read off callbacks.py, and called by argument name.

Which there are, and what each may name, is in table.py; their defaults are in defaults.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import dis
import functools
import inspect
import re
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.compat import translated_stack
from ctl_core.hooks import defaults
from ctl_core.hooks.contract import CONTRACT, describe, kind_of
from ctl_core.hooks.table import COMMON, DEFERRED, SPECS, TABLE, Spec
from ctl_core.run.errors import (
    CtlError,
    HookFailed,
    SetupError,
    brief,
    code_of,
    file_name,
    frames_in,
    one_line,
    where,
)
from ctl_core.run.settings import Config, nearest


@dataclasses.dataclass(frozen=True)
class Hook:
    """One function of the user's, or a default, that is called with the arguments it names.

    Attributes:
        name: as messages have it: ``update_pre``, ``every_steps[10]``
        function: what is called
        arguments: which it names
        common: values that every hook may name
        spec: its row of the table
        is_default: whether it does what the default does, such as the copy in callbacks.py
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    common: Mapping[str, Any]
    spec: Spec
    is_default: bool

    def __str__(self) -> str:
        """The hook as messages name it: ``update_pre (callbacks.py:12)``."""
        return f"{self.name} ({where(self.function)})"

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

    def in_graph(self, **values: Any) -> Any:
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
            message = self.failure(error)
            if "batch" in self.arguments and "batch" in values:
                message += f" [batch: {describe(values['batch'])}]"
            raise HookFailed(message) from error
        accepts = CONTRACT.get(self.spec.name)
        if accepts is not None and not accepts(returned):
            raise self.reject(f"returned {kind_of(returned)}, expected {self.spec.returns}.")
        return returned

    def failure(self, error: BaseException) -> str:
        """Says in one line that this hook raised ``error``, and at which line of it."""
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
        # Functions that AutoGraph converted on the way, or one of Dataset.map.
        frames += [*translated_stack(error), *frames_in(str(error))]
        return f"{self.locate(frames)}: {brief(error)}"

    def locate(self, frames: Iterable[tuple[str, int]]) -> str:
        """Returns ``update_pre (callbacks.py:14)`` for the last frame in the hook's own file."""
        return f"{self.name} ({self.line_in(frames) or where(self.function)})"

    def line_in(self, frames: Iterable[tuple[str, int]]) -> str | None:
        """Returns ``callbacks.py:14`` for the last frame in the hook's own file, if any is."""
        code = code_of(self.function)
        if code is None or code.co_filename == defaults.__file__:
            return None
        found = [line for filename, line in frames if filename == code.co_filename]
        return f"{file_name(code.co_filename)}:{found[-1]}" if found else None

    def has_frame(self, frames: Iterable[tuple[str, int]]) -> bool:
        """Whether one of the frames is in the hook's own body."""
        if (code := code_of(self.function)) is None:
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
        if made := self.find_owner(frames):
            return f"{made}: {brief(error)}"
        inside = self.create_model.line_in(frames)
        return f"{otherwise}{f' ({inside})' if inside else ''}: {brief(error)}"

    def find_owner(self, frames: list[tuple[str, int]]) -> str | None:
        """Returns the hook of the graph, and the line, that an op of these frames is of, if any."""
        hooks = (hook for hook in self.graph_hooks() if hook.has_frame(frames))
        return next((hook.locate(frames) for hook in hooks), None)


def load_hooks(callbacks: Any, config: Config) -> tuple[Hooks, list[str]]:
    """Reads the hooks off a module, any object with these attributes, or a dict.

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
    misspelt = find_misspelt(callbacks, origin)
    required = [spec for spec in TABLE if spec.kind == "required"]
    if missing := [spec for spec in required if not hasattr(callbacks, spec.name)]:
        first = missing[0]
        raise SetupError(
            f"{origin}: {', '.join(one.name for one in missing)} still to be written; the first "
            f"is def {first.name}({', '.join(first.arguments)}), which returns {first.returns}. "
            + " ".join(misspelt)
        )
    found: dict[str, Any] = {}
    for spec in TABLE:
        name = spec.name

        def make_hook(name: str, function: Any, spec: Spec = spec) -> Hook:
            arguments = read_arguments(spec, name, function, origin)
            return Hook(name, function, arguments, common, spec, is_default(name, function))

        value = getattr(callbacks, name, getattr(defaults, name, None))
        if spec.kind == "names":
            found[name] = tuple(value or ())
        elif spec.kind == "by step":
            found[name] = {
                step: tuple(make_hook(f"{name}[{step}]", one) for one in _list(functions))
                for step, functions in read_schedule(spec, value, origin).items()
            }
        elif spec.kind == "one or several":
            found[name] = tuple(make_hook(name, one) for one in _list(value))
        elif value is None and not hasattr(defaults, name):
            found[name] = None
        else:
            found[name] = make_hook(name, value)
    return Hooks(**found), misspelt


def _list(value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    return [] if value is None else [value]


def read_schedule(spec: Spec, value: Any, origin: str) -> dict[int, Any]:
    """Returns functions by step, if that is what a value is."""
    if not isinstance(value, dict) or not all(isinstance(n, int) and n > 0 for n in value):
        raise SetupError(
            f"{origin}: {spec.name} must be a dict {{N: function}} by numbers of steps from 1 up, "
            f"got {one_line(repr(value), 60)}."
        )
    return value


def read_arguments(spec: Spec, name: str, function: Any, origin: str) -> tuple[str, ...]:
    """Returns the arguments that a hook's function names, if it may name all of them."""
    if not callable(function):
        got = one_line(repr(function), 60)
        raise SetupError(f"{origin}: {name} must be a function, got {got}.")
    deferred = spec.kind == "by step" and getattr(function, "deferred", False)
    valid = (*(DEFERRED if deferred else spec.arguments), *COMMON)
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        optional = parameter.default is not parameter.empty or "*" in str(parameter)
        if parameter.name not in valid and not optional:
            raise SetupError(
                f"{where(function) if code_of(function) else origin}: "
                f"{name}{' is @deferred and' * deferred} asks for '{parameter.name}'"
                f"{nearest(parameter.name, valid) or ';'} it may name {', '.join(valid)}."
            )
    return tuple(argument for argument in parameters if argument in valid)


def find_misspelt(callbacks: Any, origin: str) -> list[str]:
    """Warns of what no hook uses but whose name is a hook's, all but a slip."""
    said = []
    for name in dir(callbacks):
        value = inspect.getattr_static(callbacks, name)
        could_be = callable(value) or isinstance(value, dict | list)
        short = name.replace("optimizer", "opt").replace("checkpoint", "ckpt")
        close = difflib.get_close_matches(short, SPECS, n=1, cutoff=0.88)
        if close and could_be and name not in SPECS and not name.startswith("_"):
            said.append(f"{origin}: {name} is no hook and is not used; did you mean {close[0]}?")
    return said


def is_default(name: str, function: Any) -> bool:
    """Whether a function is the hook's default, or a copy of it in another file.

    A docstring, annotations and comments change nothing; what its names stand for has to be the
    same.
    """
    default = getattr(defaults, name, None)
    if not (inspect.isfunction(function) and inspect.isfunction(default)):
        return False
    steps = list(_list_instructions(default.__code__))
    names = {argument for _, argument in steps if isinstance(argument, str)}
    return steps == list(_list_instructions(function.__code__)) and all(
        function.__globals__.get(name) is vars(defaults)[name]
        for name in names & vars(defaults).keys()
    )


def _list_instructions(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Yields what a function does, operation by operation, with that of functions inside."""
    for one in dis.get_instructions(code):
        if isinstance(one.argval, types.CodeType):
            yield from _list_instructions(one.argval)
        else:
            yield one.opname, one.argval
