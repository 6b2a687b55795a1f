"""Wrong answers are refused in one line, unusual ones work, and all sources give one project."""

import json
import shutil
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from cookiecutter.exceptions import FailedHookException
from markdown_it import MarkdownIt

from template_answers import check_slug
from tests.helpers.rendering import ROOT, Render, Run, commit, files

# cookiecutter renders answers from the command line as templates. This expression becomes two
# braces.
TWO_BRACES = "{{ '{' * 2 }}"
# An answer, its value, and the reason why it is refused.
REFUSED = [
    ("project_slug", "3d", "is no lower-case Python name"),
    ("project_slug", "x" * 300, "is no lower-case Python name"),
    ("project_slug", "import", "is a Python keyword"),
    ("project_slug", "json", "is the name of a module or package in use"),
    ("project_slug", "null", "is not text but a value in YAML files; answer for example 'my_null'"),
    ("project_slug", "off", "is not text but a value in YAML files; answer for example 'my_off'"),
    ("project_slug", "~", "is no lower-case Python name"),
    ("project_slug", "1e3", "is no lower-case Python name"),
    ("project_name", "", "is empty"),
    ("project_name", "two\nlines", "contains the character U+000A"),
    ("description", f"a {TWO_BRACES} b", "which cookiecutter takes for template code"),
    ("author", "no\udcffutf8", "contains the character U+DCFF"),
]


def test_every_accepted_slug_is_text_in_yaml() -> None:
    """A slug must be a string in YAML 1.1, because the files of launch/ do not quote it."""
    for word in ("null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf", "e1"):
        try:
            check_slug(word)
        except FailedHookException as error:
            refusal = str(error)
        else:
            assert yaml.safe_load(f"name: {word}") == {"name": word}
            assert word not in ("y", "n"), "text for PyYAML, but not for every parser"
            continue
        assert refusal.endswith(f"answer for example 'my_{word}'.")


@pytest.mark.parametrize(("answer", "value", "why"), REFUSED)
def test_wrong_answers_are_refused(
    answer: str, value: str, why: str, render: Render, tmp_path: Path
) -> None:
    with pytest.raises(FailedHookException) as caught:
        render(tmp_path, **{"project_slug": "fine", answer: value})
    line = str(caught.value)
    assert line.startswith(f"{answer}: ")
    assert line.isprintable()
    assert why in line
    assert repr(value.replace(TWO_BRACES, "{{"))[:60] in line
    assert not list(tmp_path.iterdir())


def test_wrong_answers_are_refused_on_the_command_line(run: Run, tmp_path: Path) -> None:
    """The message about a wrong answer is the only output."""
    command = ["cookiecutter", ROOT, "--no-input", "project_slug=../keras"]
    done = run(*command, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (1, 1, "")
    assert done.stdout.startswith("project_slug: '../keras' is no lower-case Python name (")
    assert done.stdout.endswith("); answer for example 'my_keras'.\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("mixed-Case name", "mixed_case_name"),
        ("3D Größe", "project_3d_grosse"),
        ("word " * 13, "_".join(["word"] * 11)),
    ],
)
def test_derived_slug(name: str, slug: str, render: Render, tmp_path: Path) -> None:
    assert render(tmp_path, project_name=name).name == slug


FINE = [
    ("""double " and ' quotes, and '''three'''""" + ' """three"""', "null"),
    ("back\\slash \\n \\u0041 \\", "ünïcödé 日本語 🙂"),
    ("braces { } }} %} #} %s {0} ${HOME} $(id) `id`", "key: value, [list], {map}, !tag, @at, %x"),
    ("# *stars* _under_scores [link](url) <b>tag</b> <!-- &amp; | ~~gone~~ ![x](y)", "é"),
]


@pytest.mark.parametrize(("text", "other"), FINE)
def test_odd_text_arrives_as_typed(text: str, other: str, render: Render, tmp_path: Path) -> None:
    """TOML, Markdown and the license contain the text unchanged, and every Python file compiles."""
    answers = {"project_name": text, "description": other, "author": text}
    project = render(tmp_path, project_slug="fine", **answers)
    metadata = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert metadata["description"] == other
    assert metadata["authors"] == [{"name": text}]
    assert f"Copyright (c) {text}\n" in (project / "LICENSE").read_text("utf-8")
    tokens = MarkdownIt().parse((project / "README.md").read_text("utf-8"))
    inline = ["heading_open", "inline", "heading_close", "paragraph_open", "inline"]
    assert [token.type for token in tokens[:5]] == inline
    for token, expected in ((tokens[1], text), (tokens[4], other)):
        assert token.children is not None
        assert {child.type for child in token.children} <= {"text", "text_special"}
        assert "".join(child.content for child in token.children) == expected
    for path in project.glob("*.py"):
        compile(path.read_text("utf-8"), path, "exec")


