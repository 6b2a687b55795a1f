"""What the graph of a step shows before it runs: what cannot be trained, what may be a slip."""

from __future__ import annotations

import re
from typing import Any

from ctl_core.checks.writes import check_writes
from ctl_core.console import Console
from ctl_core.errors import HookFailed, SetupError
from ctl_core.evaluate import trace_evaluation
from ctl_core.graph import StepFunctions
from ctl_core.numerics.randomness import random_ops
from ctl_core.run_state.remainder import check_variables_of_step
from ctl_core.run_state.tracking import plain_variable, variable_name, written_variables
from ctl_core.state import State


def check_step(state: State, functions: StepFunctions, console: Console) -> None:
    """Traces a step and the evaluation before training starts, and warns of what shows.

    Raises:
        SetupError: a hook raised, or returned something else than it should; or the step uses a
            variable that no checkpoint would hold.
    """
    for warning in check_writes(state.writes, state.context, state.found, state.strategy):
        console.warn(warning)
    try:
        graph = functions.graph(None).graph
        if state.evaluation is not None:
            variables = list(state.found.variables.values())
            trace_evaluation(state.evaluation, state.strategy, variables)
    except HookFailed as error:
        raise SetupError(str(error)) from error.__cause__
    except Exception as error:
        if made := re.search(r"Unable to lift tensor <tf.Tensor '([^']*)/Init", str(error)):
            name = made.group(1).split(":")[0].split("/replica_")[0]
            raise SetupError(
                f"a hook makes the variable {name} inside the step; make it in create_model. "
                "keras.random functions take one of the model's as seed."
            ) from error
        raise
    if names := state.context.without_gradient:
        console.warn(
            f"the loss does not depend on {', '.join(names[:5])}"
            f"{' and others' if len(names) > 5 else ''}: not updated."
        )
    for warning in _unused(state, graph):
        console.warn(warning)
    if found := random_ops(graph):
        console.warn(
            f"a hook or the model draws random numbers with {', '.join(found)}, whose state no "
            "checkpoint can hold: a resumed run will draw others. Use a "
            "keras.random.SeedGenerator of the model, or tf.random.stateless_*."
        )
    check_variables_of_step(state, graph)


def _unused(state: State, graph: Any) -> list[str]:
    """Warns of a rate that reaches nobody, and of variables that nobody trains."""
    results = state.strategy.experimental_local_results
    used = set(map(id, graph.variables))
    written, _ = written_variables(state.strategy, state.found.variables.values(), graph)
    changed = set(map(id, written))
    trained = {id(plain_variable(v)) for several in state.context.trained.values() for v in several}
    of_layers = set(map(id, state.found.keras_variables()))
    free = {id(v) for layer in state.found.layers for v in layer.trainable_variables}
    idle = []
    for path, variable in state.found.variables.items():
        plain = plain_variable(variable)
        trainable = id(variable) in free or id(variable) not in of_layers
        if (
            trainable
            and getattr(variable, "trainable", False)
            and plain.dtype.is_floating
            and id(plain) not in trained
            and variable_name(variable) not in state.context.without_gradient
            and any(id(part) in used for part in results(plain))
            and id(plain) not in changed
        ):
            idle.append(path)
    warnings = []
    if idle:
        more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
        warnings.append(
            f"the step uses {', '.join(idle[:3])}{more}, trainable but trained by no objective; "
            "return them with the trainable_vars of grad_pre, or make them with trainable=False."
        )
    if not any(id(part) in used for part in results(state.lr.variable)):
        warnings.append(
            f"{state.hooks.create_opt}: makes no use of lr, so that learning_rate and lr.assign "
            "change nothing; pass lr to the optimizer if they should."
        )
    return warnings
