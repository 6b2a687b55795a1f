from typing import Any

from tensorflow import Tensor
from tensorflow._arguments import TensorLike

def bitwise_xor(x: TensorLike, y: TensorLike) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
