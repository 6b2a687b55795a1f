"""Types that recur throughout the engine.

TensorFlow has no type annotations, so without stubs of TensorFlow, a type checker treats most of
these types as ``Any``. Their names tell a reader the meaning of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import keras
import tensorflow as tf

AnyTensor: TypeAlias = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
AnyTensorSpec: TypeAlias = tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec

# A tensor, or tensors in nested tuples, lists and dicts, as tf.nest supports them.
Structure: TypeAlias = Any

# The structure of a batch. Each dense tensor has one row per example, or is a scalar.
Batch: TypeAlias = Structure

# The structure of a model's input or output.
ModelInput: TypeAlias = Structure
ModelOutput: TypeAlias = Structure

# The structure of tf.TypeSpecs that describes a batch.
BatchSpec: TypeAlias = Any

# A value with one component for each replica of this process, as ``strategy.run`` returns it. On a
# single replica, it is the value itself.
PerReplica: TypeAlias = Any

# A number of rows, examples or steps: an int if it is static, otherwise a scalar int tensor.
Count: TypeAlias = int | tf.Tensor

Variable: TypeAlias = tf.Variable | keras.Variable

# An object whose variables a ``tf.train.Checkpoint`` can save.
Trackable: TypeAlias = Any

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
Gradients: TypeAlias = list[Gradient]

# The gradients or variables of a step by the name of the objective.
GradientsByObjective: TypeAlias = dict[str, Gradients]
VariablesByObjective: TypeAlias = dict[str, list[Variable]]

# A function that ``tf.function`` returned.
GraphFunction: TypeAlias = tf.types.experimental.PolymorphicFunction

# A value from the user's code, which can be anything.
UserObject: TypeAlias = Any

# The results of ``create_model`` and ``create_loss``: a Keras model, or any other callable.
Model: TypeAlias = Callable[..., ModelOutput]
Loss: TypeAlias = Callable[..., tf.Tensor]

# A module, a dict or any object that has the hooks as attributes.
Callbacks: TypeAlias = Any


class Optimizer(Protocol):
    """A Keras optimizer, or any object that applies gradients in the same way."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Updates variables, given pairs of a gradient and a variable."""
