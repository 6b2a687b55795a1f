"""Reads the hooks from callbacks.py, and defines the checks of their results.

table.py lists the hooks and the arguments that each hook may name; defaults.py defines the
defaults.
"""

import difflib
import functools
import inspect
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from ctl_core.compat import read_max_to_keep
from ctl_core.hooks import defaults
from ctl_core.hooks.hooks import Hook, Hooks
from ctl_core.hooks.optimizer_groups import is_pairs
from ctl_core.hooks.results import Objective
from ctl_core.hooks.spec import Form, HookSpec
from ctl_core.hooks.table import COMMON, DEFERRED, SPECS, TABLE
from ctl_core.run.errors import SetupError, find_code, locate, make_line, suggest
from ctl_core.run.settings import Config
from ctl_core.types import Callbacks, UserObject

# The value of a field of ``Hooks``, which depends on the form of the hook.
HookField: TypeAlias = (
    Hook | tuple[Hook, ...] | dict[int, tuple[Hook, ...]] | tuple[str, ...] | None
)


def load_hooks(callbacks: Callbacks, config: Config) -> tuple[Hooks, list[str]]:
    """Reads the hooks from a module, from any object with the hooks as attributes, or from a dict.

    A ``Hooks`` object is returned unchanged.

    Returns:
        The hooks, and warnings about names that look like a misspelt hook.

    Raises:
        SetupError: a required hook is missing, a hook is not a function or names an argument that
            does not exist, or a key of a schedule is not a positive integer.
    """
    if isinstance(callbacks, Hooks):
        return callbacks, []
    if isinstance(callbacks, Mapping):
        callbacks = types.SimpleNamespace(**callbacks)
    origin = Path(getattr(callbacks, "__file__", None) or "callbacks").name
    misspelt = find_misspelt(callbacks, origin)
    check_required(callbacks, origin, misspelt)
    common = {"config": config, "hparams": config.hparams}
    hooks: dict[str, Any] = {
        spec.name: _read_hook(spec, callbacks, common, origin) for spec in TABLE
    }
    if not hasattr(callbacks, "train_metric_pre"):
        # This also works with the user's metric_pre, because train_metric_pre may name every
        # argument that metric_pre may name.
        hooks["train_metric_pre"] = hooks["metric_pre"]
    return Hooks(**hooks), misspelt


def check_required(callbacks: Callbacks, origin: str, misspelt: Sequence[str]) -> None:
    """Raises an error if a required hook is missing.

    Args:
        callbacks: the object with the hooks
        origin: the name of the file, for the message
        misspelt: the warnings of ``find_misspelt``, which are appended to the message

    Raises:
        SetupError: a required hook is missing.
    """
    required = [spec for spec in TABLE if spec.is_required]
    missing = [spec for spec in required if not hasattr(callbacks, spec.name)]
    if missing:
        first = missing[0]
        names = ", ".join(spec.name for spec in missing)
        cure = f"write def {first.signature}, which returns {first.returns}."
        raise SetupError(" ".join([f"{origin}: missing {names}; {cure}", *misspelt]))


def _read_hook(
    spec: HookSpec, callbacks: Callbacks, common: Mapping[str, Any], origin: str
) -> HookField:
    """Reads a hook, or its default if the callbacks do not define the hook."""
    make = functools.partial(make_hook, spec, common=common, origin=origin)
    default = getattr(defaults, spec.name, None)
    value = getattr(callbacks, spec.name, default)
    if spec.form is Form.NAMES:
        return tuple(value or ())
    if spec.form is Form.FUNCTIONS:
        return tuple(make(spec.name, function) for function in _list(value))
    if spec.form is Form.SCHEDULE:
        return {
            step: tuple(make(f"{spec.name}[{step}]", function) for function in _list(functions))
            for step, functions in read_schedule(spec, value, origin).items()
        }
    if value is None and default is None:  # the engine works without this hook
        return None
    return make(spec.name, value)


