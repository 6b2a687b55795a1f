from typing import Any

from tensorflow import Tensor
from tensorflow._arguments import DTypeLike, ShapeLike, TensorLike
from tensorflow.random import experimental as experimental

def stateless_uniform(
    shape: ShapeLike,
    seed: TensorLike,
    minval: TensorLike | None = 0,
    maxval: TensorLike | None = None,
    dtype: DTypeLike = ...,
    name: str | None = None,
    alg: str = "auto_select",
) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
