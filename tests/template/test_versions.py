"""A version can be released, and a project of this version can be updated to the next one."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.rendering import ROOT, Run, commit

pytestmark = pytest.mark.slow
RELEASE = Path("scripts") / "release.py"


def write_entry(repository: Path, version: str, date: str = " (2030-01-31)") -> None:
    """Adds an entry to the changelog."""
    changelog = repository / "ctl_core" / "CHANGELOG.md"
    text = changelog.read_text()
    changelog.write_text(text.replace("## ", f"## {version}{date}\n\nNews.\n\n## ", 1))


def read_version(folder: Path) -> str:
    (version,) = re.findall(r'__version__ = "(.+)"', (folder / "ctl_core/__init__.py").read_text())
    return str(version)


@pytest.fixture
def repository(template_repository: Path, tmp_path: Path, run: Run) -> Path:
    """Returns a clone of the template."""
    clone = tmp_path / "clone"
    run("git", "clone", "--quiet", template_repository, clone, cwd=tmp_path)
    return clone


def release(run: Run, repository: Path, version: str) -> None:
    write_entry(repository, version)
    commit(run, repository, f"Entry of {version}")
    run("make", f"PYTHON={sys.executable}", "release", f"VERSION={version}", cwd=repository)


@pytest.mark.slow
def test_release_is_made_of_a_clean_tree_with_an_entry(repository: Path, run: Run) -> None:
    def refuse(version: str, *words: str) -> None:
        head = run("git", "rev-parse", "HEAD", cwd=repository).stdout
        done = run(sys.executable, RELEASE, version, cwd=repository, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("release: ")
        for word in words:
            assert word in done.stderr
        assert run("git", "rev-parse", "HEAD", cwd=repository).stdout == head
        assert run("git", "tag", cwd=repository).stdout == ""

    refuse("", "expected a version such as VERSION=2.1.0")
    refuse("two", "got 'two'")
    refuse("9.1.0", "is '## ", "write the entry '## 9.1.0 (YYYY-MM-DD)'")
    write_entry(repository, "9.1.0", date="")
    refuse("9.1.0", "commit or remove these changes", "ctl_core/CHANGELOG.md")
    commit(run, repository, "Entry without a date")
    refuse("9.1.0", "is '## 9.1.0'")
    run("git", "reset", "--quiet", "--hard", "HEAD~", cwd=repository)
    write_entry(repository, "9.1.0")
    commit(run, repository, "Entry")
    done = run(sys.executable, RELEASE, "9.1.0", cwd=repository)
    branch = run("git", "rev-parse", "--abbrev-ref", "HEAD", cwd=repository).stdout.strip()
    assert done.stdout == f"Tagged v9.1.0. To publish it: git push origin {branch} v9.1.0\n"
    assert run("git", "status", "--porcelain", cwd=repository).stdout == ""
    assert run("git", "describe", cwd=repository).stdout == "v9.1.0\n"
    assert read_version(repository) == "9.1.0"
    citation = yaml.safe_load((repository / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == ("9.1.0", "2030-01-31")
    again = run(sys.executable, RELEASE, "9.1.0", cwd=repository, check=False)
    assert "the tag v9.1.0 exists already" in again.stderr


def test_citation_has_the_version_of_the_engine() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == read_version(ROOT)


@pytest.mark.slow
def test_project_of_a_version_goes_on_to_the_next_one(
    repository: Path, run: Run, tmp_path: Path
) -> None:
    """The update uses the commands of docs/updating.md, with cookiecutter and with cruft."""
    release(run, repository, "2.0.99")
    (repository / "ctl_core" / "new.py").write_text('"""New."""\n')
    ignored = repository / "{{cookiecutter.project_slug}}" / ".gitignore"
    ignored.write_text(ignored.read_text() + "*.new\n")
    (repository / "{{cookiecutter.project_slug}}" / "AGENTS.md").unlink()
    release(run, repository, "2.1.0")

    page = (ROOT / "docs" / "updating.md").read_text()
    # cookiecutter recognizes a git repository by the word "git" in its address; cruft does not need
    # it.
    page = page.replace("cruft create URL", f"cruft create {repository}")
    page = page.replace("cookiecutter URL", f"cookiecutter git+file://{repository}")
    page = page.replace("uvx ", f"{sys.executable} -m ")
    blocks = re.findall(r"```sh\n(.+?)```", page, re.DOTALL)
    making, updating = (block for block in blocks if "--checkout" in block)
    making = making.replace("v2.0.0", "v2.0.99")
    cookiecutter, cruft = (f"{line} --no-input" for line in making.splitlines())
    folders = tmp_path / "cookiecutter", tmp_path / "cruft"
    for folder, command in zip(folders, (cookiecutter, cruft), strict=True):
        folder.mkdir()
        run("bash", "-euxc", command, cwd=folder)
        project = folder / "my_training"
        assert read_version(project) == "2.0.99"
        assert not (project / "ctl_core" / "new.py").exists()

    project = folders[0] / "my_training"
    hooks = (project / "callbacks.py").read_text() + "\n# mine\n"
    (project / "callbacks.py").write_text(hooks)
    (project / "data" / "mine.csv").write_text("1\n")
    commit(run, project, "Mine")
    run("bash", "-euxc", updating, cwd=project)
    assert read_version(project) == "2.1.0"
    assert (project / "ctl_core" / "new.py").exists()
    assert not (project / "ctl_core").is_symlink()
    assert "*.new" in (project / ".gitignore").read_text()
    assert not (project / "AGENTS.md").exists()
    assert (project / "callbacks.py").read_text() == hooks
    assert (project / "data" / "mine.csv").exists()
    assert run("git", "status", "--porcelain", cwd=project).stdout == ""
    assert not (folders[0] / "update" / "my_training").exists()
