"""The same devices and the same ``train`` as the engine's own tests have."""

from __future__ import annotations

from tests.helpers.fixtures import train

__all__ = ["train"]
