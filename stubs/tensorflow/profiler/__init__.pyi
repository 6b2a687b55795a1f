from typing import Any

from tensorflow.profiler import experimental as experimental

def __getattr__(name: str) -> Any: ...
