"""Writes what the docs say of hooks and settings from the engine's own tables (make generated).

That is the tables in hooks.md and settings.md, and the whole page hook-reference.md.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from ctl_core.hooks.reference import read_default_source
from ctl_core.hooks.spec import Argument, Form, HookSpec, Place
from ctl_core.hooks.table import COMMON_ARGUMENTS, TABLE
from ctl_core.run.settings import SETTINGS, Config

DOCS = Path(__file__).resolve().parents[1] / "docs"
REFERENCE = "hook-reference.md"
RUNS = {
    Place.SETUP: "Runs before training.",
    Place.GRAPH: "Runs in the graph, on each replica.",
    Place.HOST: "Runs on the host, between two steps.",
}
INTRODUCTION = """\
# Hook reference

All hooks, in the order in which they are called. [Hooks](hooks.md) explains how they work together.
A hook declares only the arguments that it uses, in any order. `python -m ctl_core hooks NAME`
prints the same about one hook.

In shapes, `b` is the number of examples, and `[]` a scalar. Every hook can also take these
arguments:

"""


def format_table(rows: Iterable[tuple[str, ...]]) -> str:
    """Returns rows as Markdown; the first one is the head."""
    head, *others = [" | ".join(row) for row in rows]
    return "\n".join([head, re.sub(r"[^|]+", "---", head), *others]) + "\n"


def list_hooks() -> Iterable[tuple[str, ...]]:
    """Yields of each hook where it runs, its purpose, and its default."""
    yield "hook", "runs", "what it gives, or does", "default"
    for spec in TABLE:
        default = "required" if spec.is_required else spec.default
        link = f"[`{spec.name}`]({REFERENCE}#{spec.name})"
        yield link, spec.place.value, spec.purpose, default


def list_arguments(arguments: Iterable[Argument], kind: str) -> Iterable[tuple[str, ...]]:
    """Yields name, type and meaning of each argument, or of each field of a result."""
    yield kind, "type", "meaning"
    for argument in arguments:
        shape = f" `{argument.shape}`" if argument.shape else ""
        yield f"`{argument.name}`", f"{argument.type}{shape}", argument.meaning


def describe_hook(spec: HookSpec) -> Iterable[str]:
    """Yields the paragraphs of the reference about one hook."""
    yield f"## {spec.name}\n"
    yield f"{spec.purpose}. {spec.details}".rstrip() + "\n"
    form = "" if spec.form is Form.FUNCTION else f" It is {spec.form.value}."
    yield f"{RUNS[spec.place]}{form}\n"
    if spec.arguments:
        yield format_table(list_arguments(spec.arguments, "argument"))
    if spec.returns:
        yield f"**Returns** {spec.returns}.\n"
    if spec.result:
        yield f"Or `ctl.{spec.result}`, a named tuple:\n"
        yield format_table(list_arguments(spec.fields, "field"))
    if spec.is_required:
        yield "**Required.**\n"
    elif source := read_default_source(spec.name):
        yield f"**Default**\n\n```python\n{source}\n```\n"
    else:
        yield f"**Default:** {spec.default}.\n"
    yield f"**Example**\n\n```python\n{spec.example}```\n"


def write_reference() -> str:
    """Returns the page with everything about each hook."""
    common = format_table(list_arguments(COMMON_ARGUMENTS, "argument"))
    hooks = ["\n".join(describe_hook(spec)) for spec in TABLE]
    return "\n".join([INTRODUCTION + common, *hooks])


def list_settings() -> Iterable[tuple[str, ...]]:
    """Yields the name, default and help of each setting."""
    yield "setting", "default", "what it says"
    for name, default in dataclasses.asdict(Config()).items():
        shown = default if isinstance(default, str) else json.dumps(default)
        choices = ", ".join(map(str, get_args(SETTINGS[name].annotation)))
        text = f"{SETTINGS[name].description}{f' ({choices})' * choices.islower()}"
        yield f"`{name}`", f"`{shown}`", text


PAGES = {REFERENCE: write_reference()}
TABLES = {"hooks.md": format_table(list_hooks()), "settings.md": format_table(list_settings())}

if __name__ == "__main__":
    for page, text in PAGES.items():
        (DOCS / page).write_text(text, encoding="utf-8")
    for page, table in TABLES.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        head, _, _ = table.partition("\n")
        shown = re.findall(rf"^{re.escape(head)}\n(?:.+\n)*", text, re.M)
        (DOCS / page).write_text(text.replace(shown[0], table), encoding="utf-8")
