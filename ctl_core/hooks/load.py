"""Reads the hooks off callbacks.py, and says what each of them has to return.

Which there are, and what each may name, is in table.py; their defaults are in defaults.py.
"""

import difflib
import inspect
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core.compat import read_max_to_keep
from ctl_core.hooks import defaults
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.hooks.results import Objective
from ctl_core.hooks.spec import Form, HookSpec
from ctl_core.hooks.table import COMMON, DEFERRED, SPECS, TABLE
from ctl_core.numerics.groups import is_pairs
from ctl_core.run.errors import SetupError, find_code, locate, make_line, suggest
from ctl_core.run.settings import Config


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
    origin = Path(getattr(callbacks, "__file__", None) or "callbacks").name
    misspelt = find_misspelt(callbacks, origin)
    check_required(callbacks, origin, misspelt)
    common = {"config": config, "hparams": config.hparams}
    hooks = {spec.name: _read_hook(spec, callbacks, common, origin) for spec in TABLE}
    if not hasattr(callbacks, "train_metric_pre"):
        # The arguments of metric_pre, also the user's, are among those of train_metric_pre.
        hooks["train_metric_pre"] = hooks["metric_pre"]
    return Hooks(**hooks), misspelt


def check_required(callbacks: Any, origin: str, misspelt: Sequence[str]) -> None:
    """Refuses callbacks without a hook that there is no training without.

    Args:
        origin: the name of the file, for the message
        misspelt: what ``find_misspelt`` has found, which the message ends with
    """
    required = [spec for spec in TABLE if spec.is_required]
    missing = [spec for spec in required if not hasattr(callbacks, spec.name)]
    if missing:
        first = missing[0]
        names = ", ".join(spec.name for spec in missing)
        cure = f"write def {first.signature}, which returns {first.returns}."
        raise SetupError(" ".join([f"{origin}: missing {names}; {cure}", *misspelt]))


def _read_hook(spec: HookSpec, callbacks: Any, common: Mapping[str, Any], origin: str) -> Any:
    """Returns one hook as ``Hooks`` has it, which depends on its form."""

    def make(function: Any, name: str = spec.name) -> Hook:
        return make_hook(spec, name, function, common, origin)

    default = getattr(defaults, spec.name, None)
    value = getattr(callbacks, spec.name, default)
    if spec.form is Form.NAMES:
        return tuple(value or ())
    if spec.form is Form.FUNCTIONS:
        return tuple(make(function) for function in _list(value))
    if spec.form is Form.SCHEDULE:
        return {
            step: tuple(make(function, f"{spec.name}[{step}]") for function in _list(functions))
            for step, functions in read_schedule(spec, value, origin).items()
        }
    if value is None and default is None:  # the engine does without
        return None
    return make(value)


def make_hook(
    spec: HookSpec, name: str, function: Any, common: Mapping[str, Any], origin: str
) -> Hook:
    """Returns a hook that is called with the arguments that a function names.

    Args:
        name: of the hook in messages: ``every_steps[10]``, say
        common: the values that every hook may name
        origin: the name of the file, for messages

    Raises:
        SetupError: it is no function, or names an argument that does not exist.
    """
    return Hook(
        name=name,
        function=function,
        arguments=read_arguments(spec, name, function, origin),
        common=common,
        is_default=function is getattr(defaults, spec.name, None),
        is_traced=spec.is_traced,
        returns=spec.returns,
        accepts=CONTRACT.get(spec.name),
    )


