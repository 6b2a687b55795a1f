"""A trained model with what comes before it: from what a client sends to what the model returns.

``load``, ``predict`` and ``export`` run what is made here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl_core.checks.created import create_callable
from ctl_core.errors import CtlError, HookFailed, RunError, SetupError, brief
from ctl_core.hooks import Hook, Hooks
from ctl_core.nested import any_number, described, input_names, output_names
from ctl_core.numerics.precision import to_float32
from ctl_core.raw_inputs import raw_inputs
from ctl_core.run_state.tracking import find, plain_variable
from ctl_core.state import State
from ctl_core.step import model_input
from ctl_core.training_mode import call_model, inference


@dataclasses.dataclass(frozen=True)
class Serving:
    """What a run gives to whoever uses its model.

    Attributes:
        model: the inference model
        hook: that made it
        input_spec: of the raw inputs, in their structure, with any number of examples
        output_spec: of the output, in float32 where the model computes in less
        traced: the graph function from raw inputs to the output, of that specification only
        function: the same as Python has it, to be traced for each replica
        of_batch: graph function from a batch of ``create_eval_dataset`` to the output; None where
            the model takes what no batch holds
        resources: variables and tables that have to live as long as ``traced``
        step: of the checkpoint
        note: a line for the user where it is not plain what raw inputs are, or an empty text
        hooks: of the run
    """

    model: Any
    hook: Hook
    input_spec: Any
    output_spec: Any
    traced: Any
    function: Callable[[Any], Any]
    of_batch: Any
    resources: list[Any]
    step: int
    note: str
    hooks: Hooks

    def failure(self, error: tf.errors.OpError, inputs: Any = None) -> CtlError:
        """Says in one line that the model cannot take what it was given.

        Args:
            error: what one of its ops raised
            inputs: what it was given, as ``input_spec`` has it; None where that came from a batch
        """
        if several := sizes(inputs):
            return SetupError(
                f"input: {several}; the model takes as many examples of each ({brief(error, 160)})."
            )
        return RunError(self.hooks.attribute_error(error, "the model"))


def sizes(inputs: Any) -> str:
    """Says how many examples several inputs have, where these are not as many; else nothing."""
    rows = {
        name: int(part.nrows() if isinstance(part, tf.RaggedTensor) else part.shape[0])
        for name, part in input_names(inputs).items()
        if inputs is not None and part.shape.rank
    }
    if len(set(rows.values())) < 2:
        return ""
    return " and ".join(f"{name} has {number} examples" for name, number in rows.items())


def create_serving(state: State) -> Serving:
    """Calls ``create_inference_model``, and traces the model with what comes before it.

    To be called when the checkpoint is restored: a model that the hook makes of another one's
    weights gets those that were trained.

    Raises:
        SetupError: a hook cannot work, or the model does not take what it would get.
    """
    try:
        return _create(state)
    except HookFailed as error:
        raise SetupError(str(error)) from error.__cause__


def _create(state: State) -> Serving:
    context, step = state.context, state.step
    hook, what, model = context.model_for(training=False)
    own = state.hooks.create_inference_model
    if own is not None:
        with state.strategy.scope():
            values = {"model": model, "train_model": context.train_model}
            hook, what = own, "the inference model"
            model = create_callable(own, "inference model", **values)
    raw = raw_inputs(state, model if own is not None else None)

    def called(made: Any) -> Any:
        try:
            return to_float32(call_model(model, made, training=False))
        except CtlError:
            raise
        except Exception as error:
            cure = "; the hook serve says what it gets" if own is not None else ""
            said = f"{what} from {hook.failure(error)} [input: {_shown(made)}]{cure}"
            raise HookFailed(said) from error

    def served(inputs: Any) -> Any:
        # A number: an export has no variable for it.
        with inference(), context.taking_step(tf.constant(step, tf.int64)):
            made = raw.to_input(inputs)
        return called(made)

    @tf.function(autograph=False, reduce_retracing=True)
    def of_batch(batch: Any) -> Any:
        with inference(), context.taking_step(tf.constant(step, tf.int64)):
            if state.hooks.serve is not None and raw.of_batch is not None:
                made = raw.to_input(raw.of_batch(batch))
            else:
                made = model_input(context, batch, training=False)
        return called(made)

    held = _held(state, model)
    spec = tf.nest.map_structure(any_number, raw.spec)
    traced = tf.function(served, autograph=False, input_signature=[spec]).get_concrete_function()
    if late := [path for path in _held(state, model) if path not in held]:
        raise hook.reject(
            f"{late[0]} is made when the model is first called, so that no checkpoint holds it; "
            "build it in the hook."
        )
    output = traced.structured_outputs
    for name, part in output_names(output).items():
        if not tf.is_tensor(part) and not isinstance(part, tf.TypeSpec):
            raise hook.reject(f"the model returns {part!r} as {name}, expected tensors.")
    output_spec = tf.nest.map_structure(_spec, output)
    resources = [plain_variable(one) for one in (*held.values(), *traced.graph.variables)]
    resources = list({id(one): one for one in resources}.values())
    batched = of_batch if raw.in_data else None
    return Serving(
        model,
        hook,
        spec,
        output_spec,
        traced,
        served,
        batched,
        resources,
        step,
        raw.note,
        state.hooks,
    )


def _spec(part: Any) -> Any:
    return part if isinstance(part, tf.TypeSpec) else tf.type_spec_from_value(part)


def _held(state: State, model: Any) -> dict[str, Any]:
    """Returns the variables and tables that the model, and hooks before it, reach, by path."""
    roots = {"model": model, "input_pre": state.hooks.input_pre.function}
    if state.hooks.serve is not None:
        roots["serve"] = state.hooks.serve.function
    found = find(roots)
    tables = {f"table {index}": table for index, table in enumerate(found.tables)}
    return {**found.variables, **tables}


def _shown(made: Any) -> str:
    specs = tf.nest.map_structure(tf.type_spec_from_value, made)
    return ", ".join(f"{name} {described(spec)}" for name, spec in input_names(specs).items())
