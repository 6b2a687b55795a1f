from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])

def do_not_convert(func: _Function) -> _Function: ...
def __getattr__(name: str) -> Any: ...
