"""Writes the generated parts of the documentation (make generated).

The pages about hooks, settings and commands come from the engine's own tables, the page about the
Python API from docstrings, the gallery from the examples, and the list of pages from mkdocs.yml.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

from ctl_core.commands.cli import COMMANDS, OPTIONS
from ctl_core.commands.help import GROUPS, capitalize
from ctl_core.hooks.reference import read_default_source
from ctl_core.hooks.spec import Argument, Form, HookSpec, Place
from ctl_core.hooks.table import COMMON_ARGUMENTS, TABLE
from ctl_core.run.settings import SETTINGS, Config
from scripts.gallery import write_gallery
from scripts.python_api import format_call, write_python_api
from scripts.stage_docs import Navigation, list_documents, read_config

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RUNS = {
    Place.SETUP: "Runs before training.",
    Place.GRAPH: "Runs in the graph, on each replica.",
    Place.HOST: "Runs on the host, between two steps.",
}
HOOKS = """\
# Hook reference

A hook is a function in `callbacks.py`. It declares only the arguments that it uses, in any order.
[Hooks](hooks.md) explains how they work together, and `python -m ctl_core hooks NAME` prints the
same about one hook.

## All hooks

In the order in which they are called:

"""
ARGUMENTS = """\
## All arguments

An argument has a line for each of its meanings. Hooks in the graph get tensors, and hooks on the
host get values.

"""
COMMON = """\
In shapes, `b` is the number of examples, and `[]` a scalar. Every hook can also take these
arguments:

