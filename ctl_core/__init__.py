"""A small engine for custom TensorFlow training: hooks, and many steps inside one graph call.

Public names are imported on first use, so that ``--help`` does not have to wait for TensorFlow.
"""

# ruff: noqa: F401
# mypy: implicit-reexport
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl_core import data
    from ctl_core.cluster.collectives import (
        all_gather,
        all_reduce,
        num_replicas,
        replica_id,
        row_offset,
    )
    from ctl_core.commands.check import check
    from ctl_core.commands.train import train
    from ctl_core.hooks.defaults import (
        clip_by_global_norm,
        deferred,
        leading_dimension,
        nan_to_zero,
        unpack,
        weighted,
    )
    from ctl_core.hooks.results import Checkpointing, EvalLoss, Objective, Update
    from ctl_core.model.state import State
    from ctl_core.numerics.variables import regularization, trainable_variables
    from ctl_core.run.console import report, show_step
    from ctl_core.run.errors import CtlError, RunError, SetupError, StopTraining
    from ctl_core.run.layers import load_config
    from ctl_core.run.listeners import Listener
    from ctl_core.run.settings import Config
    from ctl_core.serving import LoadedModel, load

__version__ = "2.0.0"

# The module that defines each public name.
_HOME = {
    "Checkpointing": "hooks.results",
    "Config": "run.settings",
    "CtlError": "run.errors",
    "EvalLoss": "hooks.results",
    "Listener": "run.listeners",
    "LoadedModel": "serving",
    "Objective": "hooks.results",
    "RunError": "run.errors",
    "SetupError": "run.errors",
    "State": "model.state",
    "StopTraining": "run.errors",
    "Update": "hooks.results",
    "all_gather": "cluster.collectives",
    "all_reduce": "cluster.collectives",
    "check": "commands.check",
    "clip_by_global_norm": "hooks.defaults",
    "deferred": "hooks.defaults",
    "leading_dimension": "hooks.defaults",
    "load": "serving",
    "load_config": "run.layers",
    "nan_to_zero": "hooks.defaults",
    "num_replicas": "cluster.collectives",
    "regularization": "numerics.variables",
    "replica_id": "cluster.collectives",
    "report": "run.console",
    "row_offset": "cluster.collectives",
    "show_step": "run.console",
    "train": "commands.train",
    "trainable_variables": "numerics.variables",
    "unpack": "hooks.defaults",
    "weighted": "hooks.defaults",
}
__all__ = ["__version__", "data", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module("ctl_core.data")
    if name not in _HOME:
        raise AttributeError(f"module 'ctl_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ctl_core.{_HOME[name]}"), name)
    # The value is cached in the module, because hooks access public names in every step.
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted(__all__)
