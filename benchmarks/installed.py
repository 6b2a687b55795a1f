"""Which of the peers that are no part of Keras are there; asked without starting TensorFlow."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def has_jax() -> bool:
    """Whether JAX is installed."""
    return importlib.util.find_spec("jax") is not None


def has_orbit() -> bool:
    """Whether Orbit is installed; another package of this name is not meant."""
    found = importlib.util.find_spec("orbit")
    folders = [Path(folder) for folder in (found and found.submodule_search_locations) or ()]
    return any((folder / "standard_runner.py").is_file() for folder in folders)
