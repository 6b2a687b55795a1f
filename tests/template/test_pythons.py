"""Which Pythons: pyproject.toml says it, and whatever else says it agrees."""

from __future__ import annotations

import re
import runpy
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tests.helpers.rendering import ROOT

NEEDED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "pythons.py"))


def test_the_range_is_what_tensorflow_and_keras_allow(script: dict[str, Any]) -> None:
    for package in ("keras", "tensorflow-cpu"):
        allowed = SpecifierSet(metadata(package)["Requires-Python"])
        assert all(f"{version}.0" in allowed for version in script["allowed"]())


def test_everything_says_the_same_range(script: dict[str, Any], digits: Path) -> None:
    oldest, *_, newest = script["allowed"]()
    assert SpecifierSet(NEEDED) == SpecifierSet(f">={oldest},<3.{int(newest[2:]) + 1}")
    for readme in (ROOT / "README.md", digits / "README.md"):
        said = re.findall(r"Python (3\.\d+) to (3\.\d+)", readme.read_text())
        assert said == [(oldest, newest)], readme
    makefile = (ROOT / "Makefile").read_text()
    first, last = (tuple(map(int, version.split("."))) for version in (oldest, newest))
    assert f"{first} <= sys.version_info[:2] <= {last}" in makefile
    assert f"must be Python {oldest} to {newest} " in makefile
    for pyproject in (ROOT / "pyproject.toml", digits / "pyproject.toml"):
        project = tomllib.loads(pyproject.read_text())
        assert project["project"]["requires-python"] == NEEDED
        assert "target-version" not in project["tool"]["ruff"]  # then it is requires-python's
    workflow = yaml.safe_load((digits / ".github" / "workflows" / "ci.yml").read_text())
    setups = [step["with"] for step in workflow["jobs"]["test"]["steps"] if "with" in step]
    assert [setup["python-version-file"] for setup in setups] == ["pyproject.toml"]
    assert not any("python-version" in setup for setup in setups)


def test_a_python_that_is_not_installed_is_said(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert script["main"](["3.98", "3.99"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("  FAILED: not tested, for it is not installed") == 2
    assert lines[-1].startswith("Pythons 3.98, 3.99: FAILED: 3.98, 3.99 (")
