"""A small engine for custom TensorFlow training: hooks, many steps inside one graph call.

The public names; each is imported on first use, so that ``--help`` need not wait for TensorFlow.
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
    from ctl_core.hooks.defaults import deferred, leading_dimension, nan_to_zero, unpack, weighted
    from ctl_core.model.state import State
    from ctl_core.numerics.variables import regularization, trainable_variables
    from ctl_core.run.console import report, show_step
    from ctl_core.run.errors import CtlError, RunError, SetupError, StopTraining
    from ctl_core.run.listeners import Listener
    from ctl_core.run.settings import Config
    from ctl_core.run.sources import load_config
    from ctl_core.serving import LoadedModel, load

__version__ = "1.0.0"

# Where the public names are.
_HOME = {
    "cluster.collectives": "all_gather all_reduce num_replicas replica_id row_offset",
    "commands.check": "check",
    "commands.train": "train",
    "hooks.defaults": "deferred leading_dimension nan_to_zero unpack weighted",
    "model.state": "State",
    "numerics.variables": "regularization trainable_variables",
    "run.console": "report show_step",
    "run.errors": "CtlError RunError SetupError StopTraining",
    "run.listeners": "Listener",
    "run.settings": "Config",
    "run.sources": "load_config",
    "serving": "LoadedModel load",
}
__all__ = ["__version__", "data", *" ".join(_HOME.values()).split()]


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module("ctl_core.data")
    for module, names in _HOME.items():
        if name in names.split():
            value = getattr(importlib.import_module(f"ctl_core.{module}"), name)
            return globals().setdefault(name, value)  # hooks look it up at each step
    raise AttributeError(f"module 'ctl_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
