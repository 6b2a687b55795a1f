"""What scripts/ makes is what stands there; which Pythons are allowed is said alike everywhere."""

from __future__ import annotations

import re
import runpy
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from packaging.specifiers import SpecifierSet
from sklearn.datasets import load_digits

from scripts.gallery import PAGE, page
from scripts.make_digits import FILE, make
from tests.helpers.rendering import ROOT

NEEDED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]


def test_the_gallery_is_what_the_examples_say() -> None:
    assert PAGE.read_text("utf-8") == page(), "make generated"


def test_the_digits_are_what_the_script_makes_and_says(tmp_path: Path) -> None:
    make(tmp_path / "digits.npz")
    data, again, source = np.load(FILE), np.load(tmp_path / "digits.npz"), load_digits()
    assert list(data) == list(again) == ["images", "labels", "train", "test"]
    for name in data:
        assert data[name].dtype == again[name].dtype
        np.testing.assert_array_equal(data[name], again[name])
    np.testing.assert_array_equal(data["images"], source.images)
    np.testing.assert_array_equal(data["labels"], source.target)
    # Every example is in one part, and a fifth of each digit is held out.
    both = np.concatenate([data["train"], data["test"]])
    np.testing.assert_array_equal(np.sort(both), np.arange(1797))
    for digit in range(10):
        held_out = np.mean(np.isin(np.flatnonzero(data["labels"] == digit), data["test"]))
        assert abs(held_out - 0.2) < 0.005
    assert FILE.stat().st_size < 64 * 1024


@pytest.fixture(scope="module")
def pythons() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "pythons.py"))


def test_the_range_is_what_tensorflow_and_keras_allow(pythons: dict[str, Any]) -> None:
    for package in ("keras", "tensorflow-cpu"):
        allowed = SpecifierSet(metadata(package)["Requires-Python"])
        assert all(f"{version}.0" in allowed for version in pythons["allowed"]())


def test_everything_says_the_same_range(pythons: dict[str, Any], digits: Path) -> None:
    oldest, *_, newest = pythons["allowed"]()
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
    (setup,) = [step["with"] for step in workflow["jobs"]["test"]["steps"] if "with" in step]
    assert setup["python-version-file"] == "pyproject.toml" and "python-version" not in setup


def test_a_python_that_is_not_installed_is_said(
    pythons: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pythons["main"](["3.98", "3.99"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("  FAILED: not tested, for it is not installed") == 2
    assert lines[-1].startswith("Pythons 3.98, 3.99: FAILED: 3.98, 3.99 (")