"""


def format_table(rows: Iterable[tuple[str, ...]]) -> str:
    """Returns a Markdown table; the first row is its head."""
    head, *others = [" | ".join(row) for row in rows]
    return "\n".join([head, re.sub(r"[^|]+", "---", head), *others]) + "\n"


# ---- Hooks ---------------------------------------------------------------------------------------


def list_hooks() -> Iterable[tuple[str, ...]]:
    """Yields the name of each hook, where it runs, and its purpose."""
    yield "hook", "runs", "purpose"
    for spec in TABLE:
        purpose = spec.purpose
        if spec.is_required:
            purpose = f"**Required.** {purpose}"
        yield f"[`{spec.name}`](#{spec.name})", spec.place.value, purpose


def list_arguments(arguments: Iterable[Argument], head: str) -> Iterable[tuple[str, ...]]:
    """Yields the name, type and meaning of each argument, or of each field of a result."""
    yield head, "type", "meaning"
    for argument in arguments:
        kind = re.sub(r"\b(tf|ctl)(\.\w+)+", lambda match: f"`{match[0]}`", argument.type)
        if argument.shape:
            kind += f" `{argument.shape}`"
        yield f"`{argument.name}`", kind, argument.meaning


def list_all_arguments() -> Iterable[tuple[str, ...]]:
    """Yields the name and meaning of each argument of any hook, and the hooks that can take it."""
    yield "argument", "meaning, and the hooks that can take it"
    hooks: dict[Argument, list[str]] = {}
    for spec in TABLE:
        for argument in spec.arguments:
            hooks.setdefault(argument, []).append(f"[`{spec.name}`](#{spec.name})")
    for argument in sorted(hooks, key=lambda argument: argument.name):
        yield f"`{argument.name}`", f"{argument.meaning}<br>{', '.join(hooks[argument])}"


def format_signature(spec: HookSpec) -> str:
    """Returns a hook with all arguments that it may name, as code."""
    if spec.form is Form.NAMES:
        return f'{spec.name} = ["a name", "another name"]'
    if spec.form is Form.SCHEDULE:
        return f"{spec.name} = {{N: function}}\n{format_call('function', spec.argument_names)}"
    return format_call(spec.name, spec.argument_names)


def describe_hook(spec: HookSpec) -> Iterable[str]:
    """Yields the paragraphs of the reference about one hook."""
    yield f"## {spec.name}\n"
    yield f"```python\n{format_signature(spec)}\n```\n"
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


def write_hooks() -> str:
    """Returns the page that describes all hooks."""
    head = "\n".join(
        [
            HOOKS + format_table(list_hooks()),
            COMMON + format_table(list_arguments(COMMON_ARGUMENTS, "argument")),
        ]
    )
    hooks = ["\n".join(describe_hook(spec)) for spec in TABLE]
    return "\n".join([head, *hooks, ARGUMENTS + format_table(list_all_arguments())])


# ---- Settings and commands -----------------------------------------------------------------------


def list_settings(names: Iterable[str]) -> Iterable[tuple[str, ...]]:
    """Yields the name, default and help of each setting."""
    yield "setting", "default", "meaning"
    defaults = dataclasses.asdict(Config())
    for name in names:
        default = defaults[name]
        shown = default if isinstance(default, str) else json.dumps(default)
        text = SETTINGS[name].description or ""
        choices = ", ".join(map(str, get_args(SETTINGS[name].annotation)))
        if choices.islower():
            text += f" ({choices})"
        yield f"`{name}`", f"`{shown}`", text


def write_settings() -> str:
    """Returns a section for each group of settings; the groups are the same as in ``--help``."""
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "your own": tuple(name for name in SETTINGS if name not in grouped)}
    return "\n".join(
        f"## {title.capitalize()}\n\n{format_table(list_settings(names))}"
        for title, names in groups.items()
    )


def describe_command(name: str) -> Iterator[str]:
    """Yields the paragraphs about a command and its options."""
    command = COMMANDS[name]
    yield f"## {name}\n"
    yield f"```text\npython -m ctl_core {name} {command.usage}\n```\n"
    yield f"{capitalize(command.text)}.\n"
    rows = [("option", "meaning")]
    rows += [
        (f"`--{option.replace('_', '-')}`", OPTIONS[option][1].description)
        for option in command.options
    ]
    yield format_table(rows)
    if name == "train":
        yield (
            "`./train.sh` is short for `python -m ctl_core train`. It accepts all "
            "[settings](settings.md) as flags.\n"
        )
    elif command.settings:
        settings = ", ".join(f"`{setting}`" for setting in command.settings)
        yield (
            f"The command accepts these settings: {settings}. All other settings are taken "
            "from the run.\n"
        )


def write_commands() -> str:
    """Returns a section for each command."""
    return "\n".join(paragraph for name in COMMANDS for paragraph in describe_command(name))


# ---- The list of pages ---------------------------------------------------------------------------


def write_list_of_pages() -> str:
    """Returns docs/README.md, the navigation of the site for readers of the repository."""
    documents = {page: path for path, page in list_documents().items()}

    def list_entries(navigation: Navigation, depth: int) -> Iterator[str]:
        if isinstance(navigation, str):
            path = documents[navigation]
            title, _, _ = (ROOT / path).read_text("utf-8").partition("\n")
            link = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
            yield f"- [{title.removeprefix('# ')}]({link})"
        elif isinstance(navigation, list):
            for entry in navigation:
                yield from list_entries(entry, depth)
        else:
            for title, entries in navigation.items():
                if not isinstance(entries, str):
                    yield f"\n{'#' * depth} {title}\n"
                yield from list_entries(entries, depth + 1)

    entries = list_entries(read_config()["nav"], 2)
    tasks = "The README lists [pages by task](../README.md#documentation).\n"
    return "\n".join(["# Documentation\n", tasks, *entries]).replace("\n\n\n", "\n\n") + "\n"


# ---- Files ---------------------------------------------------------------------------------------


PAGES = {
    "hook-reference.md": write_hooks(),
    "python-api.md": write_python_api(),
    "gallery.md": write_gallery(),
}
# The marks around the generated part of a page, and these parts by page.
BEGIN = "<!-- generated -->"
END = "<!-- /generated -->"
SECTIONS = {"settings.md": write_settings(), "commands.md": write_commands()}


def write_all() -> dict[str, str]:
    """Returns the text of each page that is generated, or that has a generated part."""
    pages = dict(PAGES)
    for page, section in SECTIONS.items():
        text = (DOCS / page).read_text("utf-8")
        before, mark, rest = text.partition(f"{BEGIN}\n")
        _, end_mark, after = rest.partition(f"\n{END}")
        pages[page] = f"{before}{mark}\n{section}{end_mark}{after}"
    return pages


if __name__ == "__main__":
    for page, text in write_all().items():
        (DOCS / page).write_text(text, encoding="utf-8")
    # This page is written last, because it contains the titles of the other pages.
    (DOCS / "README.md").write_text(write_list_of_pages(), encoding="utf-8")
