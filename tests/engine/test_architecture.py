"""Tests the engine's structure: which package may import which, and how strictly each is typed."""

import ast
import functools
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

import ctl_core
from tests.helpers import stubs

ENGINE = Path(ctl_core.__file__).parent
# The engine's packages and modules, from the lowest layer to the highest. Each one imports only
# from names that are listed before it.
LAYERS = """
    types run machine compat
    cluster numerics data
    hooks input
    model
    update step graph compilation schedule
    evaluation checkpoint
    session
    scratch build trainer
    read_only serving
    conversion
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
            assert file.exists(), f"{page}: {name} moved"
            assert f"def {name}(" in file.read_text(), f"{page}: {name} moved"
        gone = {*re.findall(r"\btest_\w+", text)} - files - {name for name, _ in links}
        assert gone == set(), page
    assert linked > 20


def test_only_compat_uses_private_names_of_other_packages() -> None:
    """Modules outside of compat/ import no private modules and read no private attributes."""
    private_modules = re.compile(r"(keras\.src|tensorflow\.(python|core|compiler))\b")
    # Public attributes of named tuples, os and sys whose names begin with an underscore.
    public = {"_replace", "_asdict", "_fields", "_exit", "_current_frames"}
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
    """Neither they nor what they import; and nothing in run/ and machine/ does."""
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
    assert not {name for name in heavy if name.startswith(("run.", "machine."))}


def test_the_engine_is_typed_strictly() -> None:
    """mypy checks each module of the engine strictly; only the default hooks need no types.

    Of TensorFlow and Keras, only private modules are ``Any``.
    """
    settings = tomllib.loads((ENGINE.parent / "pyproject.toml").read_text())["tool"]["mypy"]
    overrides = settings["overrides"]
    (strict,) = (override for override in overrides if override.get("warn_return_any"))
    assert strict["module"] == ["ctl_core.*"]
    for override in overrides[overrides.index(strict) + 1 :]:
        for module in override["module"]:
            if module.startswith("ctl_core"):
                assert override["module"] == ["ctl_core.hooks.defaults"]
                assert override.keys() - {"module"} == {"disallow_untyped_defs"}
            if module.startswith(("tensorflow", "keras")):
                assert re.match(r"tensorflow\.(core|python)\.|keras\.src\.", module)


def test_stubs_have_each_name_of_tensorflow_and_keras_that_the_engine_uses() -> None:
    """mypy does not report names that are missing: tests and scripts may use any name."""
    missing, checked = [], 0
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        if not name.startswith("compat."):  # which imports private modules
            imports = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            assert not [module for module in imports if re.match("tensorflow|keras", module or "")]
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            words = list_words(node)
            if words[0] in ("tf", "keras") and id(node) not in inner:
                checked += 1
                if not is_in_stubs(words):
                    missing.append(f"{name}: {'.'.join(words)}")
    assert missing == []
    assert checked > 1000


def list_words(node: ast.AST) -> list[str]:
    """Returns the parts of a dotted name; the first one is "" if it belongs to another value."""
    words = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    words.append(node.id if isinstance(node, ast.Name) else "")
    return words[::-1]


def is_in_stubs(words: list[str]) -> bool:
    """Returns whether a name such as ``tf.data.Dataset.map`` is in the stubs.

    mypy checks the names of the methods and attributes of a class. The name of a module alone is
    not in the stubs, because the names that follow would be unknown.
    """
    if words[1:] == ["__file__"]:  # mypy knows the names that every module has
        return True
    definition = stubs.Definition({"tf": "tensorflow"}.get(words[0], words[0]), None)
    for word in words[1:]:
        if definition.node is not None:
            return True
        found = stubs.read_definitions(definition.module).get(word)
        if found is None:
            return False
        definition = found
    return definition.node is not None


def make_tensors() -> list[object]:
    with tf.Graph().as_default():
        symbolic = tf.constant(0)
    return [symbolic, tf.constant(0)]


# Objects of the classes that TensorFlow uses instead of a class in the stubs.
EXAMPLES: dict[str, Callable[[], list[object]]] = {
    "tensorflow.Tensor": make_tensors,
    "tensorflow.Variable": lambda: [tf.Variable(0)],
    "tensorflow.compat.v1.ConfigProto": lambda: [tf.compat.v1.ConfigProto()],
    "tensorflow.compat.v1.Event": lambda: [tf.compat.v1.Event()],
    "tensorflow.distribute.StrategyExtended": lambda: [
        tf.distribute.MirroredStrategy(["CPU:0"]).extended
    ],
    "tensorflow.types.experimental.ConcreteFunction": lambda: [
        tf.function(lambda: tf.constant(0), autograph=False).get_concrete_function()
    ],
    "tensorflow.types.experimental.PolymorphicFunction": lambda: [tf.function(lambda: 0)],
}


def test_names_of_the_stubs_exist() -> None:
    """TensorFlow and Keras have each name in the stubs; functions have the same arguments."""
    wrong, checked = [], 0
    for module in stubs.list_modules():
        place = functools.reduce(
            getattr, module.split(".")[1:], importlib.import_module(module.split(".")[0])
        )
        for name, definition in stubs.read_definitions(module).items():
            if stubs.is_private(name):
                continue
            checked += 1
            found = getattr(place, name, None)
            if found is None and name != "newaxis":
                wrong.append(f"{module}.{name}")
            elif isinstance(definition.node, ast.FunctionDef):
                wrong += compare_arguments(f"{module}.{name}", definition.node, found)
            elif isinstance(definition.node, ast.ClassDef):
                kinds = [found, *EXAMPLES.get(f"{module}.{name}", list)()]
                for member, node in stubs.read_members(definition).items():
                    wrong += compare_member(f"{module}.{name}.{member}", node, kinds)
    assert wrong == []
    assert checked > 200


def compare_member(name: str, stub: ast.FunctionDef | ast.AnnAssign, kinds: list[Any]) -> list[str]:
    """Returns what is wrong with a method or an attribute of a class in a stub.

    Args:
        name: the name of the member, with those of its class and its module
        stub: the definition in the stub
        kinds: the class, and objects of classes that TensorFlow uses instead of the class
    """
    own = name.rpartition(".")[2]
    for kind in kinds:
        if hasattr(kind, own):
            if isinstance(stub, ast.FunctionDef) and kind is kinds[0]:
                return compare_method(name, stub, kinds[0])
            return []
    if assigns_attribute(kinds[0], own):
        return []
    return [name]


def compare_method(name: str, stub: ast.FunctionDef, kind: type) -> list[str]:
    """Returns what is wrong with a method or a property of a class in a stub."""
    is_property = "property" in map(ast.unparse, stub.decorator_list)
    if is_property != (not inspect.isroutine(inspect.getattr_static(kind, stub.name))):
        return [f"{name} is a property in the stub or in the class, and not in both"]
    return [] if is_property else compare_arguments(name, stub, getattr(kind, stub.name))


def assigns_attribute(kind: type, name: str) -> bool:
    """Returns whether the module of a class or of a base class assigns ``self.NAME``."""
    names = {base.__module__ for base in kind.__mro__}
    files = [getattr(sys.modules[module], "__file__", None) or "" for module in names]
    return any(f"self.{name} = " in Path(f).read_text() for f in files if f.endswith(".py"))


def compare_arguments(name: str, stub: ast.FunctionDef, function: object) -> list[str]:
    """Returns what is wrong with the arguments of a function in a stub.

    The stub may leave out the last ones. If it leaves out others, the rest are keywords.
    """
    if not callable(function) or re.match(r"__(?!init__|call__)", stub.name):
        return []
    try:
        actual = inspect.signature(function).parameters.values()
    except ValueError:  # a function that is written in C
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in actual):
        return []
    places = [parameter.name for parameter in actual]
    unnamed = len(stub.args.posonlyargs)
    expected = [argument.arg for argument in stub.args.args]
    keywords = {argument.arg for argument in stub.args.kwonlyargs}
    if places[unnamed : unnamed + len(expected)] == expected and keywords <= {*places}:
        return []
    return [f"{name}({', '.join(expected)}), not ({', '.join(places)})"]


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
