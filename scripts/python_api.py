"""Writes docs/python-api.md from the docstrings of the public names (make generated).

The modules are read, not imported, because TensorFlow takes seconds to import.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ctl_core
from ctl_core.hooks.table import SPECS

ENGINE = Path(ctl_core.__file__).parent
INTRODUCTION = """\
# Python API

You can train, evaluate and load models from Python, for example in a script or a notebook:

```python
import callbacks
import ctl_core as ctl

config = ctl.load_config("config.yaml", steps=20, run_name="api")
state = ctl.train(callbacks, config)
```

All public names are in `ctl_core`, which this documentation imports as `ctl`, and in `ctl.data`.
Hooks and scripts may use them. Everything else in the engine may change with any version.

The entries below are generated from docstrings, so `help(ctl.train)` prints the same text.
"""


class Group(NamedTuple):
    """A section of the page: its title, a text before its entries, and the names of the entries."""

    title: str
    text: str
    names: Sequence[str]


GROUPS = (
    Group(
        "Training and loading",
        "[Python scripts and notebooks](notebooks.md) and [serving](serving.md) have examples.",
        ("load_config", "train", "check", "load"),
    ),
    Group(
        "State and LoadedModel",
        "`train` and `check` return a `State`; `load` returns a `LoadedModel`.",
        ("State", "LoadedModel"),
    ),
    Group(
        "Listeners",
        "A listener sends the values of a run elsewhere, for example to an experiment tracker.\n"
        "[Experiment trackers](experiment-trackers.md) has an example.",
        ("Listener",),
    ),
    Group(
        "Helpers for host hooks",
        "[Running code between the steps](host-hooks.md) has examples.",
        ("report", "show_step", "deferred", "StopTraining"),
    ),
    Group(
        "Helpers for graph hooks",
        "Functions for your own versions of hooks. The default hooks, whose source is in the\n"
        "[hook reference](hook-reference.md), use them, too.",
        (
            *("unpack", "weighted", "regularization", "trainable_variables"),
            *("nan_to_zero", "clip_by_global_norm"),
            "leading_dimension",
        ),
    ),
    Group(
        "Results of hooks",
        "Hooks can return these named tuples. A plain tuple of the same values works, too.",
        ("Objective", "Update", "EvalLoss", "Checkpointing"),
    ),
    Group(
        "Values from all replicas",
        "[Exchanging values between replicas](exchanging-values.md) has examples.",
        ("all_gather", "all_reduce", "row_offset", "replica_id", "num_replicas"),
    ),
    Group(
        "Settings and errors",
        "The fields of `Config` are the [settings](settings.md). [Errors](errors.md) explains the "
        "most frequent messages.",
        ("Config", "CtlError", "SetupError", "RunError"),
    ),
)
DATA = Group(
    "ctl.data",
    "Functions that you can use in `create_dataset`. [Data pipelines](data.md) has examples.",
    (
        *("index_shuffle", "index_shuffle_with_seeds", "with_seeds", "own_rows"),
        *("bucket_by_length", "split_of", "fold_of", "hash_of"),
    ),
)
# The attributes that are shown, by class. The docstrings of these classes list internal ones, too.
SHOWN = {
    "State": (
        *("step", "metrics", "history", "train_model", "train_loss", "optimizer", "lr"),
        *("hook_state", "config", "run_dir", "ckpt", "manager", "stopped_by", "ended", "diverged"),
    ),
    "LoadedModel": (
        *("model", "input_spec", "output_spec", "step", "metrics", "settings", "run_batch"),
    ),
}
# The sections of a docstring that become tables, with the heading of the first column.
_TABLES = {"Args": "argument", "Attributes": "attribute"}
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):{1,2}$")


@dataclasses.dataclass(frozen=True)
class Docstring:
    """A docstring in parts.

    Attributes:
        text: the paragraphs before the first section
        items: the entries of Args, Attributes and Raises, by section and name
        returns: the text of Returns
        example: the code of Example
    """

    text: str
    items: Mapping[str, Mapping[str, str]]
    returns: str
    example: str


def parse_docstring(docstring: str) -> Docstring:
    """Splits a docstring into its sections."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in inspect.cleandoc(docstring).splitlines():
        heading = _SECTION.match(line)
        if heading is not None:
            current = heading[1]
            sections[current] = []
        elif current and line and not line.startswith(" "):
            # A paragraph after a section belongs to the text.
            current = ""
            sections[current] += ["", line]
        else:
            sections[current].append(line)
    texts = {name: textwrap.dedent("\n".join(lines)).strip() for name, lines in sections.items()}
    return Docstring(
        text=texts[""],
        items={name: parse_items(texts.get(name, "")) for name in ("Args", "Attributes", "Raises")},
        returns=texts.get("Returns", ""),
        example=texts.get("Example", ""),
    )


def parse_items(text: str) -> dict[str, str]:
    """Returns the entries ``name: meaning`` of a section; continuation lines are indented."""
    joined = re.sub(r"\n +", " ", text)
    pairs = [line.partition(": ") for line in joined.splitlines() if line]
    return {name: meaning for name, _, meaning in pairs}


def format_text(text: str) -> str:
    """Returns the text of a docstring in Markdown; the names of hooks become links."""

    def format_code(match: re.Match[str]) -> str:
        code = f"`{match[1]}`"
        if match[1] in SPECS:
            return f"[{code}](hook-reference.md#{match[1]})"
        return code

    return re.sub(r"``(.+?)``", format_code, text, flags=re.DOTALL)


