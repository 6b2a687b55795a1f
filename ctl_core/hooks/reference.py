"""Formats the table of hooks and the code of the defaults, for ``python -m ctl_core hooks``.

The code is read from the file defaults.py. The module is not imported, because it would import
TensorFlow.
"""

import ast
import functools
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from ctl_core.hooks.spec import Argument, Form, HookSpec, Place
from ctl_core.hooks.table import COMMON_ARGUMENTS, SPECS, TABLE
from ctl_core.run.errors import SetupError, quote, suggest

WIDTH = 100
_DEFAULTS = Path(__file__).with_name("defaults.py")
_RUNS = {
    Place.SETUP: "before training",
    Place.GRAPH: "in the graph, on each replica",
    Place.HOST: "on the host, between two steps",
}
_FOOTER = """\
A hook declares only the arguments that it uses, in any order.
Every hook can also take config and hparams. Hooks that callbacks.py leaves out use their
defaults. `python -m ctl_core hooks NAME` explains one.
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
    """Returns the whole table: the signature, purpose, result and default of each hook."""
    rows = ["".join(f"{line}\n" for line in _format_row(spec)) for spec in TABLE]
    return "\n".join([*rows, _FOOTER])


def format_hook(spec: HookSpec) -> str:
    """Returns the full description of one hook, with its arguments, default and an example."""
    return "".join(f"{line}\n" for line in _list_lines(spec))


def _format_row(spec: HookSpec) -> Iterator[str]:
    mark = ""
    if spec.place is not Place.SETUP:
        mark = f"  [{spec.place.value}]"
    yield from _wrap(f"{spec.signature}{mark}", "", "    ")
    yield from _wrap(f"{spec.purpose}.", "    ", "    ")
    if spec.returns:
        yield from _wrap(f"returns: {spec.returns}", "    ", "        ")
    default = spec.default
    if spec.is_required:
        default = "none: the hook is required"
    yield from _wrap(f"default: {default}", "    ", "        ")


def _list_lines(spec: HookSpec) -> Iterator[str]:
    yield from _wrap(spec.signature, "", "    ")
    yield ""
    yield from _wrap(f"{spec.purpose}. {spec.details}", "", "")
    yield ""
    yield f"runs: {_RUNS[spec.place]}"
    yield f"form: {spec.form.value}"
    if spec.form is not Form.NAMES:
        yield ""
        yield "arguments, of which the hook declares only those that it uses:"
        yield from _list_arguments([*spec.arguments, *COMMON_ARGUMENTS])
    if spec.returns:
        yield ""
        yield from _wrap(f"returns: {spec.returns}", "", "    ")
    if spec.result:
        yield f"or ctl.{spec.result} with these fields:"
        yield from _list_arguments(spec.fields)
    yield ""
    if spec.is_required:
        yield "default: none, the hook is required"
    else:
        yield from _wrap(f"default: {spec.default}", "", "    ")
    source = read_default_source(spec.name)
    if source:
        yield ""
        yield textwrap.indent(source, "    ")
    yield ""
    yield "example:"
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
    """Breaks a text into lines.

    Args:
        text: the text
        first: the indentation of the first line
        others: the indentation of all other lines
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def read_default_source(name: str) -> str:
    """Returns the source code of a hook's default; an empty string if it has no default."""
    return _read_default_sources().get(name, "")


@functools.cache
def _read_default_sources() -> dict[str, str]:
    """Returns the source code of the functions and variables in defaults.py, by name."""
    text = _DEFAULTS.read_text("utf-8")
    sources: dict[str, str] = {}
    for statement in ast.parse(text).body:
        source = ast.get_source_segment(text, statement) or ""
        if isinstance(statement, ast.FunctionDef):
            decorators = [f"@{ast.unparse(node)}\n" for node in statement.decorator_list]
            sources[statement.name] = "".join([*decorators, source])
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            sources[statement.target.id] = source
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            sources[statement.targets[0].id] = source
    return sources
