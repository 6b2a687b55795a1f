"""Fixtures that the tests of the template share."""

from tests.helpers.rendering import digits, environment, projects, render, run, template_repository

__all__ = ["digits", "environment", "projects", "render", "run", "template_repository"]
