"""What a client sends: the part of a batch that ``input_pre`` uses, or what ``serve`` says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ctl_core.checks.returned import something
from ctl_core.hooks import Hook
from ctl_core.nested import described
from ctl_core.scratch import placeholders, scratch
from ctl_core.state import State
from ctl_core.step import model_input
from ctl_core.training_mode import inference

# Which part of a batch clients send: all of it; some of a dict, by key; or of a tuple, one, with
# its index. A dict or a tuple has such a choice for each of its own.
_ALL = "all"
_Choice = Any


@dataclasses.dataclass(frozen=True)
class RawInputs:
    """What a client sends, and what makes the model's input of it.

    Attributes:
        spec: of the raw inputs
        to_input: from raw inputs to the model's input, while a graph is traced
        of_batch: takes the raw inputs out of a batch; None if they are in none
        note: a line for the user where it is not plain what they are, or an empty text
        in_data: whether batches hold what the inference model takes, as ``input_pre`` makes it
    """

    spec: Any
    to_input: Callable[[Any], Any]
    of_batch: Callable[[Any], Any] | None
    note: str = ""
    in_data: bool = True


def raw_inputs(state: State, inference_model: Any = None) -> RawInputs:
    """Finds out what a client sends.

    Args:
        state: of the run
        inference_model: what ``create_inference_model`` returned, if there is one

    Raises:
        SetupError: ``serve`` does not say what it gets, and no part of a batch is plainly it.
    """
    hooks = state.hooks
    element = element_of(state)
    used, made = _used(state, element, lambda batch: model_input(state.context, batch, False))
    choice = _choice(element, used)
    of_batch = None if choice is None else lambda batch: _taken(choice, batch)
    if hooks.serve is not None:
        return _of_serve(state, hooks.serve, element, of_batch, _listed(used))
    by_hook = "(the hook serve has them send something else)."
    own = _own_input(inference_model)
    if own is not None and not _takes(own, made):
        said = f"takes {described(own)}, which input_pre does not return; clients send that"
        note = f"{hooks.create_inference_model}: {said} {by_hook}"
        return RawInputs(own, lambda inputs: inputs, None, note, in_data=False)
    if of_batch is None:
        said = f"uses {_listed(used)}, so that clients send the model's input itself"
        return RawInputs(made, lambda inputs: inputs, None, f"{hooks.input_pre}: {said} {by_hook}")

    def to_input(inputs: Any) -> Any:
        batch = _filled(choice, element, inputs, _count(inputs))
        return model_input(state.context, batch, training=False)

    return RawInputs(of_batch(element), to_input, of_batch)


def _of_serve(
    state: State, serve: Hook, element: Any, of_batch: Callable[[Any], Any] | None, used: str
) -> RawInputs:
    def to_input(inputs: Any) -> Any:
        return something(serve, serve.in_graph(inputs=inputs), {})

    signature = getattr(serve.function, "input_signature", None)
    if signature is not None:
        if len(signature) != 1 or serve.arguments != ("inputs",):
            raise serve.reject(
                "with an input_signature it takes one argument, inputs, which may be a dict."
            )
        return RawInputs(signature[0], to_input, None)
    if of_batch is None:
        raise serve.reject(
            f"it is not plain what a client sends, since input_pre uses {used}; make serve a "
            "tf.function with an input_signature."
        )
    whole, take = of_batch(element), of_batch
    choice = _choice(whole, _used(state, whole, to_input)[0])
    if choice is None:  # all of it
        return RawInputs(whole, to_input, of_batch)
    return RawInputs(
        _taken(choice, whole),
        lambda inputs: to_input(_filled(choice, whole, inputs, _count(inputs))),
        lambda batch: _taken(choice, take(batch)),
    )


def element_of(state: State) -> Any:
    """Returns the specification of a batch of what is evaluated, or else of what is trained on."""
    sets = list(state.evaluation.sets.values()) if state.evaluation is not None else []
    return sets[0].data.dataset.element_spec if sets else state.data.element_spec


_Path = tuple[Any, ...]


def _used(state: State, element: Any, make: Callable[[Any], Any]) -> tuple[list[_Path], Any]:
    """Finds out what ``make`` makes the model's input of, by a graph that is thrown away.

    Returns:
        The paths of the parts of a batch that it depends on, and the specification of the input.
    """
    with scratch(state.data, state.cluster.task), inference():
        batch = placeholders(element)
        made = make(batch)
        owners = {
            tensor.op.name: path
            for path, part in _leaves(batch)
            for tensor in tf.nest.flatten(part, expand_composites=True)
        }
        tensors = tf.nest.flatten(made, expand_composites=True)
        todo = [tensor.op for tensor in tensors if hasattr(tensor, "op")]
        seen: set[str] = set()
        while todo:
            op = todo.pop()
            if op.name not in seen:
                seen.add(op.name)
                todo += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        spec = tf.nest.map_structure(tf.type_spec_from_value, made)
    return list(dict.fromkeys(path for name, path in owners.items() if name in seen)), spec


def _leaves(structure: Any, path: _Path = ()) -> list[tuple[_Path, Any]]:
    """Returns the parts of a batch, each with the keys and indices that lead to it."""
    if isinstance(structure, Mapping):
        items: Any = structure.items()
    elif isinstance(structure, tuple | list):
        items = enumerate(structure)
    else:
        return [(path, structure)]
    return [leaf for key, part in items for leaf in _leaves(part, (*path, key))]


def _listed(used: list[_Path]) -> str:
    """Names parts of a batch as code does: ``batch[0] and batch[1]``."""
    names = ["batch" + "".join(f"[{key!r}]" for key in path) for path in used[:3]]
    return " and ".join(names) or "nothing of a batch"


def _choice(element: Any, used: list[_Path]) -> _Choice | None:
    """Returns what clients send: of a dict the parts that are used, of a tuple the one that is.

    None where several of a tuple are: these may be inputs and targets.
    """
    if not used:
        return None
    firsts = {path[0]: [p[1:] for p in used if p[0] == path[0]] for path in used if path}
    if isinstance(element, Mapping):
        chosen = {
            key: _ALL if isinstance(part, tuple | list) else _choice(part, firsts[key])
            for key, part in element.items()
            if key in firsts
        }
        return chosen
    if isinstance(element, tuple | list):
        if len(firsts) > 1:
            return None
        ((index, inner),) = firsts.items()
        part = element[index]
        return index, _ALL if isinstance(part, tuple | list) else _choice(part, inner)
    return _ALL


def _taken(choice: _Choice, batch: Any) -> Any:
    if choice == _ALL:
        return batch
    if isinstance(choice, dict):
        return {key: _taken(inner, batch[key]) for key, inner in choice.items()}
    index, inner = choice
    return _taken(inner, batch[index])


def _filled(choice: _Choice, element: Any, inputs: Any, count: Any) -> Any:
    """Returns a batch with the raw inputs in their places, and zeros in the others."""
    if choice == _ALL:
        return inputs
    if isinstance(choice, dict):
        return {
            key: _filled(choice[key], part, inputs[key], count)
            if key in choice
            else _zeros(part, count)
            for key, part in element.items()
        }
    index, inner = choice
    parts = [
        _filled(inner, part, inputs, count) if place == index else _zeros(part, count)
        for place, part in enumerate(element)
    ]
    return type(element)(*parts) if hasattr(element, "_fields") else type(element)(parts)


def _count(inputs: Any) -> Any:
    """Returns how many examples there are, a scalar int32 tensor."""
    for part in tf.nest.flatten(inputs):
        if isinstance(part, tf.RaggedTensor):
            return tf.cast(part.nrows(), tf.int32)
        if isinstance(part, tf.SparseTensor):
            return tf.cast(part.dense_shape[0], tf.int32)
        if part.shape.rank != 0:
            return tf.shape(part)[0]
    return tf.constant(1)


def _zeros(structure: Any, count: Any) -> Any:
    """Returns a part of a batch that nothing depends on."""

    def zeros(spec: Any) -> Any:
        if spec.shape.rank in (None, 0):
            return tf.zeros([], spec.dtype)
        shape = tf.stack([count, *(size or 1 for size in spec.shape[1:])])
        if isinstance(spec, tf.SparseTensorSpec):
            nowhere = tf.zeros([0, spec.shape.rank], tf.int64)
            return tf.SparseTensor(nowhere, tf.zeros([0], spec.dtype), tf.cast(shape, tf.int64))
        dense = tf.ensure_shape(tf.zeros(shape, spec.dtype), [None, *spec.shape[1:]])
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_tensor(
                dense, ragged_rank=spec.ragged_rank, row_splits_dtype=spec.row_splits_dtype
            )
        return dense

    return tf.nest.map_structure(zeros, structure)


def _own_input(model: Any) -> tf.TensorSpec | None:
    """Returns what a Keras model of one input takes, if it says so."""
    inputs = getattr(model, "inputs", None)
    if not isinstance(inputs, list | tuple) or len(inputs) != 1:
        return None
    return tf.TensorSpec(inputs[0].shape, inputs[0].dtype)


def _takes(own: tf.TensorSpec, made: Any) -> bool:
    """Whether a model that takes ``own`` takes what ``input_pre`` makes."""
    parts = tf.nest.flatten(made)
    if len(parts) != 1 or parts[0].shape.rank != own.shape.rank:
        return False
    return own.shape.rank is None or own.shape[1:].is_compatible_with(parts[0].shape[1:])
