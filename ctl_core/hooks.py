"""The hooks: one table, their validation, and calling them by argument name.

``TABLE`` is the source of the validation, of ``ctl_core hooks`` and of the documentation. What a
hook does that callbacks.py leaves out is in defaults.py.
What the values of the arguments are is decided where a hook is called: step.py, trainer.py,
evaluate.py, build.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import numbers
import re
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core import defaults
from ctl_core.errors import CtlError, HookFailed, SetupError, brief, one_line
from ctl_core.settings import Config, nearest


@dataclasses.dataclass(frozen=True)
class Spec:
    """One row of the table: a hook's name, the arguments it may name, what it returns."""

    name: str
    arguments: tuple[str, ...]
    returns: str
    doc: str
    default: str = "–"
    required: bool = False
    in_graph: bool = False
    scheduled: bool = False


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


# What a host hook can name only at the price of an observed step: these come out of the graph.
OBSERVED = _names("update_gradients loss output batch display_gradients gradients")
_HOST = _names(
    "dev step update_gradients loss output batch train_model train_loss lr optimizer "
    "display_gradients gradients ckpt manager chief state"
)
# What a hook that the graph is not left for may name.
_DEFERRED = _names("dev step chief")

TABLE: tuple[Spec, ...] = (
    Spec(
        "create_dataset",
        _names("per_replica_batch_size global_batch_size input_context"),
        "tf.data.Dataset of batches of either size",
        "The training data, one pass; the engine repeats it, and shares it out over the processes "
        "of a cluster unless the hook names input_context and shards for itself.",
        required=True,
    ),
    Spec(
        "make_batches",
        _names("dataset per_replica_batch_size global_batch_size input_context"),
        "dataset, one element = one replica's batch, or the global one",
        "Last change to the repeated dataset, before it is dealt out to the replicas.",
        "the dataset unchanged",
    ),
    Spec(
        "count_examples",
        _names("batch"),
        "how many examples a batch holds",
        "Which dimension counts, where not all tensors have one row per example, as in graphs.",
        "the first dimension, which all tensors have to share",
        in_graph=True,
    ),
    Spec(
        "create_model",
        (),
        "train_model, callable: output = train_model(inputs)",
        "The model; built under the strategy's scope.",
        required=True,
    ),
    Spec(
        "create_loss",
        (),
        "train_loss, callable: loss = train_loss(loss_input)",
        "The loss: one number per example, or their sum.",
        required=True,
    ),
    Spec(
        "create_opt",
        _names("lr"),
        "optimizer, or a dict of optimizers by objective",
        "The optimizer.",
        "Nadam(learning_rate=lr, epsilon=0.001)",
    ),
    Spec(
        "create_ckpt",
        _names("ckpt_path step lr optimizer train_model train_loss"),
        "ckpt, manager",
        "What a checkpoint holds and how many are kept.",
        "all five, the newest 50",
    ),
    Spec(
        "input_pre",
        _names("batch lr"),
        "model input",
        "The model's input, made from a batch.",
        "first element of an (inputs, targets) or (inputs, targets, weights) batch",
        in_graph=True,
    ),
    Spec(
        "loss_pre",
        _names("output batch train_model lr"),
        "loss_input, one argument",
        "What train_loss is called with.",
        "(output, second element of the batch)",
        in_graph=True,
    ),
    Spec(
        "batch_weight",
        _names("batch output"),
        "how much a batch weighs, one number from 0 up",
        "What the summed loss is divided by, in training and evaluation: the weights of all "
        "replicas and micro-batches added up, such as the number of tokens that are not padding.",
        "the number of examples",
        in_graph=True,
    ),
    Spec(
        "grad_pre",
        _names("loss output batch train_model train_loss lr"),
        "loss_per_batch, extra_loss, trainable_vars; or a dict of such by objective",
        "What is differentiated (the loss summed over the batch, plus terms that do not depend "
        "on the batch), and by which variables.",
        "weighted(loss, batch), regularization(train_model), trainable_variables(train_model)",
        in_graph=True,
    ),
    Spec(
        "update_pre",
        _names("gradients loss output batch train_model train_loss lr optimizer"),
        "update_gradients, display_gradients",
        "From the gradients, summed over the replicas, to those that the optimizer applies.",
        "NaN becomes 0, then clip_by_global_norm at 10; unclipped ones for display",
        in_graph=True,
    ),
    Spec(
        "every_steps",
        _HOST,
        "–",
        "{N: function or list of functions}, run on the host after every N-th step, in every "
        "process of a cluster: what writes a file or calls a service asks chief first, a bool. "
        "state is a dict that checkpoints keep.",
        "{1: print_step, 10: print_loss}",
        scheduled=True,
    ),
    Spec(
        "at_step",
        _HOST,
        "–",
        "{N: function or list of functions}, run once after step N, never again.",
        "{}",
        scheduled=True,
    ),
    Spec(
        "create_eval_dataset",
        _names("per_replica_batch_size"),
        "tf.data.Dataset of batches, the last one may be smaller",
        "The evaluation data, one pass; each example is used exactly once.",
        "none: no evaluation",
    ),
    Spec(
        "create_metrics",
        (),
        "dict of Keras metrics by name",
        "What the evaluation measures beside the loss.",
        "{}",
    ),
    Spec(
        "metric_pre",
        _names("output batch train_model"),
        "arguments of update_state, or a dict of such by metric",
        "What the metrics are updated with.",
        "(second element of the batch, output), and the third if there are sample weights",
        in_graph=True,
    ),
    Spec(
        "eval_pre",
        _names("loss output batch train_model train_loss lr"),
        "loss_per_batch, extra_loss",
        "The loss that the evaluation reports.",
        "weighted(loss, batch), regularization(train_model)",
        in_graph=True,
    ),
)
SPECS = {spec.name: spec for spec in TABLE}
COMMON = ("config", "hparams")
DATA_HOOKS = ("create_dataset", "make_batches", "create_eval_dataset")


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
        code = _code_of(self.function)
        if code is None:
            return getattr(self.function, "__module__", None) or "callbacks"
        if code.co_filename == defaults.__file__:
            return "the engine's default"
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"

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
        stack = traceback.extract_tb(error.__traceback__)
        frames = [(frame.filename, frame.lineno or 0) for frame in stack]
        # A function that AutoGraph converted on the way, such as a helper, or one of Dataset.map.
        converted = getattr(getattr(error, "ag_error_metadata", None), "translated_stack", ())
        frames += [(frame.filename, frame.lineno) for frame in reversed(converted)]
        return self.line_in([*frames, *frames_in(str(error))]) or self.where

    def line_in(self, frames: Iterable[tuple[str, int]]) -> str | None:
        """Returns ``callbacks.py:14`` for the last frame in the hook's own file, if any is."""
        code = _code_of(self.function)
        if code is None or code.co_filename == defaults.__file__:
            return None
        lines = _original_lines(self.traced)
        found = None
        for frame in frames:
            filename, lineno = lines.get(frame, frame)
            if filename == code.co_filename:
                found = lineno
        return f"{Path(code.co_filename).name}:{found}" if found else None

    def made(self, frames: Iterable[tuple[str, int]]) -> bool:
        """Whether one of the frames is the hook's own body, perhaps as AutoGraph converted it."""
        lines = set(_original_lines(self.traced))
        if self.traced is self.function and (code := _code_of(self.function)):
            lines = {(code.co_filename, line) for _, _, line in code.co_lines() if line}
        return any(frame in lines for frame in frames)


