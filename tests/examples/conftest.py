"""The fixtures that the examples' tests share."""

from tests.helpers.fixtures import train
from tests.helpers.project import cli

__all__ = ["cli", "train"]
