"""Fixtures that the tests of the examples share."""

from tests.helpers.project import cli, train

__all__ = ["cli", "train"]
