"""Bad answers are refused in one line with nothing left behind; odd but fine ones work."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from cookiecutter.exceptions import FailedHookException
from markdown_it import MarkdownIt

from tests.helpers.rendering import ROOT, Render, Run

# cookiecutter renders answers that come from outside; this one arrives as two braces.
TWO_BRACES = "{{ '{' * 2 }}"
# The answer, its value, and why it cannot be.
REFUSED = [
    ("project_slug", "3d", "is no lower-case Python name"),
    ("project_slug", "x" * 300, "is no lower-case Python name"),
    ("project_slug", "import", "is a Python keyword"),
    ("project_slug", "json", "is the name of a module or package in use"),
    ("project_name", "", "is empty"),
    ("project_name", "two\nlines", "contains the character U+000A"),
    ("description", f"a {TWO_BRACES} b", "which cookiecutter takes for template code"),
    ("author", "no\udcffutf8", "contains the character U+DCFF"),
]


@pytest.mark.parametrize(("answer", "value", "why"), REFUSED)
def test_refused(answer: str, value: str, why: str, render: Render, tmp_path: Path) -> None:
    with pytest.raises(FailedHookException) as caught:
        render(tmp_path, **{"project_slug": "fine", answer: value})
    line = str(caught.value)
    assert line.startswith(f"{answer}: ") and line.isprintable() and why in line
    assert repr(value.replace(TWO_BRACES, "{{"))[:60] in line
    assert not list(tmp_path.iterdir())


def test_refused_on_the_command_line(run: Run, tmp_path: Path) -> None:
    """The line is all there is."""
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
    """TOML, Markdown and the licence show the texts; every Python file still compiles."""
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
    """Both may be empty: the files do without them."""
    project = render(tmp_path, author="", description=" ")
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert "authors" not in metadata
    assert metadata["description"] == ""
    assert "Copyright (c) the authors of My Training\n" in (project / "LICENSE").read_text()
    assert (project / "README.md").read_text().startswith("# My Training\n\n## ")
