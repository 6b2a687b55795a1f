from typing import Any, Self

from tensorflow import DType, Graph, Tensor
from tensorflow._arguments import ShapeLike, TensorLike
from tensorflow.compat.v1 import train as train

class ConfigProto:
    graph_options: Any
    @classmethod
    def FromString(cls, s: bytes) -> Self: ...

class Event:
    @classmethod
    def FromString(cls, s: bytes) -> Self: ...
    step: int
    summary: Any

def get_default_graph() -> Graph: ...
def placeholder(dtype: DType, shape: ShapeLike | None = None) -> Tensor: ...
def placeholder_with_default(input: TensorLike, shape: ShapeLike) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
