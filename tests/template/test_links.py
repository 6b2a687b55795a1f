"""What the documents link to is there, and the commands that they show are understood."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from ctl_core.__main__ import main
from ctl_core.cli import COMMANDS, parse_command
from tests.helpers.rendering import EXAMPLES, ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ctl_core" / "README.md", *DOCS]


def tokens(page: Path) -> Iterator[Token]:
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        yield token
        yield from token.children or ()


def links(page: Path) -> list[str]:
    """What a page links to, except on the web."""
    found = [str(t.attrs["href"]) for t in tokens(page) if t.type == "link_open"]
    return [link for link in found if not re.match(r"https?:", link)]


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them in a link."""
    pairs = itertools.pairwise(tokens(page))
    headings = [text.content for before, text in pairs if before.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-heading-with-code) [b](other.md#nowhere) [c](c.md) [d](#d)\n")
    assert broken(page) == ["other.md#nowhere", "c.md", "#d"]


def test_every_document_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    assert {f"docs/{page.name}" for page in DOCS} <= linked


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_a_projects_readme_names(projects: dict[tuple[str, ...], Path], example: str) -> None:
    """Files of the project, and documents of this repository."""
    project = projects[example, "cpu", "nowhere", "MIT"]
    readme = project / "README.md"
    assert broken(readme) == [] == broken(project / "ctl_core" / "README.md")
    code = [token.content for token in tokens(readme) if token.type == "code_inline"]
    files = {
        text for text in code if re.fullmatch(r"[\w./-]+\.(md|py|toml|yaml|npz)|LICENSE", text)
    }
    assert {"callbacks.py", "docs/hooks.md", "ctl_core/README.md"} < files
    files.remove("training_log.md")  # which a run with a note makes
    places = {file: ROOT if file.startswith("docs/") else project for file in files}
    assert [file for file, place in places.items() if not (place / file).exists()] == []


COMMAND = re.compile(r"(?:\./train\.sh|python -m ctl_core)(?: |$)")


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "settings.md", None])
def test_commands_are_understood(
    page: Path | None,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each line that starts as a command of a project, and each in a sentence."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text((digits / "config.yaml").read_text())
    for run in ("a", "b", "gan", "rate", "w"):
        Path("runs", run).mkdir(parents=True)
        Path("runs", run, "train.log").touch()
        Path("runs", run, "config.yaml").write_text("steps: 300\n")
        Path("runs", run, "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    seen = 0
    for token in tokens(page or digits / "README.md"):
        of_code = token.type == "fence" or "code" in token.type
        for line in token.content.splitlines() if of_code else ():
            if not COMMAND.match(line) or "SETTING" in line:
                continue
            words = shlex.split(line.split(" && ")[0], comments=True)
            words = [word for word in words if word != "--background"]  # which is train.sh's
            arguments = ["train", *words[1:]] if words[0] == "./train.sh" else words[3:]
            assert arguments[0] in COMMANDS, line
            if arguments[0] == "hooks" or "--help" in arguments:
                assert main(arguments if "--help" in arguments else ["hooks", "--help"]) == 0, line
            else:
                parse_command(arguments)
            seen += 1
    assert seen > 3
