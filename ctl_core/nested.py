"""Names for the parts of what a model takes and returns: ``anchor``, ``others/positive``.

They are the names of arrays in files, and of inputs and outputs in the signatures of an export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from ctl_core.errors import SetupError, one_line


def named(structure: Any, alone: str, several: str) -> dict[str, Any]:
    """Returns the parts of a structure of dicts, tuples and lists by name.

    A part of a dict has its key, one within that ``key/inner``; part 0 of a tuple is ``several_0``,
    or ``key/0`` within a dict.

    Args:
        structure: of tensors, specifications or arrays
        alone: the name of what is no structure
        several: what the names of parts of a tuple begin with

    Raises:
        SetupError: two parts would have the same name.
    """
    found: dict[str, Any] = {}
    for name, part in _walk(structure, "", several):
        name = name or alone
        if name in found:
            raise SetupError(f"{alone}: two parts would be called {name}; name one otherwise.")
        found[name] = part
    return found


def _walk(structure: Any, name: str, several: str) -> Iterator[tuple[str, Any]]:
    """Yields names and parts in the order of ``tf.nest.flatten``."""
    inside = f"{name}/" if name else ""
    if isinstance(structure, Mapping):
        for key in sorted(structure):
            yield from _walk(structure[key], f"{inside}{key}", several)
    elif isinstance(structure, tuple | list) and not isinstance(structure, tf.TensorShape):
        keys = getattr(structure, "_fields", None) or range(len(structure))
        for key, part in zip(keys, structure, strict=True):
            own = key if inside or isinstance(key, str) else f"{several}_{key}"
            yield from _walk(part, f"{inside}{own}", several)
    else:
        yield name, structure


def input_names(spec: Any) -> dict[str, Any]:
    """Names the parts of a model's input: ``inputs`` if it is one tensor."""
    return named(spec, "inputs", "input")


def output_names(output: Any) -> dict[str, Any]:
    """Names the parts of a model's output: ``output`` if it is one tensor."""
    return named(output, "output", "output")


def structured(structure: Any, values: Mapping[str, Any]) -> Any:
    """Returns values by name in the structure that ``input_names`` named."""
    return tf.nest.pack_sequence_as(structure, [values[name] for name in input_names(structure)])


def matched(spec: Any, values: Any, what: str) -> dict[str, Any]:
    """Returns the values for the parts of a specification, by the names of ``input_names``.

    Args:
        spec: dicts, tuples and lists of specifications
        values: the same of anything, such as lists of numbers
        what: what a message begins with

    Raises:
        SetupError: they are structured otherwise.
    """
    names = list(input_names(spec))
    found: list[Any] = []

    def walk(spec: Any, value: Any) -> bool:
        if isinstance(spec, Mapping):
            same = isinstance(value, Mapping) and value.keys() == spec.keys()
            return same and all(walk(spec[key], value[key]) for key in sorted(spec))
        if isinstance(spec, tuple | list):
            same = isinstance(value, tuple | list) and len(value) == len(spec)
            return same and all(map(walk, spec, value))
        found.append(value)
        return True

    if not walk(spec, values):
        keys = f"a dict of {', '.join(map(str, values))}" if isinstance(values, Mapping) else ""
        raise SetupError(
            f"{what}: expected {', '.join(names)}, in dicts and tuples as input_spec has them, got "
            f"{one_line(keys or type(values).__name__, 100)}."
        )
    return dict(zip(names, found, strict=True))


def any_number(spec: Any, name: str | None = None) -> Any:
    """Returns a specification of any number of examples; a scalar's is as it was."""
    if spec.shape.rank in (None, 0):
        return spec if name is None else tf.TensorSpec(spec.shape, spec.dtype, name)
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype, name)


def described(spec: Any) -> str:
    """Writes down what one part is: ``float32 [None, 8, 8, 1]``."""
    shape = "[...]" if spec.shape.rank is None else str(spec.shape.as_list())
    kind = {tf.RaggedTensorSpec: "ragged ", tf.SparseTensorSpec: "sparse "}.get(type(spec), "")
    return f"{kind}{spec.dtype.name} {shape}"
