"""Tests the engine's structure: which package may import which, and how strictly each is typed."""

import ast
import re
import tomllib
from pathlib import Path

import ctl_core

ENGINE = Path(ctl_core.__file__).parent
# The engine's packages and modules, from the lowest layer to the highest. Each one imports only
# from names that are listed before it.
LAYERS = """
    types run compat
    cluster numerics data
    hooks input
    model
    executable update step graph compilation schedule
    evaluation checkpoint
    session
    scratch build trainer
    read_only serving
    commands __main__
"""


def modules() -> dict[str, Path]:
    """Returns the path of each module of the engine, keyed by the module's dotted name."""
    paths = (path for path in ENGINE.rglob("*.py") if path.name != "__init__.py")
    return {".".join(p.relative_to(ENGINE).with_suffix("").parts): p for p in paths}


def imported(path: Path, everywhere: bool = False) -> set[str]:
    """Returns the engine's modules that a file imports.

    Args:
        path: the file
        everywhere: whether imports inside functions and blocks count, too
    """
    body = ast.parse(path.read_text()).body
    imports: set[str] = set()
    for statement in body:
        inner = everywhere or isinstance(statement, ast.Try)
        for node in ast.walk(statement) if inner else [statement]:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ctl_core"):
                assert node.module
                name = node.module.removeprefix("ctl_core").removeprefix(".")
                imported_names = {f"{name}.{alias.name}".lstrip(".") for alias in node.names}
                imports |= (
                    imported_names & modules().keys()
                    or {name} & modules().keys()
                    or list_modules_of_packages({name, *imported_names} - {""})
                )
    return imports


def list_modules_of_packages(packages: set[str]) -> set[str]:
    """Returns all modules of packages, because importing a package may import all its modules."""
    return {module for module in modules() if module.rpartition(".")[0] in packages}


def reach(name: str) -> set[str]:
    """Returns a module and all modules that it imports, directly or indirectly."""
    reached, todo = set(), {name}
    while todo:
        reached |= todo
        todo = {other for module in todo for other in imported(modules()[module])} - reached
    return reached


def test_rooms_import_from_below_only() -> None:
    rooms = LAYERS.split()
    assert {name.split(".")[0] for name in modules()} == set(rooms)
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in sorted(imported(path, everywhere=name != "__main__"))
        if rooms.index(other.split(".")[0]) > rooms.index(name.split(".")[0])
    ]
    assert wrong == [], "\n".join(wrong)


def test_the_tests_that_documents_name_are_there() -> None:
    """Each test that a page names exists, and a link to a test function leads to its file."""
    root, linked = ENGINE.parent, 0
    files = {path.stem for path in (root / "tests").rglob("test_*.py")}
    for page in (*root.glob("*.md"), *(root / "docs").glob("*.md"), ENGINE / "README.md"):
        text = page.read_text("utf-8")
        links = re.findall(r"\[`(test_\w+)`\]\((.+?)\)", text)
        linked += len(links)
        for name, link in links:
            file = page.parent / link
            assert file.exists() and f"def {name}(" in file.read_text(), f"{page}: {name} moved"
        gone = {*re.findall(r"\btest_\w+", text)} - files - {name for name, _ in links}
        assert gone == set(), page
    assert linked > 20


def test_only_compat_uses_private_names_of_other_packages() -> None:
    """Modules outside of compat/ import no private modules and read no private attributes."""
    private_modules = re.compile(r"(keras\.src|tensorflow\.(python|core|compiler))\b")
    # Public attributes of named tuples, os and sys whose names begin with an underscore.
    public = {"_replace", "_asdict", "_exit", "_current_frames"}
    wrong = []
    for name, path in modules().items():
        if name.startswith("compat."):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            imports = []
            if isinstance(node, ast.ImportFrom):
                imports = [node.module or ""]
            elif isinstance(node, ast.Import):
                imports = [alias.name for alias in node.names]
            wrong += [f"{name}: {module}" for module in imports if private_modules.match(module)]
            if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
                owner = ast.unparse(node.value)
                if owner not in ("self", "cls") and node.attr not in public:
                    wrong.append(f"{name}:{node.lineno} {owner}.{node.attr}")
    assert wrong == []


def test_the_supervisor_and_the_command_line_need_no_tensorflow() -> None:
    """Neither they nor what they import; and nothing in run/ does."""
    heavy = set()
    for name, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported = {alias.name.split(".")[0] for alias in node.names}
                if imported & {"tensorflow", "keras"}:
                    heavy.add(name)
    assert len(heavy) > 10
    for name in ("cluster.supervisor", "commands.cli", "__main__"):
        assert not reach(name) & heavy
    assert not {name for name in heavy if name.startswith("run.")}


def test_what_imports_no_tensorflow_is_typed_strictly() -> None:
    """Each module that imports neither TensorFlow nor Keras is checked strictly by mypy.

    The list of these modules is in pyproject.toml.
    """
    free = set()
    for path in ENGINE.rglob("*.py"):
        names = {"ctl_core"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
        if not names & {"tensorflow", "keras"}:
            name = path.relative_to(ENGINE.parent).with_suffix("").parts
            free.add(".".join(name).removesuffix(".__init__"))
    settings = tomllib.loads((ENGINE.parent / "pyproject.toml").read_text())["tool"]["mypy"]
    (strict,) = (each for each in settings["overrides"] if each.get("warn_return_any"))
    assert set(strict["module"]) == free


def test_public_names_are_those_that_type_checkers_see() -> None:
    """The table of lazy imports agrees with the imports under TYPE_CHECKING."""
    tree = ast.parse((ENGINE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {
        alias.name: (node.module or "").removeprefix("ctl_core.")
        for node in imports
        for alias in node.names
        if node.module != "ctl_core"
    }
    assert homes == ctl_core._HOME


def test_console_does_not_import_listeners() -> None:
    """The console imports no listeners, even for types, because the listeners use the console."""
    assert "run.listeners" not in imported(modules()["run.console"], everywhere=True)
