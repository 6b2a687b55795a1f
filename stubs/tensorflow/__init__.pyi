"""The names of TensorFlow that ctl_core uses, with their types.

Tests, benchmarks and scripts use more names. ``__getattr__`` makes these ``Any``: if mypy ignored
unknown attributes in tests instead, it would no longer find names that ctl_core does not have.
tests/engine/test_architecture.py finds names of ctl_core that are missing here, and compares these
stubs with the installed TensorFlow.
"""

import builtins
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

from tensorflow import __internal__ as __internal__
from tensorflow import autograph as autograph
from tensorflow import bitwise as bitwise
from tensorflow import compat as compat
from tensorflow import config as config
from tensorflow import data as data
from tensorflow import debugging as debugging
from tensorflow import distribute as distribute
from tensorflow import errors as errors
from tensorflow import io as io
from tensorflow import linalg as linalg
from tensorflow import lite as lite
from tensorflow import math as math
from tensorflow import nest as nest
from tensorflow import profiler as profiler
from tensorflow import random as random
from tensorflow import raw_ops as raw_ops
from tensorflow import saved_model as saved_model
from tensorflow import sparse as sparse
from tensorflow import strings as strings
from tensorflow import summary as summary
from tensorflow import train as train
from tensorflow import types as types
from tensorflow._arguments import DTypeLike, ShapeLike, TensorLike
from tensorflow._classes import DType as DType
from tensorflow._classes import GradientTape as GradientTape
from tensorflow._classes import Graph as Graph
from tensorflow._classes import IndexedSlices as IndexedSlices
from tensorflow._classes import Module as Module
from tensorflow._classes import Operation as Operation
from tensorflow._classes import RaggedTensor as RaggedTensor
from tensorflow._classes import RaggedTensorSpec as RaggedTensorSpec
from tensorflow._classes import SparseTensor as SparseTensor
from tensorflow._classes import SparseTensorSpec as SparseTensorSpec
from tensorflow._classes import Tensor as Tensor
from tensorflow._classes import TensorArray as TensorArray
from tensorflow._classes import TensorShape as TensorShape
from tensorflow._classes import TensorSpec as TensorSpec
from tensorflow._classes import TypeSpec as TypeSpec
from tensorflow._classes import Variable as Variable
from tensorflow._classes import VariableAggregation as VariableAggregation
from tensorflow._classes import VariableSynchronization as VariableSynchronization
from tensorflow.types.experimental import PolymorphicFunction

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_State = TypeVar("_State", bound=Sequence[Any])

__version__: str
newaxis: None

bfloat16: DType
bool: DType
float16: DType
float32: DType
float64: DType
int8: DType
int16: DType
int32: DType
int64: DType
qint8: DType
qint16: DType
qint32: DType
quint8: DType
quint16: DType
resource: DType
string: DType
uint8: DType
uint16: DType
uint32: DType
uint64: DType
variant: DType

def as_dtype(type_value: DTypeLike) -> DType: ...

# ---- Graphs ---------------------------------------------------------------------------------

@overload
def function(
    func: Callable[_P, _R],
    input_signature: Sequence[Any] | None = None,
    autograph: builtins.bool = True,
    jit_compile: builtins.bool | None = None,
    reduce_retracing: builtins.bool = False,
    *,
    experimental_attributes: dict[str, Any] | None = None,
) -> PolymorphicFunction[_P, _R]: ...
@overload
def function(
    func: None = None,
    input_signature: Sequence[Any] | None = None,
    autograph: builtins.bool = True,
    jit_compile: builtins.bool | None = None,
    reduce_retracing: builtins.bool = False,
    *,
    experimental_attributes: dict[str, Any] | None = None,
) -> Callable[[Callable[_P, _R]], PolymorphicFunction[_P, _R]]: ...
def control_dependencies(
    control_inputs: Iterable[Operation | Tensor | IndexedSlices | Variable | None],
) -> AbstractContextManager[None]: ...
def device(device_name: str | None) -> AbstractContextManager[None]: ...
def executing_eagerly() -> builtins.bool: ...

# The gradients of the sources, or None for sources that have none.
def gradients(ys: Any, xs: Any) -> list[Any]: ...
def init_scope() -> AbstractContextManager[None]: ...
def name_scope(name: str) -> AbstractContextManager[str]: ...

# None when executing eagerly.
def no_op() -> Operation | None: ...
def variable_creator_scope(
    variable_creator: Callable[..., Variable],
) -> AbstractContextManager[None]: ...
def cond(pred: TensorLike, true_fn: Callable[[], _T], false_fn: Callable[[], _T]) -> _T: ...
def while_loop(
    cond: Callable[..., TensorLike],
    body: Callable[..., Any],
    loop_vars: _State,
    *,
    parallel_iterations: int = 10,
) -> _State: ...

# ---- Tensors --------------------------------------------------------------------------------

class _Unique(NamedTuple):
    y: Tensor
    idx: Tensor

