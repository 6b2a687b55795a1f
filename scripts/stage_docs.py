"""Collects the pages of the documentation site in build/docs (make docs).

The pages in docs/ are written for the repository: they link to each other and to files of the
repository by relative paths. On the site, some of the repository's other documents are pages, too.
A link to a document that is a page of the site leads there, a picture is copied, and a link to any
other file leads to the repository on the web.

``mkdocs build`` then builds build/docs; it fails if a page is not in the navigation of mkdocs.yml.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

import yaml

ROOT = Path(__file__).resolve().parents[1]
STAGED = ROOT / "build" / "docs"
# Documents outside of docs/ that are pages of the site, too.
DOCUMENTS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "ctl_core/README.md": "engine.md",
    "ctl_core/CHANGELOG.md": "changelog.md",
}
# A list of the pages for readers of the repository; the site has its navigation instead.
ONLY_IN_REPOSITORY = ("docs/README.md",)
# A page, a section with a title, or a list of these.
Navigation: TypeAlias = str | dict[str, "Navigation"] | list["Navigation"]
# The placeholder in the README for the account that hosts the repository.
OWNER = "OWNER"
_FENCE = re.compile(r"^([ ]*)```.*?^\1```$", re.MULTILINE | re.DOTALL)
# The target of a link: in Markdown, in the definition of a reference, and in HTML.
_TARGET = re.compile(
    r'(?P<before>\]\(|^\[[^\]\n]+\]: |(?:href|src|srcset)=")(?P<target>[^)"\s]+)', re.MULTILINE
)


class BrokenLink(Exception):
    """A document links to a file that the repository does not have."""


class _Loader(yaml.SafeLoader):
    """Reads ``!ENV [VARIABLE, default]`` as MkDocs does, and ignores names of Python objects."""


def _read_variable(loader: _Loader, node: yaml.SequenceNode) -> str:
    name, default = map(str, loader.construct_sequence(node))
    return os.environ.get(name, default)


_Loader.add_multi_constructor("tag:", lambda _loader, _suffix, _node: None)
_Loader.add_constructor("!ENV", _read_variable)


def read_config() -> dict[str, Any]:
    """Returns the settings of mkdocs.yml."""
    config: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), _Loader)
    return config


def list_pages(navigation: Navigation) -> list[str]:
    """Returns the pages of a navigation, such as ``nav`` of mkdocs.yml, in their order."""
    if isinstance(navigation, str):
        return [navigation]
    entries = navigation
    if isinstance(navigation, dict):
        entries = list(navigation.values())
    return [page for entry in entries for page in list_pages(entry)]


def read_repository_url() -> str:
    """Returns the URL of the repository, which the pages of the site link to."""
    url: str = read_config()["repo_url"]
    return url


def list_documents() -> dict[str, str]:
    """Returns the path of each document's page on the site, by its path in the repository."""
    pages = {f"docs/{path.name}": path.name for path in sorted((ROOT / "docs").glob("*.md"))}
    for path in ONLY_IN_REPOSITORY:
        pages.pop(path, None)
    return pages | DOCUMENTS


class Document:
    """A document of the repository whose links are rewritten for the site.

    Attributes:
        path: the path of the document in the repository
        pages: the pages on the site of all documents, by their paths in the repository
        repository: the URL of the repository
        pictures: the pictures of the page: their files, by their paths on the site
    """

    def __init__(self, path: str, pages: Mapping[str, str], repository: str) -> None:
        self.path = path
        self.pages = pages
        self.repository = repository
        self.pictures: dict[str, Path] = {}

    def render(self) -> str:
        """Returns the text of the page."""
        text = (ROOT / self.path).read_text("utf-8")
        text = text.replace(OWNER, self.repository.split("/")[-2])
        return "".join(
            part if is_code else _TARGET.sub(self._rewrite, part)
            for part, is_code in split_code(text)
        )

    def _rewrite(self, match: re.Match[str]) -> str:
        target = self._find_target(match["target"], is_picture="src" in match["before"])
        return f"{match['before']}{target}"

    def _find_target(self, link: str, is_picture: bool) -> str:
        """Returns the target on the site of a link in the repository.

        Raises:
            BrokenLink: the repository has no such file.
        """
        path, hash_sign, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return link
        inside = os.path.normpath(Path(self.path).parent / unquote(path))
        file = ROOT / inside
        if not file.exists():
            raise BrokenLink(f"{self.path}: {link}: there is no such file in the repository.")
        if inside in self.pages:
            return f"{self.pages[inside]}{hash_sign}{anchor}"
        if is_picture or file.suffix in (".png", ".svg"):
            name = f"pictures/{file.parent.name}-{file.name}"
            self.pictures[name] = file
            return name
        kind = "tree" if file.is_dir() else "blob"
        return f"{self.repository}/{kind}/main/{quote(inside)}{hash_sign}{anchor}"


def split_code(text: str) -> Iterator[tuple[str, bool]]:
    """Yields the parts of a Markdown text, each with True if it is a fenced block of code."""
    end = 0
    for block in _FENCE.finditer(text):
        yield text[end : block.start()], False
        yield block[0], True
        end = block.end()
    yield text[end:], False


def main() -> int:
    """Replaces build/docs; returns the exit code."""
    pages = list_documents()
    repository = read_repository_url()
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "assets", STAGED / "assets")
    problems = []
    for path, page in pages.items():
        document = Document(path, pages, repository)
        try:
            (STAGED / page).write_text(document.render(), "utf-8")
        except BrokenLink as error:
            problems.append(error)
        for name, file in document.pictures.items():
            (STAGED / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, STAGED / name)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
