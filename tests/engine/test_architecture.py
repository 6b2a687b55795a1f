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
    errors table types splits index buckets task metric_values
    chunks compat console files precision not_finite reduction signals
    ahead collectives compiled training_mode helpers joining nested profile settings staging
    hook_state record gpus verdict run_lock
    callbacks_file batch_norm hook_table
    slurm tf_config rendezvous
    place
    layers options provenance rhythm selection tracking learning_rate strategy supervisor
    fitting training_log hparams_page sources listeners
    flags folder run_folder rate_schedule sync randomness freezing averaging groups micro_batches
    cli shared_folder
    defaults shares
    autograph divergence __main__ summary process_state
    checks.hooks
    hooks saved
    elements
    kinds
    stream
    examples anomaly
    pipeline
    checks.data returned vocabularies schedule
    position passes eval_data created
    last_batch
    units
    inputs context
    metrics
    step
    pairs writes eval_step predict
    evaluate stretches scratch
    state
    build graph messages remainder input_position raw_inputs forking initial_weights
    sums traced writing reading serving
    checkpoint export pace
    wholes
    trainer watch restored
    rehearsal commands load
"""
LEVEL = {name: level for level, line in enumerate(LAYERS.split("\n")) for name in line.split()}
READING_PATH = "hooks defaults inputs step graph trainer schedule chunks checkpoint"


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
    assert {name for name in modules() if name not in LEVEL} == {
        name for name in modules() if "." in name and name not in ("checks.data", "checks.hooks")
    }
    assert len(LEVEL) == len(modules())


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
    assert lines <= 2000


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
