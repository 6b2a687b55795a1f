"""The new core while it grows: what is here goes before what it borrows from the engine beside it.

A module that is not here is that of the engine in the repository's root, see ``__path__``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__path__.append(str(Path(__file__).resolve().parents[2] / "ctl_core"))
__version__ = "0.5.0"
SHARES_EVENLY = False  # any global batch over any number of replicas

_HOME = {
    "Config": "settings",
    "CtlError": "errors",
    "Listener": "listeners",
    "LoadedModel": "serving.load",
    "RunError": "errors",
    "SetupError": "errors",
    "State": "state",
    "StopTraining": "errors",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "check": "rehearsal",
    "deferred": "helpers",
    "leading_dimension": "helpers",
    "load": "serving.load",
    "load_config": "layers",
    "nan_to_zero": "helpers",
    "num_replicas": "collectives",
    "regularization": "model.variables",
    "replica_id": "collectives",
    "report": "console",
    "show_step": "console",
    "trackable": "helpers",
    "train": "trainer",
    "trainable_variables": "model.variables",
    "unpack": "helpers",
    "weighted": "helpers",
}
__all__ = [*_HOME, "__version__", "data"]


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module("ctl_core.data")
    if name in _HOME:
        return getattr(importlib.import_module(f"ctl_core.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ctl_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
