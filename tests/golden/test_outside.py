"""The golden tests ask an engine from outside: by its public names, its files, its commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import ctl_core

FOLDER = Path(__file__).parent
PUBLIC = {*ctl_core.__all__, "__all__"}


def test_only_public_names_are_used() -> None:
    """In code, and in the sources of hooks that tests write as text."""
    found = []
    for path in FOLDER.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found += [
                (path.name, name)
                for name in names
                if name.startswith(("ctl_core.", "tests.")) and name != "ctl_core.data"
                if not name.startswith("tests.golden")
            ]
        used = re.findall(r"\bctl_core\.(\w+)", text)
        found += [(path.name, f"ctl_core.{name}") for name in used if name not in PUBLIC]
    assert found == []