def frames_in(text: str) -> list[tuple[str, int]]:
    """Reads the frames off a stack that is part of a message: (file, line), outermost first."""
    found = re.findall(r'^\s*File "([^"\n]+)", line (\d+), in ', text, re.MULTILINE)
    return [(filename, int(line)) for filename, line in found]


def describe(element: Any) -> str:
    """Writes down the structure of a batch: ``(float32[32, 8, 8], int64[32])``."""
    if isinstance(element, dict):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in element.items()) + "}"
    if isinstance(element, tuple | list):
        return "(" + ", ".join(describe(part) for part in element) + ")"
    if hasattr(element, "dtype") and hasattr(element, "shape"):
        return f"{tf.as_dtype(element.dtype).name}{element.shape.as_list()}"
    return type(element).__name__


def _code_of(function: Callable[..., Any]) -> Any:
    """Returns the code of a function, of what a partial calls, or of an object's or class's own."""
    function = inspect.unwrap(getattr(function, "func", function))
    if inspect.isclass(function):
        own = [part for part in vars(function).values() if inspect.isfunction(part)]
        return own[0].__code__ if own else None
    return getattr(function, "__code__", None) or getattr(_call_of(function), "__code__", None)


def names_in(function: Callable[..., Any]) -> set[str]:
    """Returns the names that a function's code uses, also in functions within it."""
    found, codes = set(), [_code_of(function)]
    while codes:
        if (code := codes.pop()) is not None:
            found |= {*code.co_names}
            codes += [part for part in code.co_consts if inspect.iscode(part)]
    return found


def _call_of(instance: Any) -> Any:
    return getattr(type(instance), "__call__", None)  # noqa: B004