def make_hook(
    spec: HookSpec, name: str, function: UserObject, common: Mapping[str, Any], origin: str
) -> Hook:
    """Creates a hook from a function, and reads the names of its arguments.

    Args:
        spec: the row of the table for the hook
        name: the name of the hook in messages, such as ``every_steps[10]``
        function: the user's function, or the default
        common: the values of the arguments that every hook may name
        origin: the name of the file, for messages

    Raises:
        SetupError: ``function`` is not a function, or names an argument that does not exist.
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


def _list(value: UserObject) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    if value is None:
        return []
    return [value]


def read_schedule(spec: HookSpec, value: UserObject, origin: str) -> dict[int, Any]:
    """Returns the functions of a schedule by step.

    Raises:
        SetupError: the value is not a dict, or a key is not a positive integer.
    """
    if not isinstance(value, dict) or not all(isinstance(n, int) and n > 0 for n in value):
        got = make_line(repr(value), 60)
        expected = (
            f"{spec.name} must be a dict {{N: function}} with positive numbers of steps as keys"
        )
        raise SetupError(f"{origin}: {expected}, got {got}.")
    return value


def read_arguments(spec: HookSpec, name: str, function: UserObject, origin: str) -> tuple[str, ...]:
    """Returns the names of a function's arguments that are available to the hook.

    Raises:
        SetupError: the value is not a function, or the function requires an argument that does not
            exist.
    """
    if not callable(function):
        got = make_line(repr(function), 60)
        raise SetupError(f"{origin}: {name} must be a function, got {got}.")
    is_deferred = spec.form is Form.SCHEDULE and getattr(function, "deferred", False)
    available = (*spec.argument_names, *COMMON)
    if is_deferred:
        available = (*DEFERRED, *COMMON)
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        is_optional = parameter.default is not parameter.empty or "*" in str(parameter)
        if parameter.name not in available and not is_optional:
            place = origin
            if find_code(function):
                place = locate(function)
            cure = f"; the available ones are {', '.join(available)}."
            if is_deferred:
                raise SetupError(
                    f"{place}: {name} is @deferred, so it cannot take the argument '"
                    f"{parameter.name}'{cure}"
                )
            suggestion = suggest(parameter.name, available) or cure
            raise SetupError(
                f"{place}: {name} takes an unknown argument '{parameter.name}'{suggestion}"
            )
    return tuple(argument for argument in parameters if argument in available)


def find_misspelt(callbacks: Callbacks, origin: str) -> list[str]:
    """Returns a warning for each name that is similar to the name of a hook."""
    warnings: list[str] = []
    for name in dir(callbacks):
        value = inspect.getattr_static(callbacks, name)
        could_be = callable(value) or isinstance(value, dict | list)
        short = name.replace("optimizer", "opt").replace("checkpoint", "ckpt")
        close = difflib.get_close_matches(short, SPECS, n=1, cutoff=0.88)
        if close and could_be and name not in SPECS and not name.startswith("_"):
            warnings.append(
                f"{origin}: {name} is not a hook and is not used; did you mean {close[0]}?"
            )
    return warnings


def _is_given(value: UserObject) -> bool:
    return value is not None


def _is_dataset(value: UserObject) -> bool:
    return isinstance(value, tf.data.Dataset)


def _is_function(value: UserObject) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_loss(value: UserObject) -> bool:
    """Returns whether a value can be used as a loss.

    It has to be a function of one argument. A Keras loss must not return the mean of a batch.
    """
    if not _is_function(value) or getattr(value, "reduction", None) not in ("sum", "none", None):
        return False
    # Do not look inside decorators, which may have changed the arguments of the wrapped function.
    signature = inspect.signature(value, follow_wrapped=False)
    options = {}
    if "training" in signature.parameters:
        options["training"] = True
    try:
        signature.bind(None, **options)
    except TypeError:
        return False
    return True


def _is_optimizer(value: UserObject) -> bool:
    # Optimizers of TensorFlow 1 would sum the gradients over the replicas a second time.
    refused = (type, tf.compat.v1.train.Optimizer)
    return hasattr(value, "apply_gradients") and not isinstance(value, refused)


def _are_optimizers(value: UserObject) -> bool:
    optimizers = [value]
    if isinstance(value, dict):
        optimizers = list(value.values())
    elif is_pairs(value):
        optimizers = [optimizer for optimizer, _ in value]
    return bool(optimizers) and all(map(_is_optimizer, optimizers))


def _are_metrics(value: UserObject) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(name, str) and name != "loss" for name in value)
        and all(isinstance(metric, keras.Metric) for metric in value.values())
    )


def _is_number(value: UserObject) -> bool:
    if tf.is_tensor(value):
        return value.shape.rank in (0, None) and (value.dtype.is_floating or value.dtype.is_integer)
    return isinstance(value, numbers.Real)


def _is_count(value: UserObject) -> bool:
    """Returns whether a value is an integer, or None, which means a single example."""
    if value is None:
        return True
    if tf.is_tensor(value):
        return _is_number(value) and value.dtype.is_integer
    return isinstance(value, numbers.Integral)


def _is_pair(value: UserObject) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _is_flag(value: UserObject) -> bool:
    """Returns whether a value is a single bool, or None, which means False."""
    if value is None:
        return True
    if tf.is_tensor(value):
        return value.shape.rank in (0, None) and value.dtype.is_bool
    return isinstance(value, bool)


def _is_update(value: UserObject) -> bool:
    """Returns whether a value is an ``Update``, or a tuple of its first 2 or 3 fields."""
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        return False
    return isinstance(value[0], tuple | list) and all(map(_is_flag, value[2:]))


def _is_saved(value: UserObject) -> bool:
    """Returns whether a value is a checkpoint and a manager that keeps more than one."""
    kinds = (tf.train.Checkpoint, tf.train.CheckpointManager)
    if not _is_pair(value) or not all(map(isinstance, value, kinds)):
        return False
    return read_max_to_keep(value[1]) != 1


def _is_objective(value: UserObject) -> bool:
    """Returns whether a value is an ``Objective``, or a tuple of its first 3 or 4 fields."""
    if not isinstance(value, tuple | list) or len(value) not in (3, 4):
        return False
    objective = Objective(*value)
    return (
        _is_number(objective.extra_loss)
        and isinstance(objective.variables, tuple | list)
        and isinstance(objective.logged, Mapping)
    )


def _are_objectives(value: UserObject) -> bool:
    if isinstance(value, dict):
        return all(map(_is_objective, value.values()))
    return _is_objective(value)


def _are_losses(value: UserObject) -> bool:
    """Returns whether a value is a pair whose second element is a number."""
    return _is_pair(value) and _is_number(value[1])


CONTRACT: dict[str, Callable[[Any], bool]] = {
    "make_batches": _is_dataset,
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
    "eval_pre": _are_losses,
}
