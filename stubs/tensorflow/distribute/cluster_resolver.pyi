from typing import Any

from tensorflow.train import ClusterSpec

class ClusterResolver:
    task_id: int | None
    task_type: str | None

class SimpleClusterResolver(ClusterResolver):
    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None: ...

def __getattr__(name: str) -> Any: ...
