"""Compares the sample outputs in the documentation with what commands print."""

import re
from pathlib import Path

NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"


def read_samples(page: Path) -> list[str]:
    """Returns the blocks of a page that are neither code nor commands."""
    return re.findall(r"^```text\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def find_stale_lines(sample: str, output: str) -> list[str]:
    """Returns the lines of a sample output that a command has not printed.

    The numbers of a line may differ, the runs may have other names, and the end of a line may be
    left out. In a sample, ``...`` stands for any text, and a message that begins with ``error:`` or
    ``warning:`` may be wrapped.
    """
    lines = sample.splitlines()
    if lines[0].startswith(("error:", "warning:")):
        lines = [" ".join(lines)]
    printed = {hide_values(line) for line in output.splitlines()}
    return [line for line in lines if not any(map(make_pattern(line).match, printed))]


def hide_values(line: str) -> str:
    """Replaces numbers and names of runs in a line, and joins its words with single spaces.

    NumPy pads the numbers of an array to one width, so space around a number is no difference.
    """
    line = re.sub(r"\S*\bruns(/\w+)?", "RUN", line)
    return " ".join(re.sub(rf"\s*{NUMBER}\s*", " NUMBER ", line).split())


def make_pattern(line: str) -> re.Pattern[str]:
    """Returns the pattern of the outputs that a line of a sample stands for."""
    parts = [re.escape(hide_values(part)) for part in line.split("...")]
    return re.compile(".*".join(parts))
