"""The fixtures that the template's tests share."""

from tests.helpers.rendering import digits, environment, projects, render, run, template_repository

__all__ = ["digits", "environment", "projects", "render", "run", "template_repository"]
