"""A small engine for custom TensorFlow training: hooks, many steps inside one graph call.

The public names; each is imported on first use, so that ``--help`` need not wait for TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl_core import data as data
    from ctl_core.cluster.collectives import all_gather as all_gather
    from ctl_core.cluster.collectives import all_reduce as all_reduce
    from ctl_core.cluster.collectives import num_replicas as num_replicas
    from ctl_core.cluster.collectives import replica_id as replica_id
    from ctl_core.commands.check import check as check
    from ctl_core.hooks.defaults import deferred as deferred
    from ctl_core.hooks.defaults import leading_dimension as leading_dimension
    from ctl_core.hooks.defaults import nan_to_zero as nan_to_zero
    from ctl_core.hooks.defaults import trackable as trackable
    from ctl_core.hooks.defaults import unpack as unpack
    from ctl_core.hooks.defaults import weighted as weighted
    from ctl_core.model.state import State as State
    from ctl_core.numerics.variables import regularization as regularization
    from ctl_core.numerics.variables import trainable_variables as trainable_variables
    from ctl_core.run.console import report as report
    from ctl_core.run.console import show_step as show_step
    from ctl_core.run.errors import CtlError as CtlError
    from ctl_core.run.errors import RunError as RunError
    from ctl_core.run.errors import SetupError as SetupError
    from ctl_core.run.errors import StopTraining as StopTraining
    from ctl_core.run.listeners import Listener as Listener
    from ctl_core.run.settings import Config as Config
    from ctl_core.run.sources import load_config as load_config
    from ctl_core.serving.inference import LoadedModel as LoadedModel
    from ctl_core.serving.load import load as load
    from ctl_core.trainer import train as train

__version__ = "1.0.0"

_HOME = {
    "Config": "run.settings",
    "CtlError": "run.errors",
    "Listener": "run.listeners",
    "LoadedModel": "serving.inference",
    "RunError": "run.errors",
    "SetupError": "run.errors",
    "State": "model.state",
    "StopTraining": "run.errors",
    "all_gather": "cluster.collectives",
    "all_reduce": "cluster.collectives",
    "check": "commands.check",
    "deferred": "hooks.defaults",
    "leading_dimension": "hooks.defaults",
    "load": "serving.load",
    "load_config": "run.sources",
    "nan_to_zero": "hooks.defaults",
    "num_replicas": "cluster.collectives",
    "regularization": "numerics.variables",
    "replica_id": "cluster.collectives",
    "report": "run.console",
    "show_step": "run.console",
    "trackable": "hooks.defaults",
    "train": "trainer",
    "trainable_variables": "numerics.variables",
    "unpack": "hooks.defaults",
    "weighted": "hooks.defaults",
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
