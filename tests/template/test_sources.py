"""A project comes out the same from wherever the template is taken, and can be updated."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.helpers.rendering import Render, Run, commit, files


@pytest.fixture(scope="module")
def from_folder(
    tmp_path_factory: pytest.TempPathFactory, render: Render, template_repository: Path
) -> dict[str, bytes]:
    """The files of a project with default answers, from a local path."""
    return files(render(tmp_path_factory.mktemp("folder"), template_repository))


def check_engine(project: Path, template: Path) -> None:
    """The vendored engine is made of real files, the same as the template's."""
    assert not (project / "ctl_core").is_symlink()
    assert files(project / "ctl_core") == files(template / "ctl_core")


def test_git_url(
    render: Render, template_repository: Path, from_folder: dict[str, bytes], tmp_path: Path
) -> None:
    project = render(tmp_path, f"git+file://{template_repository}")
    check_engine(project, template_repository)
    assert files(project) == from_folder


def test_zip_archive(
    run: Run,
    render: Render,
    template_repository: Path,
    from_folder: dict[str, bytes],
    tmp_path: Path,
) -> None:
    """The symlink arrives as a text file and the modes are lost: the post hook mends both."""
    archive = tmp_path / "template.zip"
    run(
        *["git", "archive", "--format=zip", "--prefix=template-main/", "-o", archive, "HEAD"],
        cwd=template_repository,
    )
    with ZipFile(archive) as contents:
        link = "template-main/{{cookiecutter.project_slug}}/ctl_core"
        assert contents.read(link) == b"../ctl_core"
    project = render(tmp_path, archive)
    check_engine(project, template_repository)
    assert files(project) == from_folder
    assert (project / "train.sh").stat().st_mode & 0o111 == 0o111
    # A commit of the real files, not of the link.
    assert "ctl_core/" in run("git", "ls-files", "ctl_core", cwd=project).stdout


def test_cruft_create_and_update(
    run: Run,
    template_repository: Path,
    from_folder: dict[str, bytes],
    tmp_path: Path,
) -> None:
    """The user's callbacks.py and the engine's new version both survive an update."""
    template = tmp_path / "template"
    shutil.copytree(template_repository, template, symlinks=True)
    cruft = [sys.executable, "-m", "cruft"]
    done = run(*cruft, "create", template, "--no-input", cwd=tmp_path)
    project = tmp_path / "my_training"
    check_engine(project, template)
    state = json.loads((project / ".cruft.json").read_text())
    assert {**files(project), ".cruft.json": b""} == {**from_folder, ".cruft.json": b""}
    assert "git: repository with a first commit made; add .cruft.json" in done.stdout

    # The user: an edit of callbacks.py, and own data.
    edited = (project / "callbacks.py").read_text() + "\n# mine\n"
    (project / "callbacks.py").write_text(edited)
    (project / "data" / "mine.csv").write_text("1\n")
    commit(run, project, "Mine")

    # The template: the engine changes, also by a new file, and so do the example and a setting.
    errors = template / "ctl_core" / "run" / "errors.py"
    errors.write_text(errors.read_text() + "\nNEW = 1\n")
    (template / "ctl_core" / "new.py").write_text('"""New."""\n')
    example = template / "templates" / "examples" / "digits.py"
    example.write_text("# new first line\n" + example.read_text())
    workflow = template / "{{cookiecutter.project_slug}}" / ".github" / "workflows" / "ci.yml"
    workflow.write_text(workflow.read_text() + "# new last line\n")
    commit(run, template, "Second version")

    done = run(*cruft, "update", "--skip-apply-ask", cwd=project)
    assert "git:" not in done.stdout and "Next:" not in done.stdout
    check_engine(project, template)
    assert (project / "callbacks.py").read_text() == edited
    changed = run("git", "status", "--porcelain", "--no-renames", cwd=project).stdout.split()
    assert set(changed[1::2]) == {
        *[".cruft.json", ".github/workflows/ci.yml", "ctl_core/run/errors.py", "ctl_core/new.py"]
    }
    assert run("git", "log", "--format=%an: %s", cwd=project).stdout.splitlines() == [
        "Ada: Mine",
        "Ada: Project from the template",
    ]
    assert not list(project.rglob("*.rej"))
    after = json.loads((project / ".cruft.json").read_text())
    assert after["commit"] != state["commit"]
    commit(run, project, "Updated")
    assert "up to date" in run(*cruft, "check", cwd=project).stdout
