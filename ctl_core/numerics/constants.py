"""Separates the tensors of a model's output from None, Python numbers and other constants.

A graph returns only tensors. The constants of an output are the same in every step, so they are
stored next to the graph.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.types import AnyTensor, ModelOutput, Structure, UserObject

# Marks the place of a tensor in ``Form.structure``.
_TENSOR = object()


def is_constant(value: UserObject) -> bool:
    """Returns whether an entry of an output is None, a Python number, a string or a NumPy array."""
    kinds = (numbers.Number, str, bytes, np.ndarray, np.generic, tf.DType, tf.TensorShape)
    return value is None or isinstance(value, kinds)


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """The structure of an output, with its constants; each form is equal only to itself.

    Attributes:
        structure: the output, in which ``_TENSOR`` replaces each tensor
    """

    structure: Structure


@dataclasses.dataclass
class SplitOutput:
    """An output with constants.

    For ``tf.nest`` and for graphs, it is a container of its tensors only.

    Attributes:
        tensors: the tensors of the output, in the order of ``tf.nest.flatten``
        form: the structure of the output, with its constants
    """

    tensors: list[AnyTensor]
    form: Form

    def __tf_flatten__(self) -> tuple[tuple[Form], tuple[AnyTensor, ...]]:
        """Returns the metadata and the components, as ``tf.nest`` requires."""
        return (self.form,), tuple(self.tensors)

    @classmethod
    def __tf_unflatten__(
        cls, metadata: tuple[Form], components: tuple[AnyTensor, ...]
    ) -> SplitOutput:
        """Returns the object with other components."""
        return cls(list(components), *metadata)


def split_constants(output: ModelOutput) -> Structure:
    """Returns an output in a form that graphs can return; without constants, the output itself."""
    leaves = tf.nest.flatten(output)
    if not any(map(is_constant, leaves)):
        return output
    tensors = [leaf for leaf in leaves if not is_constant(leaf)]
    marked = [leaf if is_constant(leaf) else _TENSOR for leaf in leaves]
    return SplitOutput(tensors, Form(tf.nest.pack_sequence_as(output, marked)))


def restore_constants(output: Structure) -> ModelOutput:
    """Returns an output as the model returned it, given the result of ``split_constants``."""
    if not isinstance(output, SplitOutput):
        return output
    structure = output.form.structure
    tensors = iter(output.tensors)
    leaves: list[Any] = [
        next(tensors) if leaf is _TENSOR else leaf for leaf in tf.nest.flatten(structure)
    ]
    return tf.nest.pack_sequence_as(structure, leaves)
