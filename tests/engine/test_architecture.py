"""The engine's rooms: who may import whom, and how much there is to read."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import ctl_core

ENGINE = Path(ctl_core.__file__).parent
# From the ground up: a module imports only what stands in a line above its own. Inside functions
# it may import from below; the command line does, to be quick.
LAYERS = """
    console data errors files not_finite precision replicas signals table
    compat settings supervisor variables
    averaging callbacks_file defaults groups learning_rate listeners prefetch recording selection
    staging task
    contract freezing randomness record strategy summaries sync
    batches collectives divergence hooks readers reduction sources
    anomaly cli folder input parts returned schedule vocabularies
    __main__ metrics state
    forward messages position writer
    checkpoint evaluate inference ratio start step
    predict stretches watch
    build export graph
    devices restore trainer
    load use
    check
"""
LEVEL = {name: level for level, line in enumerate(LAYERS.split("\n")) for name in line.split()}
READING_PATH = "hooks defaults batches input step graph trainer schedule checkpoint"


def modules() -> dict[str, Path]:
    """The modules by dotted name."""
    paths = (path for path in ENGINE.rglob("*.py") if path.name != "__init__.py")
    return {".".join(p.relative_to(ENGINE).with_suffix("").parts): p for p in paths}


def level(name: str) -> int:
    return LEVEL[name] if name in LEVEL else LEVEL[name.rpartition(".")[2]]


def imported(path: Path) -> set[str]:
    """The engine's modules that one imports when it is imported itself."""
    found = set()
    for statement in ast.parse(path.read_text()).body:
        for node in statement.body if isinstance(statement, ast.Try) else [statement]:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ctl_core"):
                assert node.module
                name = node.module.removeprefix("ctl_core").removeprefix(".")
                inner = {f"{name}.{alias.name}".lstrip(".") for alias in node.names}
                found |= inner & modules().keys() or {name} & modules().keys()
    return found


def test_every_module_has_a_layer() -> None:
    """By its own name, or with its room's where another room has one of that name, too."""
    names = {name if name in LEVEL else name.rpartition(".")[2] for name in modules()}
    assert names == LEVEL.keys() and len(LEVEL) == len(modules())


def test_imports_go_upwards_only() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in sorted(imported(path))
        if level(other) >= level(name)
    ]
    assert wrong == []


def test_the_supervisor_and_the_command_line_need_no_tensorflow() -> None:
    """Neither they nor what they import."""
    heavy = set()
    for name, path in modules().items():
        text = path.read_text()
        if "\nimport tensorflow" in text or "\nimport keras" in text:
            heavy.add(name)
    reached, todo = set(), ["cluster.supervisor", "cli", "__main__"]
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo += imported(modules()[name])
    assert not reached & heavy


def test_the_reading_path_is_short() -> None:
    lines = sum(len(modules()[name].read_text().splitlines()) for name in READING_PATH.split())
    assert lines <= 2950


def test_what_imports_no_tensorflow_is_typed_strictly() -> None:
    """Not even in a function; the list stands in pyproject.toml."""
    free = set()
    for path in ENGINE.rglob("*.py"):
        imported = {"ctl_core"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
        if not imported & {"tensorflow", "keras"}:
            name = path.relative_to(ENGINE.parent).with_suffix("").parts
            free.add(".".join(name).removesuffix(".__init__"))
    settings = tomllib.loads((ENGINE.parent / "pyproject.toml").read_text())["tool"]["mypy"]
    (strict,) = (each for each in settings["overrides"] if each.get("warn_return_any"))
    assert set(strict["module"]) == free
