"""How the tests are laid out: what they share, which are quick, and that each is run once."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """Each file below a folder with each module that it imports, at any place in it."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = f"{'tests.' * bool(node.level)}{node.module or ''}"
                names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            for name in names:
                yield path.relative_to(ROOT).as_posix(), name


def test_only_tests_import_from_tests() -> None:
    folders = ("benchmarks", "ctl_core", "hooks", "scripts", "templates")
    found = [pair for folder in folders for pair in imports(folder)]
    assert len(found) > 200
    assert [pair for pair in found if pair[1].split(".")[0] == "tests"] == []


def test_tests_share_by_tests_helpers() -> None:
    """No test file imports another, nor a conftest: such a test could not be moved or deleted."""
    found = [
        (file, name)
        for file, name in imports("tests")
        if name.startswith("tests.") and name.split(".")[-1].startswith(("test_", "conftest"))
    ]
    assert found == []
    shared = [file for file, name in imports("tests") if name.startswith("tests.helpers")]
    assert len(shared) > 50


def test_quick_files_start_no_process_and_hold_no_slow_test() -> None:
    paths = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    for name in runpy.run_path(str(ROOT / "tests" / "conftest.py"))["QUICK"].split():
        text = "" if paths[name] == Path(__file__) else paths[name].read_text()
        for word in ("subprocess", "Popen", "mark.slow", "mark.cluster"):
            assert word not in text, f"{name}: {word}"


def test_continuous_integration_runs_each_test_once() -> None:
    """By the markers of the targets that .ci/run makes; a test of a cluster is a slow one."""
    makefile = (ROOT / "Makefile").read_text()
    chosen = dict(re.findall(r'^([\w-]+):.*\n\t\$\(PYTEST\) -m "?([^"\n]+)', makefile, re.M))
    targets = re.findall(r"make (\S+)", (ROOT / ".ci" / "run").read_text())
    for slow, cluster in ((False, False), (True, False), (True, True)):
        marks = {"slow": slow, "cluster": cluster}
        runs = [name for name in targets if name in chosen and eval(chosen[name], {}, marks)]
        assert len(runs) == 1, (marks, runs)
