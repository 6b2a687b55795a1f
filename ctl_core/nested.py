"""Names for the parts of what a model takes and returns: ``anchor``, ``others/positive``.

They are the names of arrays in files, and of inputs and outputs in the signatures of an export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from ctl_core.errors import SetupError


def named(structure: Any, alone: str, several: str) -> dict[str, Any]:
    """Returns the parts of a structure of dicts and tuples by name.

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
    for path, part in keras.tree.flatten_with_path(structure):
        if path and isinstance(path[0], int):
            path = (f"{several}_{path[0]}", *path[1:])
        name = "/".join(map(str, path)) or alone
        if name in found:
            raise SetupError(f"{alone}: two parts would be called {name}; name one otherwise.")
        found[name] = part
    return found


def input_names(spec: Any) -> dict[str, Any]:
    """Names the parts of a model's input: ``inputs`` if it is one tensor."""
    return named(spec, "inputs", "input")


def output_names(output: Any) -> dict[str, Any]:
    """Names the parts of a model's output: ``output`` if it is one tensor."""
    return named(output, "output", "output")


def structured(structure: Any, values: Mapping[str, Any]) -> Any:
    """Returns values by name in the structure that ``input_names`` named."""
    return keras.tree.pack_sequence_as(structure, [values[name] for name in input_names(structure)])


def described(spec: Any) -> str:
    """Writes down what one part is: ``float32 [None, 8, 8, 1]``."""
    shape = "[...]" if spec.shape.rank is None else str(spec.shape.as_list())
    kind = {tf.RaggedTensorSpec: "ragged ", tf.SparseTensorSpec: "sparse "}.get(type(spec), "")
    return f"{kind}{spec.dtype.name} {shape}"
