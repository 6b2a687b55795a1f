"""Chooses what an exported file computes: the model with or without the hooks that run before it.

A file should contain as many hooks as possible, but its format may lack ops that they use. A format
therefore tries the functions of ``list_file_functions`` one after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from ctl_core.hooks.hooks import Hook
from ctl_core.input.batches import set_rows
from ctl_core.serving import Inference, LoadedModel, list_input_names
from ctl_core.types import Batch, BatchSpec, ModelInput, ModelOutput, Structure


class NotConvertible(Exception):
    """A file of a format cannot contain a function; the message is a phrase with the reason."""


@dataclasses.dataclass(frozen=True)
class FileFunction:
    """A function that a file may contain.

    Attributes:
        hook: the hook that the function calls before the model; None if it calls only the model
        obstacle: a phrase that says why no file can contain the function; "" if a file may
        spec: the specification of the argument
        function: computes the model's output from the argument
        select_argument: returns the argument for a batch of evaluation data
        compute_expected: computes the output of the checkpoint for a batch of evaluation data
    """

    hook: Hook | None
    obstacle: str
    spec: BatchSpec
    function: Callable[[Structure], ModelOutput]
    select_argument: Callable[[Batch], Structure]
    compute_expected: Callable[[Batch], ModelOutput]

    @property
    def contents(self) -> str:
        """What the file contains, such as ``input_pre and the model``."""
        if self.hook is None:
            return "the model"
        return f"{self.hook.name} and the model"


def describe_inputs(spec: BatchSpec) -> str:
    """Describes the inputs of a function, such as ``inputs float32 [None, 8, 8, 1]``."""
    return ", ".join(
        f"{name} {entry.dtype.name} {entry.shape}" for name, entry in list_input_names(spec).items()
    )


def list_file_functions(model: LoadedModel) -> list[FileFunction]:
    """Returns the functions that a file may contain, the one with the most hooks first."""
    inference = model.inference
    used = inference.find_used_entries()
    functions: list[FileFunction] = []
    if inference.serves_other_requests:
        functions.append(_create_request_function(model, used.spec, used.select))
    hook: Hook | None = inference.batch_hook
    if inference.batch_hook.is_default:
        hook = None
    functions.append(
        FileFunction(
            hook,
            _find_obstacle(used.spec),
            used.spec,
            used.function,
            used.select,
            model.run_batch,
        )
    )
    if hook is not None:
        functions.append(_create_model_function(model))
    return functions


def find_output_obstacle(model: LoadedModel) -> str:
    """Returns a phrase that says why no file can return the output of a model, or ""."""
    hooks = model.state.hooks
    hook = hooks.create_inference_model or hooks.create_model
    for entry in tf.nest.flatten(model.output_spec):
        if isinstance(entry, tf.RaggedTensorSpec | tf.SparseTensorSpec):
            return f"the model of {hook} returns a ragged or sparse tensor"
        if isinstance(entry, tf.TensorSpec) and entry.dtype == tf.string:
            return f"the model of {hook} returns strings"
    return ""


def _create_request_function(
    model: LoadedModel, batch_spec: BatchSpec, select: Callable[[Batch], Structure]
) -> FileFunction:
    """Returns the function that calls ``serve`` and the model.

    Args:
        model: the model, whose ``serve`` has an ``input_signature``
        batch_spec: the specification of the entries of a batch that the model's output depends on
        select: returns these entries of a batch
    """
    obstacle = _find_obstacle(model.input_spec)
    if not obstacle and not _are_requests(batch_spec, model.input_spec):
        obstacle = (
            f"it takes {describe_inputs(model.input_spec)}, which the evaluation data do not have"
        )

    def compute_expected(batch: Batch) -> ModelOutput:
        return model.function(select(batch))

    inference = model.inference
    return FileFunction(
        model.state.hooks.serve,
        obstacle,
        model.input_spec,
        inference.run_request,
        select,
        compute_expected,
    )


def _are_requests(spec: BatchSpec, request_spec: BatchSpec) -> bool:
    """Returns whether ``serve`` can be called with the entries of a batch that the model uses."""
    entries = list_input_names(spec)
    expected = list_input_names(request_spec)
    if list(entries) != list(expected):
        return False
    return all(expected[name].is_compatible_with(entry) for name, entry in entries.items())


def _create_model_function(model: LoadedModel) -> FileFunction:
    """Returns the function that calls only the model."""
    inference: Inference = model.inference
    read_batch = tf.function(inference.read_batch, autograph=False, reduce_retracing=True)
    traced = read_batch.get_concrete_function(inference.find_batch_spec())
    spec = tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs)

    def select_argument(batch: Batch) -> ModelInput:
        return read_batch(batch)

    return FileFunction(
        None,
        _find_obstacle(spec),
        tf.nest.map_structure(set_rows, spec),
        inference.run_input,
        select_argument,
        model.run_batch,
    )


def _find_obstacle(spec: BatchSpec) -> str:
    """Returns a phrase that says why a file cannot have inputs of a specification, or ""."""
    for name, entry in list_input_names(spec).items():
        if not isinstance(entry, tf.TensorSpec):
            return f"{name} is a ragged or sparse tensor"
        if entry.dtype == tf.string:
            return f"{name} are strings"
        if not entry.shape.rank:
            return f"{name} is a scalar, which has no rows"
    return ""