def _traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Converts a graph hook with AutoGraph, where it has Python source to convert.

    What surrounds the source is kept: a method its object, a partial its arguments, a decorated
    function its decorator. A tf.function does its own converting. The defaults need none, and
    converting costs a fortieth of a second each.
    """
    if _is_default(function):
        return function
    if isinstance(function, functools.partial):
        inner = _traceable(function.func)
        return functools.partial(inner, *function.args, **function.keywords)
    if inspect.ismethod(function):
        return functools.partial(_traceable(function.__func__), function.__self__)
    if isinstance(function, tf.types.experimental.Callable):
        return function
    if not inspect.isfunction(function):
        call = _call_of(function)
        return (
            functools.partial(_traceable(call), function) if inspect.isfunction(call) else function
        )
    try:
        converted = tf.autograph.to_graph(function)
    except Exception:  # no source, as in some notebooks: it runs as it is
        return function
    return converted  # type: ignore[no-any-return]


def _is_default(function: Callable[..., Any]) -> bool:
    """Whether a function does what one of the engine's defaults does, such as its copy."""
    default = getattr(defaults, getattr(function, "__name__", ""), None)
    if not inspect.isfunction(function) or not inspect.isfunction(default):
        return False

    def same(one: types.CodeType, other: types.CodeType) -> bool:
        alike = ("co_code", "co_names", "co_varnames", "co_freevars")
        constants = zip(one.co_consts, other.co_consts, strict=False)
        return (
            all(getattr(one, part) == getattr(other, part) for part in alike)
            and len(one.co_consts) == len(other.co_consts)
            and all(same(a, b) if inspect.iscode(a) and inspect.iscode(b) else a == b
                    for a, b in constants)
        )  # fmt: skip

    if function.__defaults__ != default.__defaults__:
        return False
    return same(function.__code__, default.__code__) and all(
        function.__globals__.get(name) is default.__globals__.get(name)
        for name in names_in(function)
    )


def _original_lines(converted: Callable[..., Any]) -> dict[tuple[str, int], tuple[str, int]]:
    """Maps lines of AutoGraph's generated file to those of the source.

    ``ag_source_map`` is an undocumented attribute of what ``tf.autograph.to_graph`` returns;
    without it messages fall back to the line of the hook's definition.
    """
    while isinstance(converted, functools.partial):
        converted = converted.func
    mapping = getattr(converted, "ag_source_map", {})
    return {
        (key.filename, key.lineno): (origin.loc.filename, origin.loc.lineno)
        for key, origin in mapping.items()
    }


Schedule = dict[int, tuple[Hook, ...]]
# In the message of an op that failed: it was one of the data's, since reading had to stop for it.
READING = re.compile(r"\[\[[^\[\]]*IteratorGetNext(\w*)(?:\}\})?\]\]")


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Every hook of a run, the user's or the default; None where the engine does without."""

    create_dataset: Hook
    make_batches: Hook
    count_examples: Hook
    create_model: Hook
    create_loss: Hook
    create_opt: Hook
    create_ckpt: Hook
    input_pre: Hook
    loss_pre: Hook
    batch_weight: Hook | None
    grad_pre: Hook
    update_pre: Hook
    every_steps: Schedule
    at_step: Schedule
    create_eval_dataset: Hook | None
    create_metrics: Hook
    metric_pre: Hook
    eval_pre: Hook

    def data_functions(self) -> dict[str, Any]:
        """The functions of the hooks that make data, by name."""
        hooks = {name: getattr(self, name) for name in DATA_HOOKS}
        return {name: hook.function for name, hook in hooks.items() if hook is not None}

    def functions(self) -> dict[str, Any]:
        """The functions of the hooks by name, but for those that make data."""
        found: dict[str, Any] = {}
        for spec in TABLE:
            hooks = getattr(self, spec.name)
            if spec.scheduled:
                several = [hook.function for some in hooks.values() for hook in some]
                for index, function in enumerate(several):
                    name = f"{spec.name}/{getattr(function, '__name__', '')}"
                    found[f"{name}-{index}" if name in found else name] = function
            elif hooks is not None and spec.name not in DATA_HOOKS:
                found[spec.name] = hooks.function
        return found

    def blame(self, error: BaseException, otherwise: str = "the step") -> str:
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
        for spec in TABLE:
            hook = getattr(self, spec.name)
            if spec.in_graph and hook is not None and hook.made(frames):
                return f"{spec.name} ({hook.line_in(frames) or hook.where}): {brief(error)}"
        inside = self.create_model.line_in(frames)
        return f"{otherwise}{f' ({inside})' if inside else ''}: {brief(error)}"


