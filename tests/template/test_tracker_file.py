"""The prompt ``tracker``: tracker.py with what it needs, and nothing of trackers otherwise."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.helpers.rendering import QUESTIONS, ROOT, Render, Run, files

# The packages that each asks for, as they are imported.
SERVICES = {
    "wandb": {"wandb"},
    "mlflow": {"mlflow"},
    "comet": {"comet_ml"},
    "trackio": {"trackio"},
}
WORD = re.compile(rb"\btracker|wandb|mlflow|comet|trackio", re.I)


@pytest.fixture(params=SERVICES)
def tracked(request: pytest.FixtureRequest, render: Render, tmp_path: Path) -> tuple[str, Path]:
    return request.param, render(tmp_path, tracker=request.param)


def test_it_comes_with_its_package_and_is_named(tracked: tuple[str, Path], digits: Path) -> None:
    service, project = tracked
    assert set(files(project)) == {*files(digits), "tracker.py"}
    text = (project / "tracker.py").read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert SERVICES[service] <= imported and text.endswith("\n") and text.count("\n") <= 60
    assert text == (ROOT / "templates" / "trackers" / f"{service}.py").read_text()
    config = yaml.safe_load((project / "config.yaml").read_text())
    plain = yaml.safe_load((digits / "config.yaml").read_text())
    assert config == {**plain, "listener": "tracker.Tracker"}
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    before = tomllib.loads((digits / "pyproject.toml").read_text())
    new = set(settings["project"]["dependencies"]) - set(before["project"]["dependencies"])
    names = {re.split("[->]", text)[0] for text in new}
    assert names - {"sqlalchemy", "alembic"} == SERVICES[service]
    assert set(settings["tool"]["setuptools"]["py-modules"]) == {"callbacks", "tracker"}
    assert {"tracker.py", "callbacks.py"} <= set(settings["tool"]["cruft"]["skip"])


def test_without_it_nothing_speaks_of_trackers(digits: Path) -> None:
    named = {name for name, text in files(digits).items() if WORD.search(text)}
    assert {name for name in named if not name.startswith(("ctl_core/", "data/"))} == set()
    assert set(QUESTIONS["tracker"]) == {"none", *SERVICES}


@pytest.mark.slow
def test_linters_find_nothing(render: Render, run: Run, tmp_path: Path) -> None:
    """Where the packages are not installed; mypy reads one after the other, in one place."""
    project = tmp_path / "project"
    for service in SERVICES:
        made = render(tmp_path, project_slug=f"of_{service}", tracker=service)
        run("ruff", "check", "--no-cache", ".", cwd=made)
        run("ruff", "format", "--check", "--no-cache", ".", cwd=made)
        shutil.copytree(made, project, dirs_exist_ok=True)
        run("mypy", "--cache-dir", tmp_path / "cache", cwd=project)
