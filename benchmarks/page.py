"""Draws the chart of a report in a document: ``python -m benchmarks.page docs/performance.md``.

The command draws the chart from the table in the document, without measuring anything. With
``--printed FILE``, it first replaces the report in the document by the printed report of
``python -m benchmarks``, for example from a machine with a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.chart import draw_chart
from benchmarks.report import TITLE, Results, print_report

Row = Sequence[str]
DEVICES = ("cpu", "gpu")


@dataclasses.dataclass(frozen=True)
class Report:
    """A report as text.

    Attributes:
        times: the rows of the table of times; the first one has the names of the columns
        remarks: the lines between the tables
        goals: the rows of the table of goals, of the same form; empty without goals
        notes: the lines at the end
    """

    times: list[Row]
    remarks: list[str]
    goals: list[Row]
    notes: list[str]


def print_plainly(results: Results, notes: Iterable[str]) -> str:
    """Returns what ``print_report`` prints, without the goals that were reached."""
    with io.StringIO() as text:
        print_report(results, Console(file=text, width=400), notes, all_goals=False)
        return text.getvalue()


def parse_printed(text: str) -> Report:
    """Returns a report from what ``print_report`` has printed.

    Raises:
        SystemExit: the text has no table of times.
    """
    _, title, rest = text.partition(TITLE)
    if not title:
        raise SystemExit(f"error: the text has no report; expected the line {TITLE!r}.")
    lines = [line.rstrip() for line in rest.splitlines() if line.strip()]
    table, lines = _cut_table(lines)
    times = _parse_times(table)
    goals: list[Row] = []
    remarks = list(itertools.takewhile(lambda line: not line.startswith("  goal "), lines))
    lines = lines[len(remarks) :]
    if lines:
        table, lines = _cut_table(lines)
        # Without the last column, in which each of them is called missed.
        goals = [re.split(r"\s{2,}", line.strip())[:4] for line in table]
    else:
        remarks, lines = [], remarks
    return Report(times, remarks, goals, lines)


def _cut_table(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the lines of the table with which a text begins, and the lines below it."""
    head, _, *rest = lines
    rows = list(itertools.takewhile(lambda line: line.startswith("  "), rest))
    return [head, *rows], rest[len(rows) :]


def _parse_times(table: Sequence[str]) -> list[Row]:
    """Returns the cells of the table of times, many of which are empty.

    The columns before the numbers are aligned at their left, all others at their right.
    """
    head, *lines = table
    columns = list(re.finditer(r"\S+(?: \S+)*", head))
    starts = []
    for index, column in enumerate(columns):
        if column[0] in ("section", "devices", "read every"):
            starts.append(column.start())
        else:
            starts.append(columns[index - 1].end())
    bounds = list(itertools.pairwise([*starts, None]))
    names = [column[0] for column in columns]
    return [names, *([line[start:end].strip() for start, end in bounds] for line in lines)]


def format_report(report: Report) -> str:
    """Returns a report in Markdown."""
    paragraphs = [f"{TITLE}:", _format_table(report.times)]
    paragraphs += [f"{remark[0].upper()}{remark[1:]}." for remark in report.remarks]
    if len(report.goals) > 1:
        paragraphs += ["These goals were missed:", _format_table(report.goals)]
    paragraphs += report.notes
    return "\n\n".join(paragraphs)


def _format_table(rows: Sequence[Row]) -> str:
    head, *others = rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *others])


def read_times(page: str, device: str) -> list[Row]:
    """Returns the rows of the table of times in a document; the first one names the columns."""
    _, report, _ = split_page(page, device)
    lines = [line for line in report.partition("\n\n|")[2].splitlines() if line]
    rows = [[cell.strip() for cell in f"|{line}".strip("|").split("|")] for line in lines]
    length = next(
        (number for number, row in enumerate(rows) if len(row) != len(rows[0])), len(rows)
    )
    return [rows[0], *rows[2:length]]


def split_page(page: str, device: str) -> tuple[str, str, str]:
    """Returns a document before, between and after the marks of a report.

    Raises:
        SystemExit: the document has no such marks.
    """
    begin, end = f"<!-- bench {device} -->\n", f"<!-- /bench {device} -->"
    before, mark, rest = page.partition(begin)
    report, end_mark, after = rest.partition(end)
    if not mark or not end_mark:
        raise SystemExit(f"error: the document has no lines {begin.strip()} and {end}.")
    return before + mark, report, end_mark + after


def find_chart(page: Path, device: str) -> Path:
    """Returns the file of the chart that a document shows."""
    return page.parent / "pictures" / f"times-{device}.svg"


def put_into(page: Path, device: str, report: Report) -> None:
    """Replaces the report of a device in a document, and draws its chart."""
    before, _, after = split_page(page.read_text(encoding="utf-8"), device)
    page.write_text(f"{before}\n{format_report(report)}\n\n{after}", encoding="utf-8")
    redraw(page, device)


def redraw(page: Path, device: str) -> None:
    """Draws the chart of a document again, from its table."""
    times = read_times(page.read_text(encoding="utf-8"), device)
    find_chart(page, device).write_text(draw_chart(times), encoding="utf-8")


def main() -> int:
    """Puts a printed report into a document, if there is one, and draws the charts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("page", type=Path, metavar="PAGE.md")
    parser.add_argument("--printed", type=Path, metavar="FILE", help="a report to put into it")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="of the printed report")
    arguments = parser.parse_args()
    if arguments.printed:
        text = arguments.printed.read_text(encoding="utf-8")
        put_into(arguments.page, arguments.device, parse_printed(text))
    else:
        for device in DEVICES:
            redraw(arguments.page, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
