"""Generated files are up to date, and all files allow the same versions of Python."""

import os
import re
import runpy
import signal
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from packaging.specifiers import SpecifierSet

from ctl_core.run.errors import PeerLost, RunError, SetupError
from scripts import mutations, terminal
from scripts.tables import DOCS, write_all, write_list_of_pages
from tests.helpers.rendering import ROOT, TEMPLATE

NEEDED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]


def test_generated_pages_are_what_the_engine_says() -> None:
    pages = {**write_all(), "README.md": write_list_of_pages()}
    for name, text in pages.items():
        assert text == (DOCS / name).read_text("utf-8"), "make generated"


def test_the_page_of_errors_lists_the_exit_codes() -> None:
    """Those of exceptions, of success, and of the two signals that end a run."""
    _, _, table = (DOCS / "errors.md").read_text("utf-8").partition("\n## Exit codes\n")
    codes = {RunError.exit_code, SetupError.exit_code, PeerLost.exit_code, 0}
    signals = {128 + signal.SIGINT, 128 + signal.SIGTERM}
    assert {int(code) for code in re.findall(r"^(\d+) \|", table, re.M)} == codes | signals


def test_the_digits_are_what_the_script_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth of the images of each digit is held out."""
    monkeypatch.delitem(sys.modules, "sklearn")  # tests/helpers/lean hides this package
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


# The permissions of jobs that need more than read access to the repository.
RIGHTS = {
    "report": {"issues": "write"},
    "publish": {"pages": "write", "id-token": "write"},
}
# The actions that publish the site, which a project does not have.
PUBLISHING = re.compile(r"actions/(upload-pages-artifact|deploy-pages)@")


def test_workflows_pin_actions_and_have_few_rights(digits: Path) -> None:
    """A project pins the same actions as this repository, so neither can be updated alone."""
    pinned: dict[Path, set[str]] = {}
    for root in (ROOT, digits):
        assert yaml.safe_load((root / ".github/dependabot.yml").read_text())["version"] == 2
        pinned[root] = set()
        for file in (root / ".github" / "workflows").glob("*.yml"):
            pinned[root] |= set(re.findall(r"uses: (.+)", file.read_text()))
            workflow = yaml.safe_load(file.read_text())
            assert workflow["permissions"] == {"contents": "read"}
            for name, job in workflow["jobs"].items():
                assert job.get("permissions") == RIGHTS.get(name)
                assert job["timeout-minutes"]
                for step in job["steps"]:
                    if "checkout" in step.get("uses", ""):
                        assert step["with"] == {"persist-credentials": False}
    assert {action for action in pinned[ROOT] if not PUBLISHING.match(action)} == pinned[digits]
    for action in pinned[ROOT]:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v[\d.]+", action)


def test_weekly_tests_are_on_here_and_off_in_a_project(digits: Path) -> None:
    """The job ``report`` runs after all other jobs and opens an issue."""
    here, there = (
        yaml.safe_load((root / ".github" / "workflows" / "scheduled.yml").read_text())
        for root in (ROOT, digits)
    )
    assert [*here[True]] == ["schedule", "workflow_dispatch"]  # YAML reads `on` as true
    assert [*there[True]] == ["workflow_dispatch"]
    for workflow in (here, there):
        report = workflow["jobs"]["report"]
        assert report["needs"] == [name for name in workflow["jobs"] if name != "report"]
        (step,) = report["steps"]
        assert step["env"] == {"GH_TOKEN": "${{ github.token }}"}
        assert "gh issue create" in step["run"]


def test_everything_says_the_same_range(pythons: dict[str, Any], digits: Path) -> None:
    oldest, *_, newest = pythons["allowed"]()
    # the Makefile reads the range in this form
    assert f">={oldest},<3.{int(newest[2:]) + 1}" == NEEDED
    for readme in (ROOT / "README.md", digits / "README.md"):
        ranges = re.findall(r"Python (3\.\d+) to (3\.\d+)", readme.read_text())
        assert {*ranges} == {(oldest, newest)}, readme
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == pythons["allowed"]()
    for pyproject in (ROOT / "pyproject.toml", digits / "pyproject.toml"):
        project = tomllib.loads(pyproject.read_text())
        assert project["project"]["requires-python"] == NEEDED
        # without target-version, ruff uses requires-python
        assert "target-version" not in project["tool"]["ruff"]
    workflow = yaml.safe_load((digits / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    (setup,) = [step["with"] for step in steps if "setup-python" in step.get("uses", "")]
    assert setup["python-version-file"] == "pyproject.toml"
    assert "python-version" not in setup


def test_mutations_change_one_line_of_a_module() -> None:
    drawn = mutations.draw(seed=1, number=5)
    assert drawn == mutations.draw(seed=1, number=5)
    assert len({mutation.file for mutation in drawn}) == 5
    for mutation in drawn:
        text = (ROOT / mutation.file).read_text("utf-8")
        changed = mutation.apply(text)
        lines = zip(text.splitlines(), changed.splitlines(), strict=True)
        assert sum(before != after for before, after in lines) == 1, mutation
    with pytest.raises(ValueError, match="has 0 lines"):
        drawn[0].apply("")


def test_recording_of_a_terminal(tmp_path: Path) -> None:
    """Lines that are written over are shown for their time, and the last ones stay."""
    loop = "for i in 1 2; do printf '\\r\\033[2Kstep %s <' $i; sleep 0.3; done; sleep 60; echo late"
    commands = [terminal.Command(loop, interrupt_at="step 2"), terminal.Command("echo end")]
    frames = terminal.record(commands, tmp_path, os.environ)
    last = ("step 2 <^C", "$ echo end", "end", "")
    assert frames[-1].lines == (f"$ {loop[:78]}", loop[78:], *last)

    shortened = terminal.shorten(frames)
    picture = ElementTree.fromstring(terminal.draw(shortened, "A & B"))
    shown = {}
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        shown[str(text.text).replace("\xa0", " ")] = text.get("visibility")
    assert shown["step 1 <"] == "hidden"
    stays = [line for line in frames[-1].lines if line]
    assert [shown[line] for line in stays] == [None] * len(stays)
    assert [frame.time for frame in shortened] == sorted(frame.time for frame in shortened)
