"""Tests of the tests' layout: shared helpers, quick tests, and that CI runs each test once."""

import ast
import re
from pathlib import Path

import yaml

import ctl_core

ROOT = Path(__file__).resolve().parents[1]
QUICK = ROOT / "tests" / "quick.txt"


def find_imports(pattern: str, *folders: str) -> list[str]:
    """Returns the lines with an import that matches the pattern, from all files below folders."""
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    lines = ((path, line) for path in files for line in path.read_text().splitlines())
    matching = [(path, line) for path, line in lines if re.match(rf" *{pattern}", line)]
    # Excludes lines in strings, which mention the name of their own file.
    return [f"{path}: {line}" for path, line in matching if path.stem not in line]


def test_only_tests_import_from_tests() -> None:
    folders = ("benchmarks", "ctl_core", "hooks", "scripts", "templates")
    assert len(find_imports("(from|import) ", *folders)) > 200
    assert find_imports(r"(from|import) tests\b", *folders) == []


def test_tests_share_by_tests_helpers() -> None:
    """No test file imports another one or a conftest, so each can be moved or deleted alone."""
    pattern = r"(from|import) tests[\w.]*( import .*)?\b(test_|conftest)"
    assert find_imports(pattern, "tests") == []
    assert len(find_imports(r"from tests\.helpers", "tests")) > 50


def test_golden_tests_ask_from_outside() -> None:
    """Golden tests use only the engine's public names.

    This applies to their code and to the sources of hooks that they write to files.
    """
    private, public = [], {*ctl_core.__all__, "__all__"}
    for path in (ROOT / "tests" / "golden").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            private += [
                (path.name, name)
                for name in names
                if name.startswith(("ctl_core.", "tests.")) and name != "ctl_core.data"
                if not name.startswith("tests.golden")
            ]
        used = re.findall(r"\bctl_core\.(\w+)", text)
        private += [(path.name, f"ctl_core.{name}") for name in used if name not in public]
    assert private == []


def test_quick_tests_are_of_files_that_exist() -> None:
    """While collecting tests, conftest.py checks that the tests themselves exist."""
    names = [line for line in QUICK.read_text().splitlines() if not line.startswith("#")]
    assert len(names) > 50
    assert len(names) == len(set(names))
    assert [name for name in names if not (ROOT / name.partition("::")[0]).is_file()] == []


def test_the_parts_of_the_workflow_are_all_tests() -> None:
    """Each part but the last one is a folder of tests; the last one is all other folders."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    *folders, last = workflow["jobs"]["test"]["strategy"]["matrix"]["part"]
    assert last == "others"
    makefile = (ROOT / "Makefile").read_text()
    (command,) = re.findall(r"^test-part:.*\n\t(.*)\n", makefile, re.M)
    assert re.findall(r"--ignore tests/(\w+)", command) == folders
    assert all((ROOT / "tests" / folder).is_dir() for folder in folders)


def test_continuous_integration_runs_each_test_once() -> None:
    """Each combination of markers is selected by exactly one of the make targets in ``.ci/run``.

    A test marked ``cluster`` is also marked ``slow``.
    """
    makefile = (ROOT / "Makefile").read_text()
    rule = r'^([\w-]+):.*\n\t\$\(PYTEST\)(?: -m "?([^"\n]+))?'
    chosen = {name: mark or "True" for name, mark in re.findall(rule, makefile, re.M)}
    targets = re.findall(r"make (\S+)", (ROOT / ".ci" / "run").read_text())
    for slow, cluster in ((False, False), (True, False), (True, True)):
        marks = {"slow": slow, "cluster": cluster}
        runs = [name for name in targets if name in chosen and eval(chosen[name], {}, marks)]
        assert len(runs) == 1, (marks, runs)


def test_readme_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| `([\w/]+\.py)::(\w+)` \|", (ROOT / "tests/README.md").read_text(), re.M)
    assert len(rows) > 30
    for file, name in rows:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (file, name)
