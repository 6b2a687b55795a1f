"""Types of arguments, which TensorFlow has no public names for."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from tensorflow._classes import DType, IndexedSlices, Tensor, TensorShape, Variable

class Convertible(Protocol):
    """An object that TensorFlow converts to a tensor, such as a variable of Keras."""

    def __tf_tensor__(self, dtype: DType | None = None, name: str | None = None, /) -> Tensor: ...

Scalar: TypeAlias = bool | int | float | complex | str | bytes | np.generic
TensorLike: TypeAlias = (
    Tensor
    | Variable
    | IndexedSlices
    | Convertible
    | np.ndarray[Any, Any]
    | Scalar
    | Sequence[TensorLike]
)
DTypeLike: TypeAlias = DType | str | type[Any] | np.dtype[Any]
# The sizes of dimensions in a graph can be tensors.
ShapeLike: TypeAlias = TensorShape | Tensor | Variable | int | Sequence[int | Tensor | None]
