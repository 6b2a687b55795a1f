"""A run on one device beside the same on several: what differs is named.

Both take a step without training's noise, then two with it, and evaluate. Nothing has to be known
of a mistake to find it so: an output, a loss, an update, an assigned variable or a value of the
evaluation is not what it is on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.cluster.collectives import Alone
from ctl_core.compat import scratch_graph, with_called
from ctl_core.graph import StepFunctions
from ctl_core.input.batches import Share, make_placeholders
from ctl_core.model.forward import forward_backward
from ctl_core.model.metrics import read_results
from ctl_core.model.ratio import draws_numbers
from ctl_core.model.state import State
from ctl_core.numerics.replicas import ReplicaCopies, normalizes_alone
from ctl_core.numerics.variables import is_summed, plain_variable, variable_name
from ctl_core.run.errors import SetupError, frames_of

FETCHES = frozenset({"loss", "update_gradients", "output"})
OF_STEP = ("output", "loss", "update")  # the first that differs is the cause
TOLERANCE = 1e-3
_EXCHANGE = "let replicas exchange what it is made of, by ctl_core.all_reduce or all_gather"
_NO_SUM = f"it is no sum over the examples one by one, or is summed twice; {_EXCHANGE}"
_METRIC = (
    "replicas add up its variables; where its state is no sum, give replica 0 the rows of all, by "
    "ctl_core.all_gather, and the others none"
)
# Of what differs, by kind: the hooks that may have made it, of which a default is blameless where
# another follows, and what to do.
_BLAMED: dict[str, tuple[tuple[str, ...], str]] = {
    "output": (("create_model",), _EXCHANGE),
    "loss": (("grad_pre", "create_loss"), _NO_SUM),
    "update": (("update_pre", "grad_pre", "create_loss"), _EXCHANGE),
    "variable": (("create_model",), _EXCHANGE),
    "train metric": (("train_metric_pre",), _METRIC),
    "loss of an evaluation": (("eval_pre", "create_loss"), _NO_SUM),
    "metric": (("metric_pre",), _METRIC),
}

# What replicas have, by what it is, "output" say, and its name.
Values = dict[tuple[str, str], list[np.ndarray]]


def observe(state: State) -> list[Values]:
    """Takes steps and evaluates; variables and data are as before.

    Returns:
        The values of a step without noise, of two steps with it, and of the evaluation. Of steps
        that draw random numbers, or normalize each replica's batch, only integers count.
    """
    found = []
    copies = ReplicaCopies(state.strategy, list(state.recording.variables.values()))
    for quiet in (True, False):
        run = dataclasses.replace(state, parts=dataclasses.replace(state.parts, quiet=quiet))
        functions = StepFunctions(run, tf.summary.create_noop_writer())
        with copies.put_back_after():
            for _ in range(1 if quiet else 2):
                fetched = functions.take_steps(1, FETCHES)
            exact = not draws_numbers(functions.operations()) and (
                quiet or not any(map(normalizes_alone, state.recording.layers))
            )
            values = dict(_of_variables(state, exact))
            if exact:
                values |= dict(_of_step(fetched, trace(run)[1]))
                metrics = read_results(state.parts.train_metrics)
                for name, value in metrics.items():
                    values["train metric", name] = [np.asarray(value)]
            found.append(values)
        state.data.begin_anew()
    if state.evaluation is not None:
        with copies.put_back_after():
            values = {}
            for name, value in (state.evaluation.evaluate() or {}).items():
                is_loss = name.rpartition("/")[2] == "loss"
                values["loss of an evaluation" if is_loss else "metric", name] = [np.array(value)]
            found.append(values)
    return found


def trace(state: State) -> tuple[Any, dict[str, list[Any]]]:
    """Traces forward and backward pass; returns the graph, and what is trained by objective."""
    trained: dict[str, list[Any]] = {}
    with (
        state.strategy.scope(),
        scratch_graph("check").as_default() as graph,
        Alone(state.strategy, 0),
    ):
        share = Share(make_placeholders(state.data.share_spec))
        for turn in state.parts.in_turns():
            trained |= forward_backward(turn, 1, frozenset(), share)[1]
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
            where = state.hooks.find_owner(frames_of(first)) or state.hooks.create_model
            raise SetupError(
                f"{where}: has other numbers each time that it is traced, which is once in a run: "
                "all steps would have the same. Random numbers are those of tf.random or "
                "keras.random, or of the data; Python's and NumPy's are fixed here."
            )


def describe_differences(
    state: State, one: list[Values], several: list[Values], where: str
) -> Iterator[str]:
    """Yields a line for what is not the same elsewhere as on one device, each cause once."""
    told: set[Any] = set()
    tolerance = TOLERANCE * (30 if state.computed_in else 1)
    for values, theirs in zip(one, several, strict=True):
        updates = [numbers[0] for (kind, _), numbers in values.items() if kind == "update"]
        steepest = max((float(np.abs(update).max(initial=0)) for update in updates), default=0.0)
        for (kind, name), (number, *_) in values.items():
            least = TOLERANCE * (steepest if kind == "update" else 1.0)
            pairs = (
                find_farthest(number, other, tolerance, least)
                for other in theirs.get((kind, name), [])
            )
            found = next((pair for pair in pairs if pair is not None), None)
            if found is None or {kind, (kind, name)} & told:
                continue
            told |= {*OF_STEP} if kind in OF_STEP else {(kind, name)}
            yield f"{_blame(state, kind, name)} [one device {found[0]}, {where} {found[1]}]"


def _of_variables(state: State, exact: bool) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yields replicas' values of integers; if exact, of all that steps assign."""
    generators = set(map(id, state.recording.generators))
    assigned = {id(one.variable) for one in state.parts.written if exact}
    for name, variable in state.recording.variables.items():
        own = name.startswith(("engine/", "create_dataset/", "create_metrics/", "create_train_"))
        counts = variable.dtype.is_integer and not own and id(variable) not in generators
        if counts or id(variable) in assigned:
            local = state.strategy.experimental_local_results(variable)
            several = [variable.read_value()] if is_summed(variable) else local
            yield ("variable", name), [part.numpy() for part in several]


