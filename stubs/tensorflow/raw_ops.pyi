from collections.abc import Sequence
from typing import Any

from tensorflow import DType, Tensor
from tensorflow._arguments import TensorLike

def RestoreV2(
    *,
    prefix: TensorLike,
    tensor_names: TensorLike,
    shape_and_slices: TensorLike,
    dtypes: Sequence[DType],
) -> list[Tensor]: ...
def SaveV2(
    *,
    prefix: TensorLike,
    tensor_names: TensorLike,
    shape_and_slices: TensorLike,
    tensors: Sequence[TensorLike],
) -> None: ...
def SummaryWriter(*, shared_name: str = "", container: str = "") -> Tensor: ...
def __getattr__(name: str) -> Any: ...
