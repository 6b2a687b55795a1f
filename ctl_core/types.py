"""What the engine asks of a model, a loss and an optimizer; any object that has it will do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class Model(Protocol):
    """What ``create_model`` returns; a ``training`` argument is given where there is one."""

    def __call__(self, inputs: Any, /) -> Any:
        """Returns the output for what ``input_pre`` returned."""


class Loss(Protocol):
    """What ``create_loss`` returns."""

    def __call__(self, loss_input: Any, /) -> Any:
        """Returns one number per example, or their sum, for what ``loss_pre`` returned."""


class Optimizer(Protocol):
    """What ``create_opt`` returns; on several replicas ``build(variables)`` is called, if there."""

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], /) -> Any:
        """Updates the variables by their gradients, which are summed over the replicas."""
