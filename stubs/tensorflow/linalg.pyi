from collections.abc import Sequence
from typing import Any

from tensorflow import Tensor
from tensorflow._arguments import TensorLike

def global_norm(t_list: Sequence[TensorLike | None]) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
