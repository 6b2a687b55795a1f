"""Writes the table of hooks into docs/hooks.md, from the engine's own table.

Run ``python scripts/hooks_table.py`` after a change to ``ctl_core.table.TABLE``; a test fails
until then.
"""

from __future__ import annotations

from pathlib import Path

from ctl_core.table import TABLE

PAGE = Path(__file__).parents[1] / "docs" / "hooks.md"
BEGIN, END = "<!-- hooks: written by scripts/hooks_table.py -->\n", "<!-- end of hooks -->\n"


def table() -> str:
    """Returns the table as Markdown."""
    rows = ["| hook | may name | returns | default |", "|---|---|---|---|"]
    host: tuple[str, ...] = ()
    for spec in TABLE:
        name = f"`{spec.name}`" + (" (required)" if spec.required else "")
        arguments = ", ".join(spec.arguments) or "–"
        if spec.scheduled:
            arguments = "the same" if spec.arguments == host else arguments
            host = spec.arguments
        cells = (f"{name}<br>{spec.doc}", arguments, spec.returns, spec.default)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """Returns the page with the present table between its marks."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
