"""The model of a checkpoint as a function: from what a client sends to what the model returns.

``load``, ``predict`` and ``export`` run what is made here. What a client sends is what the hook
``serve`` takes; where no input_signature says what that is, and without the hook, it is the part of
a batch that the output depends on: a label is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.compat import layers_run
from ctl_core.input.batches import with_rows
from ctl_core.model.forward import call_made, call_model
from ctl_core.model.parts import Parts
from ctl_core.model.state import State
from ctl_core.numerics.precision import to_float32
from ctl_core.run.errors import HookFailed, RunError, SetupError, brief
from ctl_core.run.settings import Config


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel:
    """The model of a checkpoint, with what comes before it; several threads may call it at once.

    Attributes:
        model: what ``create_inference_model`` returned, or the model that is evaluated
        input_spec: what it is called with, in its structure; the first dimension, None, is the
            number of examples
        output_spec: what it returns, in float32 where the model computes in less
        step: of the checkpoint
        metrics: what the evaluation before the checkpoint found, by name, or {}
        settings: of the run
        function: the graph function from what a client sends to the output
        run_batch: the graph function from a batch of ``create_eval_dataset`` to the output
        parts: what the functions capture lives in these
    """

    model: Any
    input_spec: Any
    output_spec: Any
    step: int
    metrics: dict[str, float]
    settings: Config
    function: Any
    run_batch: Any
    parts: Parts

    def __call__(self, inputs: Any) -> Any:
        """Returns the model's output for raw inputs, any number of examples.

        Args:
            inputs: arrays, lists or tensors as ``input_spec`` has them: what a client sends, before
                ``serve``, or without that hook before ``input_pre``

        Returns:
            Eager tensors as ``output_spec`` has them.

        Raises:
            SetupError: the inputs are not as ``input_spec`` has them.
            RunError: the model cannot take these values.
        """
        spec = self.input_spec
        try:
            return self.function(
                keras.tree.map_structure_up_to(spec, _convert_to_tensor, spec, inputs)
            )
        except (TypeError, ValueError) as error:
            expected = self._describe_inputs()
            raise SetupError(f"input: expected {expected}: {brief(error)}") from error
        except tf.errors.OpError as error:
            raise RunError(self.parts.hooks.attribute_error(error, "the model")) from error

    def __repr__(self) -> str:
        """One line, as a notebook shows what a cell ends with."""
        inputs = self._describe_inputs()
        return f"LoadedModel({self.settings.run_name}, step={self.step}, inputs=({inputs}))"

    def _describe_inputs(self) -> str:
        parts = input_names(self.input_spec).items()
        return ", ".join(f"{name} {part.dtype.name} {part.shape}" for name, part in parts)


def _convert_to_tensor(spec: Any, value: Any) -> Any:
    """Returns an array, or what is one in lists, as a tensor.

    Raises:
        TypeError, ValueError: it cannot be one of this type.
    """
    if tf.is_tensor(value):
        return value
    if isinstance(spec, tf.RaggedTensorSpec):
        ragged = tf.ragged.constant(value, spec.dtype, ragged_rank=spec.ragged_rank)
        return ragged.with_row_splits_dtype(spec.row_splits_dtype)
    tensor = tf.convert_to_tensor(value, spec.dtype)
    if spec.dtype.is_integer and not np.array_equal(tensor, value):  # TensorFlow cuts them off
        raise ValueError(f"numbers that {spec.dtype.name} cannot hold")
    return tensor


def input_names(spec: Any) -> dict[str, Any]:
    """Returns the parts of a model's input by their names in files and in signatures.

    A part of a dict has its key, one within that ``key/inner``, the first of a tuple ``input_0``;
    what is no structure is ``inputs``.
    """
    return _name_parts(spec, "inputs", "input_")


def output_names(output: Any) -> dict[str, Any]:
    """Returns the parts of a model's output likewise: ``output``, or ``output_0``."""
    return _name_parts(output, "output", "output_")


def _name_parts(structure: Any, alone: str, numbered: str) -> dict[str, Any]:
    found = {}
    for path, part in keras.tree.flatten_with_path(structure):
        prefix = numbered if path and isinstance(path[0], int) else ""
        found[prefix + "/".join(map(str, path)) or alone] = part
    return found


