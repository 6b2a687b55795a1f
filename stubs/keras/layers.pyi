from typing import Any

from keras import Layer as Layer
from keras import Variable

class _Adapted(Layer):
    def adapt(self, data: Any) -> None: ...

class _Lookup(_Adapted):
    idf_weights: Any
    output_mode: str
    def get_vocabulary(self) -> list[Any]: ...
    def set_vocabulary(self, vocabulary: Any, idf_weights: Any = None) -> None: ...
    def vocabulary_size(self) -> int: ...

class BatchNormalization(Layer):
    momentum: float
    moving_mean: Variable
    moving_variance: Variable
    synchronized: bool

class Discretization(_Adapted):
    bin_boundaries: Any

class GRU(Layer): ...
class IntegerLookup(_Lookup): ...
class LSTM(Layer): ...

class Normalization(_Adapted):
    def finalize_state(self) -> None: ...

class StringLookup(_Lookup): ...

def __getattr__(name: str) -> Any: ...
