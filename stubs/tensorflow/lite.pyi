from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from tensorflow._classes import DType

class OpsSet(Enum):
    TFLITE_BUILTINS = ...

class Optimize(Enum):
    DEFAULT = ...

class TargetSpec:
    supported_ops: Iterable[OpsSet]
    supported_types: Iterable[DType]

class TFLiteConverter:
    target_spec: TargetSpec
    optimizations: Iterable[Optimize]
    representative_dataset: Callable[[], Iterable[Any]] | None
    experimental_enable_resource_variables: bool
    @staticmethod
    def from_saved_model(
        saved_model_dir: str, signature_keys: list[str] | None = None
    ) -> TFLiteConverter: ...
    def convert(self) -> bytes: ...
