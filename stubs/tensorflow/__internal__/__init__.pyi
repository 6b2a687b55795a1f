from collections.abc import Iterable
from typing import Any

from tensorflow import Graph, Tensor, Variable
from tensorflow.__internal__ import distribute as distribute

class FuncGraph(Graph):
    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    _watched_variables: Iterable[Variable]
    def __init__(self, name: str, collections: dict[str, Any] | None = None) -> None: ...
    @property
    def captures(self) -> list[tuple[Tensor, Tensor]]: ...
    @property
    def trainable_variables(self) -> tuple[Variable, ...]: ...
    @property
    def variables(self) -> tuple[Variable, ...]: ...

def __getattr__(name: str) -> Any: ...
