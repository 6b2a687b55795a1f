"""A small engine for custom TensorFlow training: hooks, many steps inside one graph call.

The public names; each is imported on first use, so that ``--help`` need not wait for TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl_core import data as data
    from ctl_core.collectives import all_gather as all_gather
    from ctl_core.collectives import all_reduce as all_reduce
    from ctl_core.collectives import num_replicas as num_replicas
    from ctl_core.collectives import replica_id as replica_id
    from ctl_core.commands.check import check as check
    from ctl_core.console import report as report
    from ctl_core.console import show_step as show_step
    from ctl_core.defaults import deferred as deferred
    from ctl_core.defaults import leading_dimension as leading_dimension
    from ctl_core.defaults import nan_to_zero as nan_to_zero
    from ctl_core.defaults import trackable as trackable
    from ctl_core.defaults import unpack as unpack
    from ctl_core.defaults import weighted as weighted
    from ctl_core.errors import CtlError as CtlError
    from ctl_core.errors import RunError as RunError
    from ctl_core.errors import SetupError as SetupError
    from ctl_core.errors import StopTraining as StopTraining
    from ctl_core.model.variables import regularization as regularization
    from ctl_core.model.variables import trainable_variables as trainable_variables
    from ctl_core.run.listeners import Listener as Listener
    from ctl_core.serving.inference import LoadedModel as LoadedModel
    from ctl_core.serving.load import load as load
    from ctl_core.settings import Config as Config
    from ctl_core.settings import load_config as load_config
    from ctl_core.state import State as State
    from ctl_core.trainer import train as train

__version__ = "1.0.0"

_HOME = {
    "Config": "settings",
    "CtlError": "errors",
    "Listener": "run.listeners",
    "LoadedModel": "serving.inference",
    "RunError": "errors",
    "SetupError": "errors",
    "State": "state",
    "StopTraining": "errors",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "check": "commands.check",
    "deferred": "defaults",
    "leading_dimension": "defaults",
    "load": "serving.load",
    "load_config": "settings",
    "nan_to_zero": "defaults",
    "num_replicas": "collectives",
    "regularization": "model.variables",
    "replica_id": "collectives",
    "report": "console",
    "show_step": "console",
    "trackable": "defaults",
    "train": "trainer",
    "trainable_variables": "model.variables",
    "unpack": "defaults",
    "weighted": "defaults",
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