def _of_step(fetched: dict[str, Any], trained: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yields what a step returned."""
    for index, part in enumerate(tf.nest.flatten(fetched["output"])):
        if isinstance(part, tf.Tensor) and part.dtype != tf.string:
            yield ("output", str(index)), [part.numpy()]
    loss, updates = fetched["loss"], fetched["update_gradients"]
    for name, value in (loss if isinstance(loss, dict) else {"": loss}).items():
        yield ("loss", name), [value.numpy()]
    for objective, several in (updates if isinstance(updates, dict) else {"": updates}).items():
        for variable, value in zip(trained[objective], several, strict=True):
            if value is not None:
                yield ("update", variable_name(variable)), [tf.convert_to_tensor(value).numpy()]


def find_farthest(one: Any, other: Any, tolerance: float, least: float) -> tuple[Any, Any] | None:
    """Returns the numbers that differ most, or the shapes; None where it is rounding.

    Rounding is up to ``tolerance`` of the largest number in ``one``, or of ``least``.
    """
    if one.shape != other.shape:
        return one.shape, other.shape
    one, other = np.atleast_1d(one), np.atleast_1d(other)
    rounding = 0.0
    if np.issubdtype(one.dtype, np.floating):
        one, other = one.astype(float), other.astype(float)
        rounding = tolerance * max(float(np.nan_to_num(np.abs(one)).max(initial=0)), least)
    apart = ~np.isclose(one, other, rtol=0, atol=rounding, equal_nan=True)
    if not apart.any():
        return None
    far = np.where(apart, np.abs(one - other.astype(one.dtype)), -1)
    at = np.unravel_index(int(np.argmax(far)), one.shape)
    return f"{one[at]:.6g}", f"{other[at]:.6g}"


def _blame(state: State, kind: str, name: str) -> str:
    """Says which hook, layer and variable a difference is of, and what to do."""
    names, cure = _BLAMED[kind]
    several = [getattr(state.hooks, name) for name in names]
    hook = next((hook for hook in several if not hook.is_default), several[-1])
    variable = state.recording.variables.get(name)
    holders = [
        layer
        for layer in state.recording.layers
        if any(plain_variable(v) is variable for v in layer.variables)
    ]
    layer = min(holders, key=lambda one: len(one.variables), default=None)
    where = f" of the layer '{layer.name}' ({type(layer).__name__})" if layer else ""
    return f"{hook}: the {kind} {name}{where} differs: {cure}"
