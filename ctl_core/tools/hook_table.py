"""``ctl_core hooks``: the table of hooks, for people: a block for each."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from ctl_core.table import TABLE, Spec

MOST_COLUMNS = 100
_FOOT = (
    "A hook names only the arguments it uses, in any order; every hook may also name config and "
    "hparams. One that callbacks.py leaves out is the default."
)


def print_table(console: Console | None = None) -> None:
    """Prints a block for each hook; lines as long as the terminal, but no longer than 100."""
    console = console or Console()
    width = min(console.width, MOST_COLUMNS)
    for spec in TABLE:
        name = Text(spec.name, style="bold")
        console.print(name + " (required)" if spec.required else name)
        for line in _lines(spec, width):
            console.print(Text(line), soft_wrap=True)
        console.print()
    console.print(Text(textwrap.fill(_FOOT, width)), soft_wrap=True)


def _lines(spec: Spec, width: int) -> list[str]:
    rows = {"may name": ", ".join(spec.arguments), "returns": spec.returns, "default": spec.default}
    lines = _wrapped(spec.doc, "  ", width)
    for heading, text in rows.items():
        if text not in ("", "–"):
            lines += _wrapped(text, f"    {heading:10}", width)
    return lines


def _wrapped(text: str, start: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
