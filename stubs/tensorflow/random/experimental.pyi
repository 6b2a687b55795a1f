from typing import Any

from tensorflow import Tensor
from tensorflow._arguments import TensorLike

def index_shuffle(index: TensorLike, seed: TensorLike, max_index: TensorLike) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
