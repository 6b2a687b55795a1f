"""Reads the stubs of TensorFlow and Keras: the names that they define, and their arguments."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "stubs"


class Definition(NamedTuple):
    """The definition of a name in a stub.

    Attributes:
        module: the module whose stub contains the definition
        node: the definition; None if the name is a module
    """

    module: str
    node: ast.stmt | None


def find_file(module: str) -> Path | None:
    """Returns the stub of a module, or None if it has none."""
    place = FOLDER.joinpath(*module.split("."))
    for file in (place / "__init__.pyi", place.with_suffix(".pyi")):
        if file.exists():
            return file
    return None


def list_modules() -> list[str]:
    """Returns the modules that have a stub and that exist in TensorFlow or Keras."""
    files = [file.relative_to(FOLDER) for file in FOLDER.rglob("*.pyi")]
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    return sorted(name for name in names if not is_private(name.rpartition(".")[2]))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def read_definitions(module: str) -> dict[str, Definition]:
    """Returns the definitions in the stub of a module, by name.

    As for type checkers, ``from tensorflow import nest as nest`` defines a name, whereas ``from
    tensorflow import nest`` does not.
    """
    file = find_file(module)
    assert file is not None, module
    definitions: dict[str, Definition] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = Definition(module, node)
        elif isinstance(node, ast.AnnAssign):
            definitions[ast.unparse(node.target)] = Definition(module, node)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            for alias in node.names:
                if alias.name == alias.asname:
                    definitions[alias.name] = _follow(f"{node.module}.{alias.name}")
    definitions.pop("__getattr__", None)
    return definitions


def _follow(name: str) -> Definition:
    """Returns what a name that a stub imports stands for."""
    if find_file(name) is not None:
        return Definition(name, None)
    module, _, own = name.rpartition(".")
    return read_definitions(module)[own]


def read_members(definition: Definition) -> dict[str, ast.FunctionDef | ast.AnnAssign]:
    """Returns the methods and attributes of a class, with inherited ones, by name."""
    assert isinstance(definition.node, ast.ClassDef)
    members: dict[str, ast.FunctionDef | ast.AnnAssign] = {}
    for base in definition.node.bases:
        inherited = read_definitions(definition.module).get(ast.unparse(base))
        if inherited is not None:
            members |= read_members(inherited)
    for node in definition.node.body:
        if isinstance(node, ast.FunctionDef):
            members[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            members[ast.unparse(node.target)] = node
    members.pop("__getattr__", None)
    return members
