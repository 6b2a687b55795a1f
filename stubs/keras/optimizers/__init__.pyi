from collections.abc import Iterable, Sequence
from typing import Any

from keras import Variable
from keras.optimizers import schedules as schedules
from tensorflow import Tensor
from tensorflow._arguments import TensorLike

class Optimizer:
    _learning_rate: Any
    built: bool
    global_clipnorm: float | None
    gradient_accumulation_steps: int | None
    learning_rate: Any
    name: str
    use_ema: bool
    @property
    def iterations(self) -> Variable: ...
    @property
    def variables(self) -> list[Variable]: ...
    def _var_key(self, variable: Any) -> Any: ...
    def apply(
        self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None
    ) -> Any: ...
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any: ...
    def build(self, variables: Sequence[Any], /) -> None: ...
    def get_config(self) -> dict[str, Any]: ...
    def load_own_variables(self, store: Any) -> None: ...
    def save_own_variables(self, store: Any) -> None: ...

class LossScaleOptimizer(Optimizer):
    inner_optimizer: Optimizer
    def scale_loss(self, loss: TensorLike) -> Tensor: ...
    def __init__(self, inner_optimizer: Optimizer, initial_scale: float = 32768.0) -> None: ...

class MultiOptimizer(Optimizer):
    _var_to_optimizer_idx: dict[Any, int]
    optimizers: list[Optimizer]
    def __init__(self, optimizer_map: Any) -> None: ...

class Nadam(Optimizer):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-07,
    ) -> None: ...

def __getattr__(name: str) -> Any: ...
