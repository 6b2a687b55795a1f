from collections.abc import Callable
from typing import Any, TypeVar

from tensorflow.autograph import experimental as experimental

_Function = TypeVar("_Function", bound=Callable[..., object])

def to_graph(entity: _Function) -> _Function: ...
def __getattr__(name: str) -> Any: ...
