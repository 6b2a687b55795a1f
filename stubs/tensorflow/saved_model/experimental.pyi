from typing import Any

from tensorflow import Tensor

class TrackableResource:
    @property
    def resource_handle(self) -> Tensor: ...

def __getattr__(name: str) -> Any: ...
