"""Writes docs/gallery.md from the examples' sections in a project's README (make generated)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "templates" / "examples"
PICTURES = quote("{{cookiecutter.project_slug}}/pictures")
INTRODUCTION = """\
# Gallery

Each example is a complete project to start from: a single file of [hooks](glossary.md#hook), with
its settings. To generate a project from an example, pass its name to cookiecutter:

<!-- not run: the README's command is -->
```sh
uvx cookiecutter . --no-input example=gan -o ~/projects
cd ~/projects/my_training && ./train.sh
```

Run the first command in a clone of the template's repository, or replace the dot with the
repository's URL. The times below were measured on two CPU cores, unless the text says otherwise.
"""


def read_prompts() -> dict[str, str]:
    """Returns the description of each example in cookiecutter's prompt, by the example's name."""
    prompts = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["__prompts__"]
    examples: dict[str, str] = prompts["example"]
    return {
        name: text.removeprefix(f"{name}: ")
        for name, text in examples.items()
        if name != "__prompt__"
    }


def describe_example(name: str, prompt: str) -> Iterator[str]:
    """Yields the paragraphs of the gallery about an example."""
    section = EXAMPLES / f"{name}.md"
    link = f"[`{name}.py`](../templates/examples/{name}.py)"
    if not section.exists():
        yield f"## {name}\n"
        yield f"{prompt[0].upper()}{prompt[1:]}. The file: {link}.\n"
        return
    heading, _, text = section.read_text("utf-8").strip("\n").partition("\n")
    title = heading.removeprefix("## The example: ")
    yield f"## {name}: {title}\n"
    yield f"The file: {link}.\n"
    yield re.sub(r"\]\(pictures/", f"](../{PICTURES}/", text.strip("\n")) + "\n"


def write_gallery() -> str:
    """Returns the page with a section for each example."""
    paragraphs = [INTRODUCTION]
    for name, prompt in read_prompts().items():
        paragraphs += describe_example(name, prompt)
    return "\n".join(paragraphs)
