"""Reads the hooks off callbacks.py, and says what each of them has to return.

Which there are, and what each may name, is in table.py; their defaults are in defaults.py.
"""

import difflib
import dis
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
from ctl_core.hooks.table import COMMON, DEFERRED, SPECS, TABLE, Spec
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
    common = {"config": config, "hparams": config.hparams}
    origin = Path(getattr(callbacks, "__file__", None) or "callbacks").name
    misspelt = find_misspelt(callbacks, origin)
    required = [spec for spec in TABLE if spec.kind == "required"]
    if missing := [spec for spec in required if not hasattr(callbacks, spec.name)]:
        first = missing[0]
        raise SetupError(
            f"{origin}: missing {', '.join(one.name for one in missing)}; write "
            f"def {first.name}({', '.join(first.arguments)}), which returns {first.returns}. "
            + " ".join(misspelt)
        )
    found: dict[str, Any] = {}
    for spec in TABLE:
        name = spec.name

        def make_hook(name: str, function: Any, spec: Spec = spec) -> Hook:
            arguments = read_arguments(spec, name, function, origin)
            default, traced = is_default(name, function), spec.kind == "in the graph"
            accepts = CONTRACT.get(spec.name)
            return Hook(name, function, arguments, common, default, traced, spec.returns, accepts)

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
    if not hasattr(callbacks, "train_metric_pre"):
        # Also if metric_pre is the user's: its arguments are among those of train_metric_pre.
        found["train_metric_pre"] = found["metric_pre"]
    return Hooks(**found), misspelt


def _list(value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    return [] if value is None else [value]


def read_schedule(spec: Spec, value: Any, origin: str) -> dict[int, Any]:
    """Returns functions by step, if that is what a value is."""
    if not isinstance(value, dict) or not all(isinstance(n, int) and n > 0 for n in value):
        got = make_line(repr(value), 60)
        expected = f"{spec.name} must be a dict {{N: function}} by numbers of steps from 1 up"
        raise SetupError(f"{origin}: {expected}, got {got}.")
    return value


def read_arguments(spec: Spec, name: str, function: Any, origin: str) -> tuple[str, ...]:
    """Returns the arguments that a hook's function names, if it may name all of them."""
    if not callable(function):
        got = make_line(repr(function), 60)
        raise SetupError(f"{origin}: {name} must be a function, got {got}.")
    deferred = spec.kind == "by step" and getattr(function, "deferred", False)
    valid = (*(DEFERRED if deferred else spec.arguments), *COMMON)
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


def is_default(name: str, function: Any) -> bool:
    """Whether a function is the hook's default, or a copy of it in another file.

    A docstring, annotations and comments change nothing, nor whether it says ``unpack`` or
    ``ctl.unpack``; what its names stand for has to be the same.
    """
    default = getattr(defaults, name, None)
    if not (inspect.isfunction(function) and inspect.isfunction(default)):
        return False
    one, other = (_list_instructions(f.__code__, f.__globals__) for f in (function, default))
    return one == other


def _list_instructions(code: types.CodeType, names: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns what a function does, operation by operation, with that of functions inside."""
    found: list[tuple[str, Any]] = []
    value: Any = None  # of the name that was looked up last, of which a module's are looked up, too
    for one in dis.get_instructions(code):
        if isinstance(one.argval, types.CodeType):
            found += _list_instructions(one.argval, names)
        elif one.opname == "LOAD_GLOBAL" and one.argval in names:
            value = names[one.argval]
            found.append(("name", id(value)))
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
            value = getattr(value, one.argval, None)
            found[-1] = ("name", id(value))
        elif one.opname != "PUSH_NULL":
            value = None  # how far to jump depends on how names are looked up
            found.append((one.opname, None if one.opcode in dis.hasjrel else one.argval))
    return found


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
    """Whether a value is a loss, an extra loss and variables, perhaps with the loss's parts."""
    if not isinstance(value, tuple | list) or len(value) not in (3, 4):
        return False
    listed = isinstance(value[2], tuple | list) and (len(value) == 3 or isinstance(value[3], dict))
    return listed and _is_number(value[1])


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
