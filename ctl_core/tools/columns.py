"""Tables as wide as the terminal, in which names stay whole; in a pipe, each row is one line."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

# Between two columns.
_GAP = 2


def room() -> int:
    """Returns how many columns the terminal has, or COLUMNS says; a pipe has no end."""
    return shutil.get_terminal_size((10_000, 24)).columns


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: its first cell
        cells: the others
        least: to how many columns it may be narrowed, its cells going over several lines; None: it
            is kept whole, so that it can be copied
        right: whether cells are aligned to the right
    """

    head: str
    cells: Sequence[str]
    least: int | None = None
    right: bool = False

    @property
    def widest(self) -> int:
        """How many columns it takes as it is."""
        return max(cell_len(text) for text in (self.head, *self.cells))

    @property
    def narrowest(self) -> int:
        """How many it takes at least, with its head whole."""
        if self.least is None:
            return self.widest
        return min(self.widest, max(cell_len(self.head), self.least))


def fit(columns: Sequence[Column]) -> bool:
    """Whether columns fit beside each other."""
    return sum(column.narrowest + _GAP for column in columns) - _GAP <= room()


def chosen(columns: Sequence[Column], order: Sequence[str]) -> list[Column]:
    """Returns the columns that fit: the first, and of the others, by their heads in this order."""
    found = [columns[0]]
    for head in order:
        more = [column for column in columns if column in found or column.head == head]
        found = more if fit(more) else found
    return found


def _folded(text: str, width: int) -> str:
    """Breaks a cell where two blanks stand, so that ``name value`` stays together where it fits."""
    lines: list[str] = []
    for part in text.split("  "):
        if lines and cell_len(f"{lines[-1]}  {part}") <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def print_table(columns: Sequence[Column]) -> None:
    """Prints columns beside each other; those that may be narrowed share the room that is left."""
    widths = [column.widest for column in columns]
    while sum(widths) + _GAP * (len(widths) - 1) > room():
        loose = [i for i, column in enumerate(columns) if widths[i] > column.narrowest]
        if not loose:  # the lines are longer than those of the terminal, and nothing is lost
            break
        widths[max(loose, key=widths.__getitem__)] -= 1
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        justify = "right" if column.right else "left"
        table.add_column(column.head, width=width, overflow="fold", justify=justify)  # type: ignore[arg-type]
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(_folded, row, widths))
    console = Console(markup=False, highlight=False, emoji=False)
    console.width = sum(widths) + _GAP * len(widths)
    with console.capture() as printed:
        console.print(table)
    for line in printed.get().splitlines():
        print(line.rstrip())