def pack_inputs(spec: Any, values: Mapping[str, Any]) -> Any:
    """Returns values by the names of ``input_names`` in the structure of a specification."""
    return keras.tree.pack_sequence_as(spec, [values[name] for name in input_names(spec)])


def create_inference(state: State) -> LoadedModel:
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


def _create(state: State) -> LoadedModel:
    hooks = state.hooks
    step = tf.constant(state.step, tf.int64)  # an export has no variable for it
    parts = dataclasses.replace(state.parts, step=step)
    hook, model = parts.model_for(training=False)
    if hooks.create_inference_model is not None:
        hook = hooks.create_inference_model
        with state.strategy.scope():
            values = {"model": model, "train_model": parts.train_model}
            model = hook(**values)

    def read_batch(batch: Any) -> Any:
        return hooks.input_pre.in_graph(batch=batch, training=False, **parts.values())

    def serve(inputs: Any) -> Any:
        assert hooks.serve is not None
        return hooks.serve.in_graph(inputs=inputs)

    def serve_batch(batch: Any) -> Any:
        return serve(batch[0] if isinstance(batch, tuple) else batch)

    def run(to_input: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns the function that runs the model on what another one makes for it."""

        def run_made(given: Any) -> Any:
            with layers_run(training=False):
                made = to_input(given)
                return to_float32(call_made(hook, call_model, model, made, False))

        return run_made

    before = set(state.recording.variables)
    signature = getattr(hooks.serve and hooks.serve.function, "input_signature", None)
    of_batch = read_batch if signature or hooks.serve is None else serve_batch
    to_input: Callable[[Any], Any] = serve
    if not signature:
        part, fill = find_used_part(run(of_batch), _element_spec(state))
        signature, to_input = [part], lambda sent: of_batch(fill(sent))
    spec = tf.nest.map_structure(with_rows, signature[0])
    function = tf.function(run(to_input), autograph=False, input_signature=[spec])
    traced = function.get_concrete_function()
    if late := [name for name in state.recording.variables if name not in before]:
        raise hook.reject(
            f"{late[0]} is made when the model is first called, so that no checkpoint holds it; "
            "build it in the hook."
        )
    return LoadedModel(
        model=model,
        input_spec=spec,
        output_spec=tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs),
        step=state.step,
        metrics=dict(state.metrics),
        settings=state.config,
        function=traced,
        run_batch=tf.function(run(of_batch), autograph=False, reduce_retracing=True),
        parts=parts,
    )


def _element_spec(state: State) -> Any:
    """Returns the specification of a batch of what is evaluated, or else of what is trained on."""
    sets = list(state.evaluation.sets.values()) if state.evaluation is not None else []
    element = sets[0].make().element_spec if sets else state.data.share_spec
    return tf.nest.map_structure(with_rows, element)


def find_used_part(
    function: Callable[[Any], Any], element: Any
) -> tuple[Any, Callable[[Any], Any]]:
    """Finds the part of a batch that the output of a function depends on.

    Of a dict these are some keys, of a tuple some parts, or the only one by itself.

    Returns:
        The specification of the part, and what puts it back into a batch, beside stand-ins.
    """
    leaves = tf.nest.flatten(element)
    used = _find_used(function, element)
    kept = [leaf if is_used else None for leaf, is_used in zip(leaves, used, strict=True)]

    def fill(part: Any) -> Any:
        given = tf.nest.flatten(part)
        rows = [tf.cast(tf.shape(one)[0], tf.int32) for one in given if one.shape.rank != 0]
        sent = iter(given)

        def stand_in(spec: Any) -> Any:
            sizes = [size or 1 for size in spec.shape] if spec.shape.rank else []
            if sizes and spec.shape[0] is None and rows:
                sizes[0] = rows[0]
            return tf.compat.v1.placeholder_with_default(tf.zeros(sizes, spec.dtype), spec.shape)

        filled = [
            next(sent) if is_used else tf.nest.map_structure(stand_in, leaf, expand_composites=True)
            for leaf, is_used in zip(leaves, used, strict=True)
        ]
        return tf.nest.pack_sequence_as(element, filled)

    return _without_nones(tf.nest.pack_sequence_as(element, kept)), fill


def _find_used(function: Callable[[Any], Any], element: Any) -> list[bool]:
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
