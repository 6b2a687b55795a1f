from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import TracebackType
from typing import Any

from tensorflow import Tensor, Variable
from tensorflow._arguments import TensorLike
from tensorflow.data import Dataset
from tensorflow.distribute import cluster_resolver as cluster_resolver
from tensorflow.distribute import experimental as experimental

class ReduceOp(Enum):
    MEAN = ...
    SUM = ...

class DistributedValues: ...
class CrossDeviceOps: ...

class ReductionToOneDevice(CrossDeviceOps):
    def __init__(self, reduce_to_device: str | None = None) -> None: ...

class InputContext:
    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ) -> None: ...

class StrategyExtended:
    _cross_device_ops: Any
    @property
    def worker_devices(self) -> tuple[str, ...]: ...
    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any: ...
    def variable_created_in_scope(self, v: Variable) -> bool: ...

class Strategy:
    """Values with a component for each replica are ``Any``: with one replica they are tensors."""

    @property
    def cluster_resolver(self) -> cluster_resolver.ClusterResolver | None: ...
    @property
    def extended(self) -> StrategyExtended: ...
    @property
    def num_replicas_in_sync(self) -> int: ...
    def experimental_distribute_dataset(self, dataset: Dataset) -> Any: ...
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[Any], Any]
    ) -> Any: ...
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]: ...
    def gather(self, value: Any, axis: int) -> Tensor: ...
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None) -> Any: ...
    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any: ...
    def scope(self) -> AbstractContextManager[Strategy]: ...

class MirroredStrategy(Strategy):
    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None: ...

class MultiWorkerMirroredStrategy(Strategy):
    def __init__(
        self,
        cluster_resolver: cluster_resolver.ClusterResolver | None = None,
        communication_options: experimental.CommunicationOptions | None = None,
    ) -> None: ...

class OneDeviceStrategy(Strategy):
    def __init__(self, device: str) -> None: ...

class ReplicaContext:
    def __init__(self, strategy: Strategy, replica_id_in_sync_group: TensorLike) -> None: ...
    @property
    def devices(self) -> tuple[str, ...]: ...
    @property
    def num_replicas_in_sync(self) -> int: ...
    @property
    def replica_id_in_sync_group(self) -> int | Tensor: ...
    @property
    def strategy(self) -> Strategy: ...
    _replica_id: int
    _summary_recording_distribution_strategy: Any
    def __enter__(self) -> None: ...
    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def all_gather(
        self, value: Any, axis: int, options: experimental.CommunicationOptions | None = None
    ) -> Any: ...
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: experimental.CommunicationOptions | None = None,
    ) -> Any: ...
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any: ...

# None in a cross-replica context. Most callers know that they are in a replica context.
def get_replica_context() -> ReplicaContext | Any: ...
def get_strategy() -> Strategy: ...
def has_strategy() -> bool: ...
def __getattr__(name: str) -> Any: ...
