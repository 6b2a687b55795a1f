"""Breaks the engine one line at a time, and counts how many of these mistakes the tests find.

    python -m scripts.mutations draw                       writes a new list
    python -m scripts.mutations run                        tries each one with make check
    python -m scripts.mutations run --command "make test"  tries each one with make test

The list, scripts/mutations.yaml, has one line of each of 30 modules of ctl_core. A seed decides
which, so nobody chooses mistakes that the tests are known to find. A mistake changes a comparison,
a condition, an operator or a number; the module can still be imported. Some mistakes change
nothing that a user notices, so not all of them can be found.

``run`` changes the files of this checkout, and restores them after each mistake. It refuses to
start if the checkout has changes that are not committed. Tests stop at their first failure.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_suffix(".yaml")
NUMBER = 30
SEED = 63
# The time limit (seconds). A mistake that makes a test wait forever counts as found.
LIMIT = 1800

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
}
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (" + ", " - "),
    ast.Sub: (" - ", " + "),
    ast.Mult: (" * ", " / "),
    ast.Div: (" / ", " * "),
    ast.FloorDiv: (" // ", " * "),
    ast.Mod: (" % ", " // "),
    ast.BitOr: (" | ", " & "),
    ast.BitAnd: (" & ", " | "),
}


class Mutation(NamedTuple):
    """A mistake: a line of a module, and what it is replaced by."""

    file: str
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Returns the source of the module with the mistake.

        Raises:
            ValueError: the module does not have exactly one such line.
        """
        lines = text.splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.strip() == self.before]
        if len(places) != 1:
            raise ValueError(f"{self.file} has {len(places)} lines {self.before!r}; draw anew")
        line = lines[places[0]]
        lines[places[0]] = line.replace(self.before, self.after)
        return "".join(lines)


def list_mutations(path: Path) -> list[Mutation]:
    """Returns all mistakes that can be made in one line of a module."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    name = path.relative_to(ROOT).as_posix()
    mutations = []
    for node in walk_code(ast.parse(text)):
        for line_number, column, end, new in list_replacements(node, lines):
            before = lines[line_number]
            after = before[:column] + new + before[end:]
            mutation = Mutation(name, before.strip(), after.strip())
            if [line.strip() for line in lines].count(mutation.before) == 1:
                mutations.append(mutation)
    return mutations


def walk_code(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions of a module, without those of annotations, assertions and errors."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Assert | ast.Raise) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from walk_code(child)


def list_replacements(node: ast.expr, lines: Sequence[str]) -> Iterator[tuple[int, int, int, str]]:
    """Yields the number of a line, the columns to replace, and the text to insert.

    Args:
        node: the expression to change
        lines: the lines of the module
    """
    if isinstance(node, ast.Constant):
        new = change_constant(node.value)
        if new is not None and node.lineno == node.end_lineno and node.end_col_offset is not None:
            yield node.lineno - 1, node.col_offset, node.end_col_offset, new
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.lineno - 1, node.col_offset, node.col_offset + len("not "), ""
        return
    between = find_operator(node)
    if between is None:
        return
    left, right, (old, new) = between
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    line_number = right.lineno - 1
    column = lines[line_number].find(old, left.end_col_offset, right.col_offset + 1)
    if column >= 0:
        yield line_number, column, column + len(old), new


def find_operator(node: ast.expr) -> tuple[ast.expr, ast.expr, tuple[str, str]] | None:
    """Returns the first two operands of an expression, its operator, and another operator."""
    if isinstance(node, ast.Compare):
        return node.left, node.comparators[0], COMPARISONS[type(node.ops[0])]
    if isinstance(node, ast.BoolOp):
        words = (" and ", " or ")
        if isinstance(node.op, ast.Or):
            words = (" or ", " and ")
        return node.values[0], node.values[1], words
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return node.left, node.right, OPERATORS[type(node.op)]
    return None


def change_constant(value: object) -> str | None:
    """Returns the code of another constant; None for strings, None and the like."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int | float):
        return repr(value + 1)
    return None


def can_be_imported(mutation: Mutation) -> bool:
    """Returns whether the module can still be imported with the mistake."""
    path = ROOT / mutation.file
    parts = mutation.file.removesuffix(".py").split("/")
    module = types.ModuleType(".".join([*parts[:-1], f"mutated_{parts[-1]}"]))
    module.__package__ = ".".join(parts[:-1])
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(mutation.apply(path.read_text("utf-8")), str(path), "exec"), vars(module))
    except Exception:
        return False
    finally:
        del sys.modules[module.__name__]
    return True


def draw(seed: int, number: int) -> list[Mutation]:
    """Returns one mistake for each of a number of modules, which the seed chooses."""
    randomness = random.Random(seed)
    modules = sorted((ROOT / "ctl_core").rglob("*.py"))
    randomness.shuffle(modules)
    drawn = []
    for path in modules:
        mutations = list_mutations(path)
        randomness.shuffle(mutations)
        drawn += [mutation for mutation in mutations if can_be_imported(mutation)][:1]
        if len(drawn) == number:
            break
    return sorted(drawn)


def read() -> list[Mutation]:
    """Returns the mistakes of the list."""
    return [Mutation(**entry) for entry in yaml.safe_load(FILE.read_text("utf-8"))]


def is_found(command: str) -> bool:
    """Runs tests, and returns whether they have failed."""
    environment = {**os.environ, "PYTEST_ADDOPTS": "--exitfirst"}
    process = subprocess.Popen(
        command, shell=True, cwd=ROOT, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return process.wait(LIMIT) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def run(command: str, numbers: Sequence[int]) -> None:
    """Tries mistakes one after another, and prints which ones the command finds.

    Args:
        command: a shell command that runs tests
        numbers: the positions of the mistakes in the list, from 1; all if empty

    Raises:
        SystemExit: the checkout has changes, or the command fails without a mistake.
    """
    changes = subprocess.run(
        ["git", "status", "--porcelain", "ctl_core"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if changes.stdout:
        sys.exit("error: ctl_core has changes that are not committed; commit or stash them first.")
    if is_found(command):
        sys.exit(f"error: {command} fails without a mistake; repair that first.")
    found = 0
    mutations = read()
    chosen = numbers or range(1, len(mutations) + 1)
    for number in chosen:
        mutation = mutations[number - 1]
        path = ROOT / mutation.file
        text = path.read_text("utf-8")
        begun = time.monotonic()
        try:
            path.write_text(mutation.apply(text), "utf-8")
            word = "missed"
            if is_found(command):
                word = "found"
                found += 1
        finally:
            path.write_text(text, "utf-8")
        seconds = time.monotonic() - begun
        print(f"{number:2d} {word:6} {seconds:4.0f} s  {mutation.file}", flush=True)
        print(f"     - {mutation.before}\n     + {mutation.after}", flush=True)
    print(f"{command} finds {found} of {len(chosen)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="action", required=True)
    drawing = commands.add_parser("draw", help="write the list anew")
    drawing.add_argument("--seed", type=int, default=SEED)
    drawing.add_argument("--number", type=int, default=NUMBER, help="modules to break")
    running = commands.add_parser("run", help="try the mistakes")
    running.add_argument("--command", default="make check")
    running.add_argument("numbers", nargs="*", type=int, help="positions in the list; all if none")
    arguments = parser.parse_args()
    if arguments.action == "draw":
        entries = [mutation._asdict() for mutation in draw(arguments.seed, arguments.number)]
        FILE.write_text(yaml.safe_dump(entries, sort_keys=False, width=200), "utf-8")
    else:
        run(arguments.command, arguments.numbers)


if __name__ == "__main__":
    main()
