"""A run on one device beside the same on several: what differs is named.

Both take a step without training's noise, then two with it, and evaluate. Nothing has to be known
of a mistake to find it so: a loss, an output, a gradient, an assigned variable or a value of the
evaluation is not what it is on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.batches import make_placeholders
from ctl_core.checkpoint import is_summed
from ctl_core.checks.ratio import draws_numbers
from ctl_core.collectives import Alone
from ctl_core.compat import scratch_graph, with_called
from ctl_core.errors import SetupError
from ctl_core.forward import forward_backward
from ctl_core.graph import StepFunctions
from ctl_core.metrics import read_results
from ctl_core.model.variables import plain_variable, variable_name
from ctl_core.numerics.staging import ReplicaCopies
from ctl_core.source_lines import file_name, frames_of, is_own_file
from ctl_core.state import State
from ctl_core.summary import is_normalizing

FETCHES = frozenset({"loss", "gradients", "update_gradients", "output"})
OF_STEP = ("output", "loss", "gradient", "update")  # the first that differs is the cause
TOLERANCE = 1e-3

Values = dict[tuple[str, str], list[np.ndarray]]


def observe(state: State) -> Values:
    """Takes steps and evaluates; variables and data are as before.

    Returns:
        What replicas have, by kind and name.

    Of steps that draw random numbers, or normalize each replica's batch, only integers count.
    """
    values: Values = {}
    copies = ReplicaCopies(state.strategy, list(state.recording.variables.values()))
    for quiet in (True, False):
        parts = dataclasses.replace(state.parts, quiet=quiet)
        run = dataclasses.replace(state, parts=parts)
        functions = StepFunctions(run, tf.summary.create_noop_writer())
        with copies.put_back_after():
            for _ in range(1 if quiet else 2):
                found = functions.train_step(FETCHES)
            trained = trace(run)[1]
            exact = not draws_numbers(functions.operations()) and (
                quiet or not any(map(is_normalizing, state.recording.layers))
            )
            mode = "" if quiet else "training/"
            if exact:
                values |= {(mode + kind, name): v for (kind, name), v in _of_step(found, trained)}
            for kind, name, several in _of_variables(state, exact):
                values[mode + kind, name] = several
        state.data.begin_anew()
    if state.evaluation is not None:
        with copies.put_back_after():
            state.evaluation.trace(state.recording)
            for name, value in (state.evaluation.evaluate() or {}).items():
                values["evaluation", name] = [np.asarray(value)]
    return values


def trace(state: State) -> tuple[Any, dict[str, list[Any]]]:
    """Traces forward and backward pass; returns the graph, and what is trained by objective."""
    trained: dict[str, list[Any]] = {}
    with (
        state.strategy.scope(),
        scratch_graph("check").as_default() as graph,
        Alone(state.strategy, 0),
    ):
        share = (make_placeholders(state.data.share_spec), None, None, None)
        for moment in state.parts.moments():
            trained |= forward_backward(state.parts, moment, 1, frozenset(), share)[1]
    return graph, trained


def check_traces(state: State) -> None:
    """Traces the forward pass twice: a graph is to be the same, so that it draws what it draws.

    Raises:
        SetupError: it is not.
    """
    one, other = ([*with_called(trace(state)[0].get_operations())] for _ in range(2))
    for first, second in zip(one, other, strict=False):
        if first.type == second.type != "Const":
            continue
        values = [op.get_attr("value") for op in (first, second) if op.type == "Const"]
        if len(values) < 2 or values[0] != values[1]:
            where = state.hooks.made(frames_of(first)) or _line(state, first)
            raise SetupError(
                f"{where}: has other numbers each time that it is traced, which is once in a run: "
                "all steps would have the same. Random numbers are those of tf.random or "
                "keras.random, or of the data; Python's and NumPy's are fixed here."
            )


def describe_differences(state: State, one: Values, several: Values, where: str) -> Iterator[str]:
    """Yields a line for what is not the same on several devices as on one, each cause once."""
    told: set[Any] = set()
    tolerance = TOLERANCE * (30 if state.computed_in else 1)
    slopes = [a for (kind, _), (a, *_) in one.items() if kind.endswith(("gradient", "update"))]
    steepest = max((float(np.abs(a).max(initial=0)) for a in slopes), default=0.0)
    in_order = sorted(one.items(), key=lambda item: "variable" not in item[0][0])
    for (mode_kind, name), numbers in in_order:
        kind = mode_kind.rpartition("/")[2]
        floor = 1e-3 * (steepest if kind in ("gradient", "update") else 1.0)
        others = several.get((mode_kind, name), [])
        pairs = [_farthest(numbers[0], other, tolerance, floor) for other in others]
        found = next((pair for pair in pairs if pair is not None), None)
        if found is None or {kind, (kind, name)} & told:
            continue
        told |= {*OF_STEP} if kind in OF_STEP else {(kind, name)}
        yield f"{_blame(state, kind, name)} [{found[0]}, {where} {found[1]}]"


def _of_step(found: dict[str, Any], trained: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yields what a step returned, by kind and name."""
    for index, part in enumerate(tf.nest.flatten(found["output"])):
        if isinstance(part, tf.Tensor) and part.dtype != tf.string:
            yield ("output", str(index)), [part.numpy()]
    loss = found["loss"]
    for name, value in (loss if isinstance(loss, dict) else {"": loss}).items():
        yield ("loss", name), [value.numpy()]
    for kind, key in (("gradient", "gradients"), ("update", "update_gradients")):
        given = found[key]
        for objective, several in (given if isinstance(given, dict) else {"": given}).items():
            for variable, value in zip(trained[objective], several, strict=True):
                if value is not None:
                    yield (kind, variable_name(variable)), [tf.convert_to_tensor(value).numpy()]