def load_hooks(callbacks: Any, config: Config) -> tuple[Hooks, list[str]]:
    """Reads the hooks off a module, any object with these attributes, or a dict; checks each.

    Returns:
        The hooks, and warnings about names that look like a misspelt hook.

    Raises:
        SetupError: a required hook is missing, something is no function, names an argument that
            does not exist, or a schedule's key is no positive whole number.
    """
    if isinstance(callbacks, Mapping):
        callbacks = types.SimpleNamespace(**callbacks)
    common = {"config": config, "hparams": config.hparams}
    origin = Path(getattr(callbacks, "__file__", None) or "callbacks").name
    missing = [spec.name for spec in TABLE if spec.required and not hasattr(callbacks, spec.name)]
    if missing:
        spec = SPECS[missing[0]]
        close = [name for name in dir(callbacks) if _meant(callbacks, name) == spec.name]
        raise SetupError(
            f"{origin}: {', '.join(missing)} still to be written; the first is "
            f"def {spec.name}({', '.join(spec.arguments)}), which returns {spec.returns}."
            + (f" There is a {close[0]}: is it misspelt?" if close else "")
        )
    found: dict[str, Any] = {}
    for spec in TABLE:
        value = getattr(callbacks, spec.name, getattr(defaults, spec.name, None))
        if value is None and spec.name in ("batch_weight", "create_eval_dataset"):
            found[spec.name] = None
        elif spec.scheduled:
            found[spec.name] = _schedule(spec, value, common, origin)
        else:
            found[spec.name] = _hook(spec, spec.name, value, common, origin)
    return Hooks(**found), _misspelt(callbacks, origin)


def _schedule(spec: Spec, value: Any, common: Mapping[str, Any], origin: str) -> Schedule:
    if not isinstance(value, dict):
        raise SetupError(
            f"{origin}: {spec.name} must be a dict {{N: function}}, "
            f"got {one_line(repr(value), 60)}."
        )
    schedule: Schedule = {}
    for key, functions in value.items():
        if isinstance(key, bool) or not isinstance(key, numbers.Integral) or key < 1:
            raise SetupError(
                f"{origin}: {spec.name} has the key {key!r}; expected a step number, a whole "
                "number from 1 up."
            )
        several = functions if isinstance(functions, list | tuple) else [functions]
        schedule[int(key)] = tuple(
            _hook(spec, f"{spec.name}[{key}]", function, common, origin) for function in several
        )
    return schedule


def _hook(spec: Spec, name: str, function: Any, common: Mapping[str, Any], origin: str) -> Hook:
    if not callable(function):
        raise SetupError(
            f"{origin}: {name} must be a function, got {one_line(repr(function), 60)}."
        )
    hook = Hook(name, function, (), common, function)
    where = hook.where if _code_of(function) else origin
    valid = (*spec.arguments, *COMMON)
    kinds = (
        inspect.isgeneratorfunction,
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
    )
    if any(is_kind(inspect.unwrap(function)) for is_kind in kinds):
        raise SetupError(
            f"{where}: {name} is a generator or a coroutine, whose body would not run; write a "
            "plain function, without yield and async."
        )
    arguments = []
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise SetupError(
            f"{where}: {name} has no signature to read; wrap it in a function that names "
            f"its arguments (of {', '.join(valid)})."
        ) from None
    for parameter in parameters:
        if parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise SetupError(
                f"{where}: {name} takes {parameter}"
                f"{' by position' * (parameter.kind is parameter.POSITIONAL_ONLY)}; a hook gets "
                f"its arguments by name, so write out the ones it uses, of {', '.join(valid)}."
            )
        if parameter.name in valid:
            arguments.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise SetupError(
                f"{where}: {name} asks for '{parameter.name}'"
                f"{nearest(parameter.name, valid) or ';'} it may name {', '.join(valid)}."
            )
    if getattr(function, "deferred", False):
        _check_deferred(spec, hook, arguments)
    traced = _traceable(function) if spec.in_graph else function
    return Hook(name, function, tuple(arguments), common, traced)


def _check_deferred(spec: Spec, hook: Hook, arguments: list[str]) -> None:
    allowed = (*_DEFERRED, *COMMON)
    if spec.name != "every_steps":
        raise SetupError(f"{hook.where}: {hook.name} is @deferred, which only every_steps can be.")
    for argument in arguments:
        if argument not in allowed:
            raise SetupError(
                f"{hook.where}: {hook.name} is @deferred and asks for '{argument}'; a deferred "
                f"function may name {', '.join(allowed)} only."
            )


def _misspelt(callbacks: Any, origin: str) -> list[str]:
    """Finds functions and dicts that no hook uses but whose name is a hook's, all but a slip."""
    return [
        f"{origin}: {name} is no hook and is not used; did you mean {close}?"
        for name in dir(callbacks)
        if (close := _meant(callbacks, name))
    ]


def _meant(callbacks: Any, name: str) -> str | None:
    """Returns the hook that an attribute looks like without being one."""
    value = inspect.getattr_static(callbacks, name)
    if name in SPECS or name.startswith("_") or not (callable(value) or isinstance(value, dict)):
        return None
    short = name.replace("optimizer", "opt").replace("checkpoint", "ckpt")
    close = difflib.get_close_matches(short, SPECS, n=1, cutoff=0.88)
    return close[0] if close else None
