"""Makes a release in this clone: ``make release VERSION=2.1.0``; nothing is pushed.

First, write a dated entry for the version into ctl_core/CHANGELOG.md, and commit it. The script
sets the version in the other files, commits them, and creates the tag. It needs only Python and
git.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
# The files that contain the version, with the new line and a pattern of the old one.
PLACES = {
    "ctl_core/__init__.py": ('__version__ = "{version}"', r'__version__ = ".*"'),
    "CITATION.cff": ("version: {version}", r"version: .*"),
}


def git(*words: str) -> str:
    """Runs git in this repository, and returns its output."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def find_date(version: str) -> str:
    """Returns the date of a version from the first heading of the CHANGELOG.

    Raises:
        SystemExit: the first heading names another version, or has no date.
    """
    changelog = (ROOT / "ctl_core" / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = next((line for line in changelog.splitlines() if line.startswith("## ")), "none")
    match = re.fullmatch(rf"## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)", heading)
    if match is None:
        sys.exit(
            f"release: the first heading of ctl_core/CHANGELOG.md is {heading!r}; write the entry "
            f"'## {version} (YYYY-MM-DD)', and commit it."
        )
    return match[1]


def set_version(version: str, date: str) -> None:
    """Writes the version and the date of the release into the files that contain them."""
    for name, (line, pattern) in PLACES.items():
        replace_line(ROOT / name, pattern, line.format(version=version))
    replace_line(ROOT / "CITATION.cff", r"date-released: .*", f"date-released: {date}")


def replace_line(path: Path, pattern: str, line: str) -> None:
    """Replaces the line of a file that matches a pattern; exactly one line must match."""
    text = path.read_text(encoding="utf-8")
    text, count = re.subn(rf"^{pattern}$", line, text, flags=re.MULTILINE)
    if count != 1:
        sys.exit(f"release: {path.name} has {count} lines like {line!r}; expected one.")
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Checks the clone, sets the version, commits, tags, and prints the command to publish it."""
    version = sys.argv[1] if len(sys.argv) == 2 else ""
    if not VERSION.fullmatch(version):
        sys.exit(f"release: expected a version such as VERSION=2.1.0, got {version!r}.")
    tag = f"v{version}"
    changes = git("status", "--porcelain")
    if changes:
        sys.exit(f"release: commit or remove these changes first:\n{changes}")
    if git("tag", "--list", tag):
        sys.exit(f"release: the tag {tag} exists already; choose the next version.")
    set_version(version, find_date(version))
    if git("status", "--porcelain"):
        git("commit", "--all", "--message", f"Version {version}")
    git("tag", "--annotate", tag, "--message", f"Version {version}")
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    print(f"Tagged {tag}. To publish it: git push origin {branch} {tag}")


if __name__ == "__main__":
    main()
