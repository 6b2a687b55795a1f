"""The fixtures that the engine's tests share."""

from __future__ import annotations

from tests.helpers.fixtures import train
from tests.helpers.project import cli
from tests.helpers.settings import folder

__all__ = ["cli", "folder", "train"]