def _list(value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    return [] if value is None else [value]


def read_schedule(spec: HookSpec, value: Any, origin: str) -> dict[int, Any]:
    """Returns functions by step, if that is what a value is."""
    if not isinstance(value, dict) or not all(isinstance(n, int) and n > 0 for n in value):
        got = make_line(repr(value), 60)
        expected = f"{spec.name} must be a dict {{N: function}} by numbers of steps from 1 up"
        raise SetupError(f"{origin}: {expected}, got {got}.")
    return value


def read_arguments(spec: HookSpec, name: str, function: Any, origin: str) -> tuple[str, ...]:
    """Returns the arguments that a hook's function names, if it may name all of them."""
    if not callable(function):
        got = make_line(repr(function), 60)
        raise SetupError(f"{origin}: {name} must be a function, got {got}.")
    deferred = spec.form is Form.SCHEDULE and getattr(function, "deferred", False)
    valid = (*(DEFERRED if deferred else spec.argument_names), *COMMON)
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        optional = parameter.default is not parameter.empty or "*" in str(parameter)
        if parameter.name not in valid and not optional:
            near = not deferred and suggest(parameter.name, valid)
            raise SetupError(
                f"{locate(function) if find_code(function) else origin}: "
                f"{name}{' is @deferred and' * deferred} asks for '{parameter.name}'"
                f"{near or '; it may name ' + ', '.join(valid) + '.'}"
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


def _is_given(value: Any) -> bool:
    return value is not None


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_loss(value: Any) -> bool:
    """Whether a value can be called with one argument, and is no mean over a replica's batch."""
    if not _is_function(value) or getattr(value, "reduction", None) not in ("sum", "none", None):
        return False
    # A decorated function is what the decorator has made of it.
    signature = inspect.signature(value, follow_wrapped=False)
    try:
        signature.bind(None, **({"training": True} if "training" in signature.parameters else {}))
    except TypeError:
        return False
    return True


def _is_optimizer(value: Any) -> bool:
    # An optimizer of TensorFlow 1 sums over the replicas by itself.
    refused = (type, tf.compat.v1.train.Optimizer)
    return hasattr(value, "apply_gradients") and not isinstance(value, refused)


def _are_optimizers(value: Any) -> bool:
    several = [value]
    if isinstance(value, dict):
        several = list(value.values())
    elif is_pairs(value):
        several = [optimizer for optimizer, _ in value]
    return bool(several) and all(map(_is_optimizer, several))


def _are_metrics(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(name, str) and name != "loss" for name in value)
        and all(isinstance(metric, keras.Metric) for metric in value.values())
    )


def _is_number(value: Any) -> bool:
    if tf.is_tensor(value):
        return value.shape.rank in (0, None) and (value.dtype.is_floating or value.dtype.is_integer)
    return isinstance(value, numbers.Real)


def _is_count(value: Any) -> bool:
    """Whether a value is a whole number, or None, which stands for a single example."""
    whole = value.dtype.is_integer if tf.is_tensor(value) else isinstance(value, numbers.Integral)
    return value is None or (_is_number(value) and whole)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _is_flag(value: Any) -> bool:
    """Returns whether a value is one bool, or None, which stands for False."""
    if value is None:
        return True
    if tf.is_tensor(value):
        return value.shape.rank in (0, None) and value.dtype.is_bool
    return isinstance(value, bool)


def _is_update(value: Any) -> bool:
    """Whether a value is gradients, what is shown of them, and perhaps whether to skip them."""
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        return False
    return isinstance(value[0], tuple | list) and all(map(_is_flag, value[2:]))


def _is_saved(value: Any) -> bool:
    """Whether a value is a checkpoint and a manager that keeps one while it saves the next."""
    kinds = (tf.train.Checkpoint, tf.train.CheckpointManager)
    return (
        _is_pair(value) and all(map(isinstance, value, kinds)) and read_max_to_keep(value[1]) != 1
    )


def _is_objective(value: Any) -> bool:
    """Whether a value is an ``Objective``, or a plain tuple of 3 or 4 such values."""
    if not isinstance(value, tuple | list) or len(value) not in (3, 4):
        return False
    objective = Objective(*value)
    return (
        _is_number(objective.extra_loss)
        and isinstance(objective.variables, tuple | list)
        and isinstance(objective.logged, Mapping)
    )


def _are_objectives(value: Any) -> bool:
    return all(map(_is_objective, value.values() if isinstance(value, dict) else [value]))


CONTRACT: dict[str, Callable[[Any], bool]] = {
    "make_batches": lambda value: isinstance(value, tf.data.Dataset),
    "count_examples": _is_count,
    "create_model": _is_function,
    "create_eval_model": _is_function,
    "create_inference_model": _is_function,
    "serve": _is_given,
    "create_loss": _is_loss,
    "create_opt": _are_optimizers,
    "create_ckpt": _is_saved,
    "input_pre": _is_given,
    "loss_pre": _is_given,
    "batch_weight": _is_number,
    "grad_pre": _are_objectives,
    "update_pre": _is_update,
    "create_train_metrics": _are_metrics,
    "train_metric_pre": _is_given,
    "create_metrics": _are_metrics,
    "metric_pre": _is_given,
    "eval_pre": lambda value: _is_pair(value) and _is_number(value[1]),
}