def _of_variables(state: State, exact: bool) -> Iterator[tuple[str, str, Any]]:
    """Yields kind, name and replicas' values of integers; if exact, of all that steps assign."""
    parts = state.parts
    generators = set(map(id, state.recording.generators))
    assigned = {id(one.variable) for one in parts.written if exact}
    for name, variable in state.recording.variables.items():
        own = name.startswith(("engine/", "create_dataset/", "create_metrics/", "create_train_"))
        counts = variable.dtype.is_integer and not own and id(variable) not in generators
        if counts or id(variable) in assigned:
            local = state.strategy.experimental_local_results(variable)
            several = [variable.read_value()] if is_summed(variable) else local
            yield "variable", name, [part.numpy() for part in several]
    if exact:
        values = read_results(parts.train_metrics, state.hooks.create_train_metrics)
        for name, value in values.items():
            yield "metric", name, [np.asarray(value)]


def _farthest(one: Any, other: Any, tolerance: float, floor: float) -> tuple[str, str] | None:
    """Returns what differs most, if it differs by more than rounding."""
    if one.shape != other.shape:
        return f"shape {list(one.shape)}", f"shape {list(other.shape)}"
    one, other = np.atleast_1d(one), np.atleast_1d(other)
    if not np.issubdtype(one.dtype, np.floating):
        apart, least = (one != other).astype(float), 0.0
    else:
        apart = np.nan_to_num(np.abs(one.astype(float) - other), nan=np.inf)
        apart[np.isnan(one) & np.isnan(other)] = 0.0
        least = tolerance * max(float(np.nan_to_num(np.abs(one)).max(initial=0)), floor)
    if apart.size == 0 or apart.max() <= least:
        return None
    at = np.unravel_index(int(apart.argmax()), apart.shape)
    return f"one device {one[at]:.6g}", f"{other[at]:.6g}"


def _blame(state: State, kind: str, name: str) -> str:
    """Says which hook, layer and variable a difference is of, and what to do."""
    hooks = state.hooks
    loss_of = hooks.create_loss if hooks.grad_pre.is_default else hooks.grad_pre
    cure = "let replicas exchange what it is made of, by ctl_core.all_reduce or all_gather."
    if kind == "output":
        return f"{hooks.create_model}: the model's output differs; {cure}"
    if kind == "loss":
        return (
            f"{loss_of}: the loss{f' of {name!r}' * bool(name)}, with what layers add to it, "
            f"differs: it is no sum over the examples one by one, or is summed twice; {cure}"
        )
    if kind == "gradient":
        return f"{loss_of}: the gradient of {name} differs, though the loss does not."
    if kind == "update":
        return f"{hooks.update_pre}: the update of {name} differs, though its gradient does not."
    if kind == "variable":
        line, shown = _find_assignment(state, name)
        return f"{line}: assigns to {shown} what differs; {cure}"
    if kind == "evaluation" and name.rpartition("/")[2] == "loss":
        own = hooks.create_loss if hooks.eval_pre.is_default else hooks.eval_pre
        return f"{own}: the {name} of the evaluation differs; it is no sum over the examples."
    training = kind == "metric"
    pre = hooks.train_metric_pre if training else hooks.metric_pre
    made = hooks.create_train_metrics if training else hooks.create_metrics
    return (
        f"{pre}: the metric '{name}' of {made} differs: replicas add up its variables. Where its "
        f"state is no sum, let {pre.name} give replica 0 the rows of all, by ctl_core.all_gather, "
        "and the others none."
    )


def _find_assignment(state: State, name: str) -> tuple[str, str]:
    """Returns the line that assigns to a variable, and how it is called, with its layer."""
    variable = state.recording.variables[name]
    holders = [
        layer
        for layer in state.recording.layers
        if any(plain_variable(v) is variable for v in layer.variables)
    ]
    layer = min(holders, key=lambda one: len(one.variables), default=None)
    shown, own = name, getattr(state.train_model, "name", "")
    if layer is not None:
        path = name.partition("/")[2].removeprefix(f"{own}/")
        path = path if layer.name in path.split("/") else f"{layer.name}/{path}"
        shown = f"train_model/{path} (of the layer '{layer.name}', {type(layer).__name__})"
    graph = trace(state)[0]
    handles = {id(p.handle) for p in state.strategy.experimental_local_results(variable)}
    inner = {id(part) for outer, part in graph.captures if id(outer) in handles}
    for op in with_called(graph.get_operations()):
        if op.type.startswith("Assign") and id(op.inputs[0]) in inner:
            return _line(state, op), shown
    return str(state.hooks.create_model), shown


def _line(state: State, op: Any) -> str:
    """Returns ``callbacks.py:12``, the last line of the user's that an op was made at."""
    for filename, line in reversed(frames_of(op)):
        if is_own_file(filename):
            return f"{file_name(filename)}:{line}"
    return str(state.hooks.create_model)
