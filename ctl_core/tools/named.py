"""What commands about runs are given: their flags, and the run that a word names."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import NoReturn

from ctl_core.errors import SetupError, one_line, reason
from ctl_core.files import from_here
from ctl_core.layers import environment, read_file
from ctl_core.settings import Config, nearest, shown


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        command = self.prog.split()[-1]
        if flag := re.match("unrecognized arguments: (--?[^ =]+)", message):
            raise SetupError(
                f"{command}: unknown flag {flag[1]}"
                f"{nearest(flag[1], self._option_string_actions) or '; --help shows them.'}"
            )
        if word := re.match("unrecognized arguments: (.+)", message):
            raise SetupError(f"{command}: unexpected word {shown(word[1])}; --help shows its use.")
        if missing := re.search("arguments are required: (NAME|RUN)$", message):
            what = "the run" if missing[1] == "NAME" else "the runs"
            example = f"{command} a" if missing[1] == "NAME" else f"{command} a b"
            raise SetupError(
                f"{command}: name {what}, such as {example}; python -m ctl_core runs lists them."
            )
        if found := re.fullmatch(r"argument (?:-\w/)?--([\w-]+): (.+)", one_line(message, 1000)):
            raise SetupError(f"{found[1].replace('-', '_')}: {_in_our_words(found[2])}")
        raise SetupError(f"{command}: {one_line(message)}.")


def _in_our_words(problem: str) -> str:
    """Returns what argparse says of a flag's value as the settings say it."""
    if found := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", problem):
        choices = found[2].replace("'", "").split(", ")
        near = nearest(found[1], choices) or f"; expected one of {', '.join(choices)}."
        return f"{shown(found[1])}{near}"
    for theirs, ours in (
        ("invalid int value: ", "expected a whole number, got "),
        ("invalid float value: ", "expected a number, got "),
        ("expected one argument", "expected a value after it"),
        ("ignored explicit argument ", "takes no value, got "),
    ):
        problem = problem.replace(theirs, ours)
    return f"{problem}."


def parser_of(command: str, text: str, name: bool = False) -> argparse.ArgumentParser:
    """Returns the parser of a command about runs, or about one of which it takes the ``name``."""
    parser = _Parser(prog=f"python -m ctl_core {command}", description=text, allow_abbrev=False)
    if name:
        parser.add_argument("name", metavar="NAME", help="of the run")
    help_ = "folder that holds the runs (default: that of config.yaml)"
    parser.add_argument("--runs-dir", type=Path, default=None, metavar="FOLDER", help=help_)
    parser.add_argument("--debug", action="store_true", help="full tracebacks")
    return parser


def runs_dir_of(given: Path | None) -> Path:
    """Returns the folder of the runs: the one given, or that of config.yaml."""
    if given is not None:
        return given
    env, named = environment(os.environ)
    value = Config().runs_dir
    for path in named or ["config.yaml"]:
        value = read_file(Path(path), required=bool(named)).get("runs_dir", ("", value))[1]
    return Path(str(env.get("runs_dir", ("", value))[1]))


def folders_in(given: Path | None) -> list[Path]:
    """Returns the folders of the runs, by name.

    Raises:
        SetupError: they cannot be looked for.
    """
    folder = runs_dir_of(given)
    if given is not None and not folder.is_dir():
        raise SetupError(f"runs_dir: {shown(str(folder))} is no folder.")
    try:
        list(folder.iterdir() if folder.exists() else ())  # glob says nothing of one it cannot read
    except OSError as error:
        why = reason(error)
        raise SetupError(f"runs_dir: {shown(str(folder))} cannot be read: {why}.") from error
    marks = ("config.yaml", "process.json", "train.log")
    return sorted({path.parent for mark in marks for path in folder.glob(f"[!.]*/{mark}")})


def find_folder(given: Path | None, name: str) -> Path:
    """Returns the folder of a run.

    Raises:
        SetupError: there is none of that name.
    """
    folders = {folder.name: folder for folder in folders_in(given)}
    if name not in folders:
        there = f" (there: {one_line(', '.join(sorted(folders)), 100)})" if folders else ""
        raise SetupError(
            f"no run {shown(name)} in {from_here(runs_dir_of(given))}"
            f"{nearest(name, folders)}{there}"
        )
    return folders[name]
