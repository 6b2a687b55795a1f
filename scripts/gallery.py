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

Each example is a complete project to start from. It consists of a file of
[hooks](glossary.md#hook) and the settings for this file. To generate a project from an example,
pass the name of the example to cookiecutter:

<!-- not run: the README's commands are -->
```sh
uvx cookiecutter gh:OWNER/cookiecutter-tensorflow-ctl --no-input example=gan
cd my_training
./train.sh --run-name a
```

`OWNER` stands for the account that hosts the template's repository. To use a clone, pass its path
in place of `gh:OWNER/cookiecutter-tensorflow-ctl`. To name the project, add `project_name=NAME`.

Unless an example says otherwise, its times were measured on two CPU cores.
"""


def list_examples() -> list[str]:
    """Returns the names of the examples, in the order of cookiecutter's prompt."""
    names: list[str] = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["example"]
    return names


def describe_example(name: str) -> Iterator[str]:
    """Yields the paragraphs of the gallery about an example.

    ``NAME.md`` has five parts: an introduction, the output of a run, an experiment, the use of the
    trained model, and details. Parts may be empty.
    """
    section = (EXAMPLES / f"{name}.md").read_text("utf-8")
    section = re.sub(r"\]\(pictures/", f"](../{PICTURES}/", section)
    # A heading of an example is below the heading that has its name.
    section = re.sub(r"^## ", "### ", section, flags=re.MULTILINE)
    introduction, *parts = (part.strip() for part in section.split("<!-- part -->\n"))
    yield f"## {name}\n"
    yield f"{introduction}\n"
    yield f"The code: [`{name}.py`](../templates/examples/{name}.py).\n"
    for part in parts:
        if part:
            yield f"{part}\n"


def write_gallery() -> str:
    """Returns the page with a section for each example."""
    paragraphs = [INTRODUCTION]
    for name in list_examples():
        paragraphs += describe_example(name)
    return "\n".join(paragraphs)
