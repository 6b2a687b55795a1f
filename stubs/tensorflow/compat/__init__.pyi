from typing import Any

from tensorflow.compat import v1 as v1

def __getattr__(name: str) -> Any: ...