def test_without_author_and_description(render: Render, tmp_path: Path) -> None:
    """The author and the description may be empty, and the files then omit them."""
    project = render(tmp_path, author="", description=" ")
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert "authors" not in metadata
    assert metadata["description"] == ""
    assert "Copyright (c) the authors of My Training\n" in (project / "LICENSE").read_text()
    assert (project / "README.md").read_text().startswith("# My Training\n\nA small ")


def test_readme_links_to_the_site_of_a_template_on_github(run: Run, tmp_path: Path) -> None:
    """The README of a project links to the site of the owner in ``gh:owner/name``."""
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").symlink_to(ROOT)
    config = tmp_path / "config.yaml"
    places = f"cookiecutters_dir: {tmp_path}/templates\nreplay_dir: {tmp_path}/replay\n"
    config.write_text(f"{places}abbreviations:\n  gh: {tmp_path}/{{0}}\n")
    options = ["--no-input", "--config-file", config, "-o", tmp_path]
    run("cookiecutter", "gh:owner/name", *options, cwd=tmp_path)
    readme = (tmp_path / "my_training" / "README.md").read_text()
    assert "[Documentation](https://owner.github.io/name/)" in readme
    assert "(https://github.com/owner/name)" in readme


# ---- The project is the same from each source of the template, and can be updated ----------------


@pytest.fixture(scope="module")
def from_folder(
    tmp_path_factory: pytest.TempPathFactory, render: Render, template_repository: Path
) -> dict[str, bytes]:
    """Returns the files of a project with default answers, rendered from a local path."""
    return files(render(tmp_path_factory.mktemp("folder"), template_repository))


def check_engine(project: Path, template: Path) -> None:
    """Asserts that the vendored engine and its tests are copies of the template's, not links."""
    for folder, source in (("ctl_core", "ctl_core"), ("tests/engine", "tests/engine_net")):
        assert not (project / folder).is_symlink()
        assert files(project / folder) == files(template / source)


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
    """The post hook repairs the symlink, which arrives as a text file, and the lost file modes."""
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
    # The commit has the real files, not the links.
    for folder in ("ctl_core/", "tests/engine/"):
        assert folder in run("git", "ls-files", folder, cwd=project).stdout


@pytest.mark.slow
def test_cruft_create_and_update(
    run: Run,
    template_repository: Path,
    from_folder: dict[str, bytes],
    tmp_path: Path,
) -> None:
    """An update keeps the user's callbacks.py, and brings the new version of the engine."""
    template = tmp_path / "template"
    shutil.copytree(template_repository, template, symlinks=True)
    cruft = [sys.executable, "-m", "cruft"]
    done = run(*cruft, "create", template, "--no-input", cwd=tmp_path)
    project = tmp_path / "my_training"
    check_engine(project, template)
    state = json.loads((project / ".cruft.json").read_text())
    assert {**files(project), ".cruft.json": b""} == {**from_folder, ".cruft.json": b""}
    assert "git: repository with a first commit made; add .cruft.json" in done.stdout

    # The user edits callbacks.py and adds data.
    edited = (project / "callbacks.py").read_text() + "\n# mine\n"
    (project / "callbacks.py").write_text(edited)
    (project / "data" / "mine.csv").write_text("1\n")
    commit(run, project, "Mine")

    # The template changes the engine, adds a file to it, and changes the example and the workflow.
    errors = template / "ctl_core" / "run" / "errors.py"
    errors.write_text(errors.read_text() + "\nNEW = 1\n")
    (template / "ctl_core" / "new.py").write_text('"""New."""\n')
    example = template / "templates" / "examples" / "digits.py"
    example.write_text("# new first line\n" + example.read_text())
    workflow = template / "{{cookiecutter.project_slug}}" / ".github" / "workflows" / "ci.yml"
    workflow.write_text(workflow.read_text() + "# new last line\n")
    commit(run, template, "Second version")

    done = run(*cruft, "update", "--skip-apply-ask", cwd=project)
    assert "git:" not in done.stdout
    assert "Next:" not in done.stdout
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
