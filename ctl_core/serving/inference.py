"""The inference function: from what a client sends to what the model returns.

``load``, ``predict`` and ``export`` run what is made here. What a client sends is what the hook
``serve`` takes; where no input_signature says what that is, and without the hook, it is the part of
a batch that the model's graph uses: a label is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ctl_core.errors import CtlError, HookFailed, RunError, SetupError
from ctl_core.forward import make_model_input, run_model
from ctl_core.hooks import Hook
from ctl_core.model.parts import Moment, Parts
from ctl_core.nested import any_number, described, input_names, output_names
from ctl_core.numerics.precision import to_float32
from ctl_core.state import State
from ctl_core.training_mode import call_model, inference


@dataclasses.dataclass(frozen=True)
class Inference:
    """What a run gives to whoever uses its model.

    Attributes:
        model: the inference model
        hook: that made it
        input_spec: of what a client sends, in its structure, with any number of examples
        output_spec: of the output, in float32 where the model computes in less
        run: the graph function from what a client sends to the output
        run_batch: the graph function from a batch of ``create_eval_dataset`` to the output
        step: of the checkpoint
        parts: what ``run`` captures lives in these
    """

    model: Any
    hook: Hook
    input_spec: Any
    output_spec: Any
    run: Any
    run_batch: Any
    step: int
    parts: Parts

    def describe_failure(self, error: tf.errors.OpError) -> RunError:
        """Says in one line that the model cannot take what it was given."""
        return RunError(self.parts.hooks.attribute_error(error, "the model"))


def create_inference(state: State) -> Inference:
    """Calls ``create_inference_model``, and traces the model with what comes before it.

    To be called when the checkpoint is restored: a model that the hook makes of another one's
    weights gets those that were trained.

    Raises:
        SetupError: a hook cannot work, or the model does not take what it would get.
    """
    try:
        with state.recording.during("create_inference_model"):
            return _create(state)
    except HookFailed as error:
        raise SetupError(str(error)) from error.__cause__


def _create(state: State) -> Inference:
    hooks, parts, step = state.hooks, state.parts, state.step
    hook, what, model = parts.model_for(training=False)
    if (own := hooks.create_inference_model) is not None:
        with state.strategy.scope():
            values = {"model": model, "train_model": parts.train_model}
            hook, what = own, "the inference model"
            model = own(**values)

    def moment() -> Moment:  # a number: an export has no variable for it
        return Moment(tf.constant(step, tf.int64))

    def make_input(batch: Any) -> Any:
        with inference():
            return make_model_input(parts, moment(), batch, training=False)

    def serve(inputs: Any) -> Any:
        assert hooks.serve is not None
        with inference():
            return hooks.serve.in_graph(inputs=inputs)

    def run(made: Any) -> Any:
        try:
            return to_float32(call_model(model, made, training=False))
        except CtlError:
            raise
        except Exception as error:
            specs = tf.nest.map_structure(tf.type_spec_from_value, made)
            shown = ", ".join(f"{name} {described(s)}" for name, s in input_names(specs).items())
            cure = "; the hook serve says what it gets" if own is not None else ""
            said = f"{what} from {hook.failure(error)} [input: {shown}]{cure}"
            raise HookFailed(said) from error

    def run_model_itself(batch: Any) -> Any:
        with inference():
            return run_model(parts, moment(), batch, training=False)

    before = set(state.recording.variables)
    to_input: Callable[[Any], Any]
    if (spec := _read_signature(hooks.serve)) is not None:
        to_input, of_batch = serve, make_input
    elif hooks.serve is not None:
        part = UsedPart(run_model_itself, _element_spec(state))
        sent_part = UsedPart(lambda sent: run(serve(sent)), part.spec)  # serve may use less of it
        spec, to_input = sent_part.spec, lambda sent: serve(sent_part.fill(sent))
        of_batch = lambda batch: serve(part.take(batch))  # noqa: E731
    else:
        part = UsedPart(lambda batch: run(make_input(batch)), _element_spec(state))
        spec, to_input, of_batch = part.spec, lambda sent: make_input(part.fill(sent)), make_input
    spec = tf.nest.map_structure(any_number, spec)
    traced = tf.function(
        lambda inputs: run(to_input(inputs)), autograph=False, input_signature=[spec]
    ).get_concrete_function()
    if late := [name for name in state.recording.variables if name not in before]:
        raise hook.reject(
            f"{late[0]} is made when the model is first called, so that no checkpoint holds it; "
            "build it in the hook."
        )
    output = traced.structured_outputs
    for name, value in output_names(output).items():
        if not tf.is_tensor(value) and not isinstance(value, tf.TypeSpec):
            raise hook.reject(f"the model returns {value!r} as {name}, expected tensors.")
    output_spec = tf.nest.map_structure(_spec_of, output)
    batched = tf.function(
        lambda batch: run(of_batch(batch)), autograph=False, reduce_retracing=True
    )
    return Inference(model, hook, spec, output_spec, traced, batched, step, parts)


def _read_signature(serve: Hook | None) -> Any:
    """Returns what ``serve`` says that it takes; None if it does not say so."""
    signature = getattr(serve.function, "input_signature", None) if serve else None
    if signature is None:
        return None
    assert serve is not None
    if len(signature) != 1 or serve.arguments != ("inputs",):
        raise serve.reject(
            "with an input_signature it takes one argument, inputs, which may be a dict."
        )
    return signature[0]


def _element_spec(state: State) -> Any:
    """Returns the specification of a batch of what is evaluated, or else of what is trained on."""
    sets = list(state.evaluation.sets.values()) if state.evaluation is not None else []
    element = sets[0].make().element_spec if sets else state.data.share_spec
    return tf.nest.map_structure(any_number, element)


def _spec_of(part: Any) -> Any:
    return part if isinstance(part, tf.TypeSpec) else tf.type_spec_from_value(part)


class UsedPart:
    """The part of a batch that a graph uses.

    Of a dict these are some keys, of a tuple some parts, or the only one by itself.

    Attributes:
        spec: of it
    """

    def __init__(self, function: Callable[[Any], Any], element: Any) -> None:
        """Finds it out by a graph of ``function`` that is thrown away."""
        self._element = element
        self._used = find_used(function, element)
        self.spec = self.take(element)

    def take(self, batch: Any) -> Any:
        """Returns the part of a batch."""
        leaves = zip(tf.nest.flatten(batch), self._used, strict=True)
        kept = [leaf if used else None for leaf, used in leaves]
        return _without_nones(tf.nest.pack_sequence_as(self._element, kept))

    def fill(self, inputs: Any) -> Any:
        """Returns a batch with the part in its place; nothing depends on the others."""
        given = tf.nest.flatten(inputs)
        rows = [tf.cast(tf.shape(part)[0], tf.int32) for part in given if part.shape.rank != 0]
        sent = iter(given)

        def stand_in(spec: Any) -> Any:
            sizes = [size or 1 for size in spec.shape] if spec.shape.rank else []
            if sizes and spec.shape[0] is None and rows:
                sizes[0] = rows[0]
            return tf.compat.v1.placeholder_with_default(tf.zeros(sizes, spec.dtype), spec.shape)

        leaves = [
            next(sent) if used else tf.nest.map_structure(stand_in, spec, expand_composites=True)
            for spec, used in zip(tf.nest.flatten(self._element), self._used, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._element, leaves)


def find_used(function: Callable[[Any], Any], element: Any) -> list[bool]:
    """Returns which parts of a batch the output of a function depends on; all, if on none."""
    names: list[set[str]] = []

    def note(batch: Any) -> Any:
        names[:] = [
            {tensor.op.name for tensor in tf.nest.flatten(part, expand_composites=True)}
            for part in tf.nest.flatten(batch)
        ]
        return function(batch)

    traced = tf.function(note, autograph=False, input_signature=[element])
    outputs = traced.get_concrete_function().graph.outputs
    # Not what an output waits for: TensorFlow has it wait for all assertions.
    waiting = [tensor.op for output in outputs for tensor in output.op.inputs]
    seen: set[str] = set()
    while waiting:
        op = waiting.pop()
        if op.name not in seen:
            seen.add(op.name)
            waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    used = [bool(of_part & seen) for of_part in names]
    return used if any(used) else [True] * len(used)


def _without_nones(structure: Any) -> Any:
    if isinstance(structure, Mapping):
        parts = {key: _without_nones(part) for key, part in structure.items()}
        return {key: part for key, part in parts.items() if part is not None} or None
    if isinstance(structure, tuple | list):
        several = [part for part in map(_without_nones, structure) if part is not None]
        return several[0] if len(several) == 1 else tuple(several) or None
    return structure
