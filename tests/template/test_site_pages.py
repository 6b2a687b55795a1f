"""scripts/stage_docs.py: the documents of the repository as pages of the site."""

from pathlib import Path

import pytest

from scripts import stage_docs
from scripts.stage_docs import BrokenLink, Document, list_documents, split_code

REPOSITORY = "https://example.com/me/it"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Write":
    monkeypatch.setattr(stage_docs, "ROOT", tmp_path)
    for file in ("docs/a.md", "docs/b.md", "README.md", "src/x.py", "{{x}}/one.png"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    return Write(tmp_path)


class Write:
    """Writes a document, and returns it as a page of the site."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, path: str, text: str) -> Document:
        (self._root / path).write_text(text)
        return Document(path, list_documents(), REPOSITORY)


@pytest.mark.parametrize(
    ("path", "link", "target"),
    [
        ("docs/a.md", "b.md#title", "b.md#title"),
        ("docs/a.md", "#title", "#title"),
        ("docs/a.md", "../README.md", "index.md"),
        ("README.md", "docs/b.md#title", "b.md#title"),
        ("docs/a.md", "../src/x.py", f"{REPOSITORY}/blob/main/src/x.py"),
        ("docs/a.md", "../src", f"{REPOSITORY}/tree/main/src"),
        ("docs/a.md", "https://example.com/a.md", "https://example.com/a.md"),
        ("docs/a.md", "mailto:me@example.com", "mailto:me@example.com"),
    ],
)
def test_links_lead_to_pages_or_to_the_repository(
    write: Write, path: str, link: str, target: str
) -> None:
    document = write(path, f"See [the\npage]({link}).\n")
    assert document.render() == f"See [the\npage]({target}).\n"


def test_references_and_titles_stay(write: Write) -> None:
    document = write("README.md", '[One][a], [two](docs/b.md "Two")\n\n[a]: docs/a.md\n')
    assert document.render() == '[One][a], [two](b.md "Two")\n\n[a]: a.md\n'


def test_pictures_are_copied(write: Write, tmp_path: Path) -> None:
    document = write(
        "README.md", '![One](%7B%7Bx%7D%7D/one.png)\n<img src="%7B%7Bx%7D%7D/one.png">'
    )
    name = "pictures/{{x}}-one.png"
    assert document.render() == f'![One]({name})\n<img src="{name}">'
    assert document.pictures == {name: tmp_path / "{{x}}" / "one.png"}


def test_code_stays_as_it_is(write: Write) -> None:
    text = "[a](b.md)\n\n```text\n[a](nothing.md)\n```\n\n    ```sh\n    [a](nothing.md)\n    ```\n"
    assert write("docs/a.md", text).render() == text
    assert [is_code for _, is_code in split_code(text)] == [False, True, False, True, False]


def test_the_owner_of_the_repository_is_put_in(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = write("README.md", "`gh:OWNER/it`")
    assert document.render() == "`gh:me/it`"
    monkeypatch.undo()
    assert stage_docs.read_repository_url().startswith("https://github.com/")
    monkeypatch.setenv("REPOSITORY_URL", REPOSITORY)
    assert stage_docs.read_repository_url() == REPOSITORY


def test_a_missing_file_is_reported(write: Write) -> None:
    document = write("docs/a.md", "[a](../src/y.py)")
    with pytest.raises(BrokenLink, match=r"docs/a\.md: \.\./src/y\.py: "):
        document.render()
