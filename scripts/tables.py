"""Writes the tables of hooks.md and settings.md in docs from the engine's own (make generated)."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from ctl_core.hooks.table import SPECS, TEXT
from ctl_core.run.settings import SETTINGS, Config

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLACES = {"in the graph": "graph", "by step": "host", "one or several": "host"}


def format_table(rows: Iterable[tuple[str, ...]]) -> str:
    """Returns rows as Markdown; the first one is the head."""
    head, *others = [" | ".join(row) for row in rows]
    return "\n".join([head, re.sub(r"[^|]+", "---", head), *others]) + "\n"


def list_hooks() -> Iterable[tuple[str, ...]]:
    """Yields of each hook where it runs, the first clause on it, and its default."""
    yield "hook", "runs", "what it gives, or does", "default"
    for row in TEXT.split("\n\n")[:-1]:
        name, _, text = row.partition("(")
        text = " ".join(re.split(r"\n(?=    [A-Z{])", text, maxsplit=1)[1].split())
        purpose = re.split(r"[.;:] (?![^{]*\})", text)[0]
        default = text.partition(" default: ")[2] or SPECS[name].kind
        yield f"`{name}`", PLACES.get(SPECS[name].kind, "setup"), purpose, default


def list_settings() -> Iterable[tuple[str, ...]]:
    """Yields the name, default and help of each setting."""
    yield "setting", "default", "what it says"
    for name, default in dataclasses.asdict(Config()).items():
        shown = default if isinstance(default, str) else json.dumps(default)
        choices = ", ".join(map(str, get_args(SETTINGS[name].annotation)))
        text = f"{SETTINGS[name].description}{f' ({choices})' * choices.islower()}"
        yield f"`{name}`", f"`{shown}`", text


TABLES = {"hooks.md": format_table(list_hooks()), "settings.md": format_table(list_settings())}

if __name__ == "__main__":
    for page, table in TABLES.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        head, _, _ = table.partition("\n")
        shown = re.findall(rf"^{re.escape(head)}\n(?:.+\n)*", text, re.M)
        (DOCS / page).write_text(text.replace(shown[0], table), encoding="utf-8")