def abs(x: TensorLike) -> Tensor: ...
def add_n(inputs: Sequence[TensorLike]) -> Tensor: ...
def argsort(
    values: TensorLike, axis: int = -1, direction: str = "ASCENDING", stable: builtins.bool = False
) -> Tensor: ...
def bitcast(input: TensorLike, type: DType) -> Tensor: ...
def boolean_mask(tensor: TensorLike, mask: TensorLike) -> Tensor: ...
def cast(x: TensorLike, dtype: DTypeLike) -> Tensor: ...
def clip_by_global_norm(
    t_list: Sequence[TensorLike | None], clip_norm: TensorLike
) -> tuple[list[Any], Tensor]: ...
def clip_by_value(
    t: TensorLike, clip_value_min: TensorLike, clip_value_max: TensorLike
) -> Tensor: ...
def complex(real: TensorLike, imag: TensorLike) -> Tensor: ...
def concat(values: Sequence[TensorLike] | TensorLike, axis: TensorLike) -> Tensor: ...
def constant(value: Any, dtype: DTypeLike | None = None) -> Tensor: ...
def convert_to_tensor(
    value: TensorLike,
    dtype: DTypeLike | None = None,
    dtype_hint: DTypeLike | None = None,
    name: str | None = None,
) -> Tensor: ...
def cos(x: TensorLike) -> Tensor: ...
def ensure_shape(x: TensorLike, shape: ShapeLike) -> Tensor: ...
def equal(x: TensorLike, y: TensorLike) -> Tensor: ...
def expand_dims(input: TensorLike, axis: TensorLike) -> Tensor: ...
def fill(dims: ShapeLike, value: TensorLike) -> Tensor: ...
def gather(params: TensorLike, indices: TensorLike) -> Tensor: ...
def get_static_value(tensor: Any) -> Any: ...
def identity(input: TensorLike) -> Tensor: ...
def is_symbolic_tensor(tensor: Any) -> builtins.bool: ...
def is_tensor(x: Any) -> builtins.bool: ...
def logical_and(x: TensorLike, y: TensorLike) -> Tensor: ...
def make_ndarray(tensor: Any) -> Any: ...
def maximum(x: TensorLike, y: TensorLike) -> Tensor: ...
def minimum(x: TensorLike, y: TensorLike) -> Tensor: ...
def norm(
    tensor: TensorLike,
    ord: str | float = "euclidean",
    axis: int | Sequence[int] | None = None,
    keepdims: builtins.bool | None = None,
) -> Tensor: ...
def one_hot(
    indices: TensorLike,
    depth: TensorLike | None,
    on_value: TensorLike | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> Tensor: ...
def ones(shape: ShapeLike, dtype: DTypeLike = ...) -> Tensor: ...
def ones_like(input: TensorLike, dtype: DTypeLike | None = None) -> Tensor: ...
def pad(tensor: TensorLike, paddings: TensorLike) -> Tensor: ...
def pow(x: TensorLike, y: TensorLike) -> Tensor: ...
def range(
    start: TensorLike,
    limit: TensorLike | None = None,
    delta: TensorLike = 1,
    dtype: DTypeLike | None = None,
) -> Tensor: ...
def rank(input: TensorLike) -> Tensor: ...
def reduce_all(
    input_tensor: TensorLike | RaggedTensor,
    axis: int | Sequence[int] | None = None,
    keepdims: builtins.bool = False,
) -> Tensor: ...
def reduce_max(
    input_tensor: TensorLike | RaggedTensor,
    axis: int | Sequence[int] | None = None,
    keepdims: builtins.bool = False,
) -> Tensor: ...
def reduce_mean(
    input_tensor: TensorLike | RaggedTensor,
    axis: int | Sequence[int] | None = None,
    keepdims: builtins.bool = False,
) -> Tensor: ...
def reduce_min(
    input_tensor: TensorLike | RaggedTensor,
    axis: int | Sequence[int] | None = None,
    keepdims: builtins.bool = False,
) -> Tensor: ...
def reduce_sum(
    input_tensor: TensorLike | RaggedTensor,
    axis: int | Sequence[int] | None = None,
    keepdims: builtins.bool = False,
) -> Tensor: ...
def repeat(input: TensorLike, repeats: TensorLike, axis: int | None = None) -> Tensor: ...
def reshape(tensor: TensorLike, shape: ShapeLike) -> Tensor: ...
def round(x: TensorLike) -> Tensor: ...
def shape(input: TensorLike, out_type: DType | None = None) -> Tensor: ...
def size(input: TensorLike, out_type: DType | None = None) -> Tensor: ...
def slice(input_: TensorLike, begin: TensorLike, size: TensorLike) -> Tensor: ...
def split(
    value: TensorLike, num_or_size_splits: TensorLike, axis: TensorLike = 0
) -> list[Tensor]: ...
def stack(values: Sequence[TensorLike] | TensorLike, axis: int = 0) -> Tensor: ...
def stop_gradient(input: TensorLike) -> Tensor: ...
def tensor_scatter_nd_min(
    tensor: TensorLike, indices: TensorLike, updates: TensorLike
) -> Tensor: ...
def transpose(a: TensorLike, perm: TensorLike | None = None) -> Tensor: ...
def type_spec_from_value(value: Any) -> TypeSpec: ...
def unique(x: TensorLike) -> _Unique: ...
def unstack(value: TensorLike, num: int | None = None, axis: int = 0) -> list[Tensor]: ...
def where(condition: TensorLike, x: TensorLike, y: TensorLike) -> Tensor: ...
def zeros(shape: ShapeLike, dtype: DTypeLike = ...) -> Tensor: ...
def zeros_like(input: TensorLike, dtype: DTypeLike | None = None) -> Tensor: ...
def __getattr__(name: str) -> Any: ...
