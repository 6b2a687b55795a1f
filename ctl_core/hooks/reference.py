"""Describes hooks for ``python -m ctl_core hooks``, and reads the code of their defaults.

The code is read from the file defaults.py. The module is not imported, because it would import
TensorFlow.
"""

import ast
import functools
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ctl_core.hooks.spec import Argument, Form, HookSpec, Place
from ctl_core.hooks.table import COMMON_ARGUMENTS, SPECS, TABLE
from ctl_core.run.errors import SetupError, quote, suggest

_MOST_COLUMNS = 100
_DEFAULTS = Path(__file__).with_name("defaults.py")
_RUNS = {
    Place.SETUP: "used before training",
    Place.GRAPH: "traced into the graph, and computed on each replica",
    Place.HOST: "called on the host, between two steps",
}
_GROUPS = {
    Place.SETUP: "Optional, called before training:",
    Place.GRAPH: "Optional, part of the graph of each step:",
    Place.HOST: "Optional, called between two steps, as plain Python:",
}
_FOOTER = """
A hook is a function in callbacks.py. It declares only the arguments that it
uses, in any order.

  python -m ctl_core hooks grad_pre  everything about one hook
  python -m ctl_core hooks --stub    all hooks as code, with their defaults
"""


def find_spec(name: str) -> HookSpec:
    """Returns the row of the table for a hook.

    Raises:
        SetupError: there is no such hook; the message suggests the most similar name.
    """
    if name in SPECS:
        return SPECS[name]
    hint = suggest(name, SPECS) or "; `python -m ctl_core hooks` lists all."
    raise SetupError(f"there is no hook {quote(name)}{hint}")


def format_table() -> str:
    """Returns a list of all hooks with their purposes: the required ones, then the others."""
    lines = ["Required:", *_list_purposes([spec for spec in TABLE if spec.is_required])]
    for place, title in _GROUPS.items():
        group = [spec for spec in TABLE if spec.place is place and not spec.is_required]
        lines += ["", title, *_list_purposes(group)]
    return "".join(f"{line}\n" for line in lines) + _FOOTER


def format_hook(spec: HookSpec) -> str:
    """Returns the full description of one hook, with its arguments, default and an example."""
    return "".join(f"{line}\n" for line in _list_lines(spec))


def _list_purposes(specs: Sequence[HookSpec]) -> Iterator[str]:
    """Yields a line or more for each hook: its name, then its purpose."""
    longest = max(len(spec.name) for spec in TABLE)
    for spec in specs:
        yield from _wrap(spec.purpose, f"  {spec.name:{longest}}  ", " " * (longest + 4))


def _list_lines(spec: HookSpec) -> Iterator[str]:
    yield from _wrap(spec.signature, "", " " * len(f"{spec.name}("))
    yield ""
    yield from _wrap(f"{spec.purpose}. {spec.details}", "", "")
    yield ""
    yield f"It is {spec.form.value}, {_RUNS[spec.place]}."
    if spec.form is not Form.NAMES:
        yield ""
        yield "Arguments; declare only those that you use:"
        yield from _list_arguments([*spec.arguments, *COMMON_ARGUMENTS])
    if spec.returns:
        yield ""
        yield "Returns:"
        yield from _wrap(spec.returns, "    ", "    ")
    if spec.result:
        yield ""
        yield f"Or returns ctl.{spec.result}, a named tuple:"
        yield from _list_arguments(spec.fields)
    yield ""
    source = read_default_source(spec.name)
    if spec.is_required:
        yield "Default: none, the hook is required."
    elif source:
        yield "Default:"
        yield ""
        yield textwrap.indent(source, "    ")
    else:
        yield from _wrap(f"Default: {spec.default}.", "", "    ")
    yield ""
    yield "Example:"
    yield ""
    yield textwrap.indent(spec.example.rstrip("\n"), "    ")


def _list_arguments(arguments: Sequence[Argument]) -> Iterator[str]:
    """Yields one or more lines for each argument: its name, then its type, shape and meaning."""
    longest = max(len(argument.name) for argument in arguments)
    for argument in arguments:
        head = f"    {argument.name:{longest}}  "
        text = f"{argument.described_type}: {argument.meaning}"
        yield from _wrap(text, head, " " * len(head))


def _wrap(text: str, first: str, others: str) -> list[str]:
    """Breaks a text into lines that fit the terminal.

    Args:
        text: the text
        first: the indent of the first line
        others: the indent of the other lines
    """
    columns = shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns
    return textwrap.wrap(
        text,
        min(columns, _MOST_COLUMNS),
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def read_default_source(name: str) -> str:
    """Returns the code of a hook's default as callbacks.py has it; empty if there is none.

    The code of a schedule begins with the functions that it names.
    """
    return _read_default_sources().get(name, "")


@functools.cache
def _read_default_sources() -> dict[str, str]:
    """Reads the definitions of defaults.py by name: functions, and assignments without types."""
    text = _DEFAULTS.read_text("utf-8")
    sources: dict[str, str] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef):
            decorators = [f"@{ast.unparse(node)}\n" for node in statement.decorator_list]
            source = ast.get_source_segment(text, statement) or ""
            sources[statement.name] = "".join([*decorators, source])
        elif isinstance(statement, ast.AnnAssign | ast.Assign):
            name = ast.unparse(_find_target(statement))
            sources[name] = _read_assignment(text, name, statement, sources)
    return sources


def _find_target(statement: ast.AnnAssign | ast.Assign) -> ast.expr:
    """Returns the target of an assignment, or the first one of several."""
    if isinstance(statement, ast.AnnAssign):
        return statement.target
    return statement.targets[0]


def _read_assignment(
    text: str, name: str, statement: ast.AnnAssign | ast.Assign, sources: Mapping[str, str]
) -> str:
    """Returns the code of an assignment, preceded by the functions that its dict names.

    Args:
        text: the file
        name: the name that is assigned to
        statement: the assignment
        sources: the functions before it, by name
    """
    value = statement.value
    assert value is not None, f"{name} has a type only"
    functions: list[str] = []
    if isinstance(value, ast.Dict):
        functions = [ast.unparse(node) for node in value.values]
    definitions = [sources[function] for function in functions]
    return "\n\n\n".join([*definitions, f"{name} = {ast.get_source_segment(text, value)}"])
