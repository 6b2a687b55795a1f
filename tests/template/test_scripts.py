"""What scripts/ makes is what stands there; which Pythons are allowed is said alike everywhere."""

import re
import runpy
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from packaging.specifiers import SpecifierSet

from scripts.tables import DOCS, PAGES, TABLES
from tests.helpers.rendering import ROOT, TEMPLATE

NEEDED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]


def test_the_tables_are_what_the_engine_says() -> None:
    for name, table in TABLES.items():
        assert table in (DOCS / name).read_text("utf-8"), "make generated"
    for name, text in PAGES.items():
        assert text == (DOCS / name).read_text("utf-8"), "make generated"


def test_the_digits_are_what_the_script_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each digit a fifth is held out."""
    monkeypatch.delitem(sys.modules, "sklearn")  # hidden by tests/helpers/lean
    from scripts.make_digits import FILE, make

    assert FILE == TEMPLATE / "data" / "digits.npz"
    make(tmp_path / "digits.npz")
    data = np.load(FILE)
    again = np.load(tmp_path / "digits.npz")
    assert list(data) == list(again) == ["images", "labels", "train", "test"]
    for name in data:
        np.testing.assert_array_equal(data[name], again[name])
    assert {*data["train"]} | {*data["test"]} == {*range(1797)}
    shares = np.bincount(data["labels"][data["test"]]) / np.bincount(data["labels"])
    np.testing.assert_allclose(shares, 0.2, atol=0.005)


@pytest.fixture(scope="module")
def pythons() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "pythons.py"))


def test_the_range_is_what_tensorflow_and_keras_allow(pythons: dict[str, Any]) -> None:
    for package in ("keras", "tensorflow-cpu"):
        allowed = SpecifierSet(metadata(package)["Requires-Python"])
        assert all(f"{version}.0" in allowed for version in pythons["allowed"]())


def test_everything_says_the_same_range(pythons: dict[str, Any], digits: Path) -> None:
    oldest, *_, newest = pythons["allowed"]()
    assert f">={oldest},<3.{int(newest[2:]) + 1}" == NEEDED  # as the Makefile reads it
    for readme in (ROOT / "README.md", digits / "README.md"):
        ranges = re.findall(r"Python (3\.\d+) to (3\.\d+)", readme.read_text())
        assert ranges == [(oldest, newest)], readme
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == pythons["allowed"]()
    for pyproject in (ROOT / "pyproject.toml", digits / "pyproject.toml"):
        project = tomllib.loads(pyproject.read_text())
        assert project["project"]["requires-python"] == NEEDED
        assert "target-version" not in project["tool"]["ruff"]  # then it is requires-python's
    workflow = yaml.safe_load((digits / ".github" / "workflows" / "ci.yml").read_text())
    (setup,) = [step["with"] for step in workflow["jobs"]["test"]["steps"] if "with" in step]
    assert setup["python-version-file"] == "pyproject.toml" and "python-version" not in setup