def format_call(name: str, arguments: Sequence[str]) -> str:
    """Returns ``name(argument, ...)``, in several lines if it is long."""
    text = ", ".join(arguments)
    if len(name) + len(text) < 78:
        return f"{name}({text})"
    lines = textwrap.wrap(f"{text},", 78, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([f"{name}(", *lines, ")"])


def list_arguments(arguments: ast.arguments) -> list[str]:
    """Returns the arguments of a function, without their types and without ``self``."""
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in [*names, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    if arguments.args and arguments.args[0].arg == "self":
        arguments.args.pop(0)
    text = ast.unparse(arguments)
    return text.split(", ") if text else []


def format_table(head: str, rows: Mapping[str, str]) -> str:
    """Returns a table of names and meanings; "" if there are no rows."""
    if not rows:
        return ""
    lines = [f"`{name}` | {format_text(meaning)}" for name, meaning in rows.items()]
    return "\n".join([f"{head} | meaning", "---|---", *lines]) + "\n"


def describe(docstring: Docstring) -> Iterator[str]:
    """Yields the paragraphs of an entry below its signature."""
    yield format_text(docstring.text) + "\n"
    if docstring.example:
        yield f"```python\n{docstring.example}\n```\n"
    for name, head in _TABLES.items():
        yield format_table(head, docstring.items[name])
    if docstring.returns:
        yield f"**Returns** {format_text(docstring.returns)}\n"
    if docstring.items["Raises"]:
        yield "**Raises**\n"
        raised = docstring.items["Raises"].items()
        yield "\n".join(f"- `{name}`: {format_text(text)}" for name, text in raised) + "\n"


def describe_function(prefix: str, function: ast.FunctionDef) -> Iterator[str]:
    """Yields the heading, signature and docstring of a function."""
    yield f"### {function.name}\n"
    signature = format_call(f"{prefix}{function.name}", list_arguments(function.args))
    yield f"```python\n{signature}\n```\n"
    yield from describe(parse_docstring(ast.get_docstring(function) or ""))


def list_members(cls: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Yields the public methods and properties of a class, and ``__call__``."""
    for member in cls.body:
        if not isinstance(member, ast.FunctionDef):
            continue
        if member.name == "__call__" or not member.name.startswith("_"):
            yield member


def is_property(member: ast.FunctionDef) -> bool:
    """Returns True if a method is decorated as a property."""
    return any(ast.unparse(decorator) == "property" for decorator in member.decorator_list)


def list_attributes(cls: ast.ClassDef, docstring: Docstring) -> dict[str, str]:
    """Returns the meaning of each attribute that is shown, also of properties."""
    attributes = dict(docstring.items["Attributes"])
    for member in list_members(cls):
        if is_property(member):
            first, _, _ = (ast.get_docstring(member) or "").partition("\n\n")
            meaning = first.replace("\n", " ").removesuffix(".")
            attributes[member.name] = meaning[0].lower() + meaning[1:]
    shown = SHOWN.get(cls.name, tuple(attributes))
    return {name: attributes[name] for name in shown}


def list_fields(cls: ast.ClassDef) -> Iterator[str]:
    """Yields the fields of a named tuple as arguments, with their defaults."""
    for field in cls.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        name = ast.unparse(field.target)
        if field.value is None:
            yield name
        else:
            yield f"{name}={ast.unparse(field.value)}"


def describe_class(cls: ast.ClassDef) -> Iterator[str]:
    """Yields the heading, fields, docstring and methods of a class."""
    yield f"### {cls.name}\n"
    if "NamedTuple" in map(ast.unparse, cls.bases):
        yield f"```python\n{format_call(f'ctl.{cls.name}', [*list_fields(cls)])}\n```\n"
    docstring = parse_docstring(ast.get_docstring(cls) or "")
    attributes = list_attributes(cls, docstring)
    items = {**docstring.items, "Attributes": attributes}
    yield from describe(dataclasses.replace(docstring, items=items))
    for member in list_members(cls):
        if is_property(member):
            continue
        function = f"{cls.name}.{member.name}"
        if member.name == "__call__":
            function = "served"
        yield f"```python\n{format_call(function, list_arguments(member.args))}\n```\n"
        yield from describe(parse_docstring(ast.get_docstring(member) or ""))


def read_definitions(module: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Returns the functions and classes that a module of the engine defines, by name."""
    source = (ENGINE / f"{module.replace('.', '/')}.py").read_text("utf-8")
    return {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


def describe_group(group: Group, homes: Mapping[str, str], prefix: str) -> Iterator[str]:
    """Yields the section of a group.

    Args:
        group: the group
        homes: the module of each name
        prefix: the module in front of the names of functions in signatures, such as ``ctl.``
    """
    yield f"## {group.title}\n"
    if group.text:
        yield f"{group.text}\n"
    for name in group.names:
        definition = read_definitions(homes[name])[name]
        if isinstance(definition, ast.ClassDef):
            yield from describe_class(definition)
        else:
            yield from describe_function(prefix, definition)


def join(paragraphs: Iterable[str]) -> str:
    """Joins paragraphs, with an empty line between two of them."""
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def write_python_api() -> str:
    """Returns the page, with an entry for each public name."""
    paragraphs = [INTRODUCTION]
    for group in GROUPS:
        paragraphs += describe_group(group, ctl_core._HOME, "ctl.")
    paragraphs += describe_group(DATA, dict.fromkeys(DATA.names, "data"), "ctl.data.")
    return join(paragraphs)
