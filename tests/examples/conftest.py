"""The fixtures that the examples' tests share."""

from tests.helpers.project import cli, train

__all__ = ["cli", "train"]
