"""The fixtures that the engine's tests share."""

from tests.helpers.fixtures import train
from tests.helpers.project import cli

__all__ = ["cli", "train"]
