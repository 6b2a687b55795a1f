"""The engine's rooms: who may import whom, and how much there is to read.

The figures are the budget of everything that comes: who raises one says why in the change.
"""

import ast
import io
import re
import tokenize
import tomllib
from pathlib import Path

import ctl_core

ENGINE = Path(ctl_core.__file__).parent
# From the ground up. A room imports what stands above it, or to its left.
LAYERS = """
    run compat
    cluster numerics data
    hooks input
    model
    step graph schedule
    evaluation checkpoint
    build trainer
    serving commands __main__
"""
MOST = {"code": 6500, "lines": 11_000, "files": 80, "entries": 22, "longest file": 450}
# What else there is to read, in words as wc counts them; of a project's README,
# tests/template/test_documents.py.
MOST_WORDS = {"README.md": 700, "CONTRIBUTING.md": 400, "docs": 10_000}
MOST_PAGES = 9
MOST_IMPORTED = {"step": 3500, "trainer": 8500}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def modules() -> dict[str, Path]:
    """The modules by dotted name."""
    paths = (path for path in ENGINE.rglob("*.py") if path.name != "__init__.py")
    return {".".join(p.relative_to(ENGINE).with_suffix("").parts): p for p in paths}


def imported(path: Path, everywhere: bool = False) -> set[str]:
    """The engine's modules that one imports when it is imported itself, or anywhere in it."""
    body = ast.parse(path.read_text()).body
    found: set[str] = set()
    for statement in body:
        inner = everywhere or isinstance(statement, ast.Try)
        for node in ast.walk(statement) if inner else [statement]:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ctl_core"):
                assert node.module
                name = node.module.removeprefix("ctl_core").removeprefix(".")
                several = {f"{name}.{alias.name}".lstrip(".") for alias in node.names}
                found |= several & modules().keys() or {name} & modules().keys()
    return found


def reach(name: str) -> set[str]:
    """A module with what it imports, directly or not."""
    reached, todo = set(), {name}
    while todo:
        reached |= todo
        todo = {other for one in todo for other in imported(modules()[one])} - reached
    return reached


def count_code(text: str) -> int:
    """The lines of code: without blanks, comments, docstrings and imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.string.strip():
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - left_out)


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


def test_there_is_no_more_to_read_than_planned() -> None:
    sources = [path for path in ENGINE.rglob("*.*") if path.suffix in (".py", ".md")]
    sources.append(ENGINE / "LICENSE")
    texts = [path.read_text() for path in sources if path.suffix == ".py"]
    found = {
        "code": sum(map(count_code, texts)),
        "lines": sum(len(text.splitlines()) for text in texts),
        "files": len(texts),
        "entries": len({path.relative_to(ENGINE).parts[0] for path in sources}),
        "longest file": max(len(text.splitlines()) for text in texts),
    }
    assert {name: found[name] for name in MOST if found[name] > MOST[name]} == {}


def test_the_documents_are_no_longer_than_planned() -> None:
    root = ENGINE.parent
    pages = sorted((root / "docs").glob("**/*.md"))
    texts = {"docs": pages} | {name: [root / name] for name in MOST_WORDS if name != "docs"}
    found = {
        name: sum(len(path.read_text("utf-8").split()) for path in paths)
        for name, paths in texts.items()
    }
    assert {name: found[name] for name in found if found[name] > MOST_WORDS[name]} == {}
    assert len(pages) <= MOST_PAGES


def test_the_tests_that_documents_name_are_there() -> None:
    """Functions where a link leads, and files."""
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


def test_what_the_step_and_the_trainer_import_is_short() -> None:
    found = {
        name: sum(len(modules()[one].read_text().splitlines()) for one in reach(name))
        for name in MOST_IMPORTED
    }
    assert {name: found[name] for name in found if found[name] > MOST_IMPORTED[name]} == {}


def test_the_supervisor_and_the_command_line_need_no_tensorflow() -> None:
    """Neither they nor what they import."""
    heavy = {
        name
        for name, path in modules().items()
        if "\nimport tensorflow" in path.read_text() or "\nimport keras" in path.read_text()
    }
    for name in ("cluster.supervisor", "commands.cli", "__main__"):
        assert not reach(name) & heavy


def test_what_imports_no_tensorflow_is_typed_strictly() -> None:
    """Not even in a function; the list stands in pyproject.toml."""
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


# The first words of what functions are called; is, has and can ask.
VERBS = """
    accumulate activate add adjust agree apply are assign attribute average begin build call can
    cast change check choose clear close compute convert copy count create cut deal
    decide declare decode define describe die distribute divide draw encode end evaluate explain
    export fetch fill find finish fix flatten fold follow format forward gather get give go has
    hold is join judge keep leave list load locate lock log look make measure merge multiply mute
    name note observe open pack parse pause predict prepare print put quiet quote read record
    refresh refuse reject remove replace report resolve restore run save say separate set settle
    share show skip split start stop suggest sum supervise sync take tell trace train trim
    unfreeze unwrap update use wait walk warn watch weigh widen write
"""
# Names that users know, those of other libraries, and two of the field.
NAMED_OTHERWISE = "main values from_json from_notes handleError numpy atomic_write relative_path"
OF_USERS = {"data", "hooks.defaults", "run.listeners", "run.console"}


def test_functions_are_named_by_verbs() -> None:
    allowed = {*ctl_core.__all__, *NAMED_OTHERWISE.split()}
    wrong = []
    for module in modules().keys() - OF_USERS:
        tree = ast.parse(modules()[module].read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in (*tree.body, *(part for one in classes for part in one.body)):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            is_property = any("property" in ast.unparse(one) for one in node.decorator_list)
            first = node.name.split("_")[0]
            if not is_property and first not in VERBS.split() and node.name not in allowed:
                wrong.append(f"{module}.{node.name}")
    assert wrong == [], "\n".join(wrong)
