from collections.abc import Sequence
from typing import Any

from tensorflow import SparseTensor, Tensor
from tensorflow._arguments import TensorLike

def concat(
    axis: int, sp_inputs: Sequence[SparseTensor], expand_nonconcat_dims: bool = False
) -> SparseTensor: ...
def segment_sum(
    data: TensorLike,
    indices: TensorLike,
    segment_ids: TensorLike,
    num_segments: TensorLike | None = None,
) -> Tensor: ...
def slice(sp_input: SparseTensor, start: TensorLike, size: TensorLike) -> SparseTensor: ...
def to_dense(sp_input: SparseTensor) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
