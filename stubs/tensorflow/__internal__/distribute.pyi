from types import ModuleType
from typing import Any

interim: ModuleType

def __getattr__(name: str) -> Any: ...
