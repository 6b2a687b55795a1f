"""The fixtures that the tests of the examples share."""

from __future__ import annotations

from tests.helpers.fixtures import train
from tests.helpers.rendering import environment, render

__all__ = ["environment", "render", "train"]
