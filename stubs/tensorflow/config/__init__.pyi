from collections.abc import Sequence
from typing import Any, NamedTuple

from tensorflow.config import experimental as experimental
from tensorflow.config import threading as threading

class PhysicalDevice(NamedTuple):
    name: str
    device_type: str

class LogicalDevice(NamedTuple):
    name: str
    device_type: str

class LogicalDeviceConfiguration:
    def __init__(self, memory_limit: int | None = None) -> None: ...

def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]: ...
def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]: ...
def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]: ...
def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None: ...
def set_visible_devices(
    devices: Sequence[PhysicalDevice] | PhysicalDevice, device_type: str | None = None
) -> None: ...
def __getattr__(name: str) -> Any: ...
