"""``make docs`` fails where a link, an anchor or an entry of the navigation is wrong."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What is added to a page, or a page that is added, and words of the message.
FAULTS = {
    "a link": ("slurm.md", "[Nothing](nothing.md)", "nothing.md"),
    "an anchor": ("slurm.md", "[Nothing](ray.md#nothing)", "#nothing"),
    "a page that is not listed": ("unlisted.md", "# Unlisted", "unlisted.md"),
}


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site in a folder as the Makefile does."""
    (words,) = re.findall(r"bin/mkdocs\" (.+)", (ROOT / "Makefile").read_text("utf-8"))
    command = [str(ROOT / ".venv-docs" / "bin" / "mkdocs"), *words.split()]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the settings and the pages of the site."""
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")
    shutil.copytree(ROOT / "build" / "docs", tmp_path / "build" / "docs")
    return tmp_path


def test_the_site_is_built(folder: Path) -> None:
    done = build(folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "build" / "site" / "index.html").exists()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_build(folder: Path, fault: str) -> None:
    page, text, words = FAULTS[fault]
    with (folder / "build" / "docs" / page).open("a", encoding="utf-8") as file:
        file.write(f"\n{text}\n")
    done = build(folder)
    assert done.returncode != 0, done.stderr
    assert words in done.stderr, done.stderr
