"""``ctl_core hooks``: the table of hooks, for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ctl_core.hooks import TABLE


def print_table() -> None:
    """Prints a row for each hook; as wide as the terminal, or as a file takes it."""
    console = Console()
    table = Table(title="Hooks: what callbacks.py may hold", show_lines=True)
    for heading in ("hook", "arguments it may name", "returns", "default"):
        table.add_column(heading, overflow="fold")
    for spec in TABLE:
        name = spec.name + (" (required)" if spec.required else "")
        table.add_row(
            f"{name}\n{spec.doc}", ", ".join(spec.arguments) or "–", spec.returns, spec.default
        )
    console.print(table)
    console.print(
        "Every hook may also name config and hparams. A hook names only the arguments it uses.",
        markup=False,
    )
