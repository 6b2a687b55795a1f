from collections.abc import Callable
from typing import Any

from tensorflow.data import Dataset

def assert_cardinality(expected_cardinality: int) -> Callable[[Dataset], Dataset]: ...
def __getattr__(name: str) -> Any: ...
