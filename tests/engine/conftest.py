"""The fixtures that the engine's tests share."""

from tests.helpers.project import cli, train

__all__ = ["cli", "train"]
