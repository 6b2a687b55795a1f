"""Writes docs/gallery.md (make generated): every example on one page, by its own section."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gallery.md"
EXAMPLES = ROOT / "templates" / "examples"
# As a link of Markdown has the name of the template's folder.
PICTURES = "../%7B%7Bcookiecutter.project_slug%7D%7D/pictures/"
HEAD = """\
# Gallery of the examples

<!-- written by scripts/gallery.py from templates/examples/*.md -->
An example is a choice of `cookiecutter`: `cookiecutter . example=tfrecords` makes a project that
trains it with `./train.sh`. Each is one file of hooks, at most 150 lines, that reads from top to
bottom; a project of yours may take one, too: `./train.sh --callbacks FILE`. What to expect was
measured on 2 CPU cores; where data could not be had for that, figures of others stand there, marked
as theirs.
"""


def page() -> str:
    """Returns the page: the examples' own sections, with links as they are from docs/."""
    questions = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
    sections = [HEAD]
    for name in questions["example"]:
        section = EXAMPLES / f"{name}.md"
        if section.exists():
            text = section.read_text(encoding="utf-8")
            text = text.replace("## The example: ", f"## {name}: ", 1)
            text = text.replace("(pictures/", f"({PICTURES}")
            hooks = f"The hooks: [{name}.py](../templates/examples/{name}.py)."
            sections.append(f"{text.rstrip()}\n\n{hooks}\n")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
