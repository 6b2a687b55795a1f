"""The fixtures that the template's tests share."""

from __future__ import annotations

from tests.helpers.rendering import digits, environment, render, run, template_repository

__all__ = ["digits", "environment", "render", "run", "template_repository"]
