"""The words of a command line: flags for settings and for the options of a command."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from typing import Any, Literal, get_args

from ctl_core.errors import SetupError
from ctl_core.layers import ENV_PREFIX, Layer, Word, checked, laid_over, read_text, read_value
from ctl_core.options import COMMANDS, options_of
from ctl_core.settings import SETTINGS, kind_of, label, nearest, shown


def read_flags(command: str, argv: Sequence[str]) -> Layer:
    """Reads the flags, of settings and of the command's options.

    Raises:
        SetupError: one is unknown, or lacks its value.
    """
    words, hparams = _split_hparams(argv)
    settings = options_of(command).model_fields | dict(SETTINGS)
    try:
        found, others = _parser(command).parse_known_args(words)
    except argparse.ArgumentError as error:
        flag, _, opposite = str(error.argument_name).partition("/")
        wrong = f" takes no value; the opposite is {opposite}." if opposite else None
        raise SetupError(f"{flag}{wrong or ': expected a value after it.'}") from error
    for word in others:
        flag = label(word.partition("=")[0])
        if not flag.startswith("-"):
            name = f"a run as {'--run-name NAME' if command == 'train' else f'{command} NAME'}"
            raise SetupError(
                f"unexpected word {shown(word)}: settings are given as --name value, {name}."
            )
        names = [name.replace("_", "-") for name in settings]
        near = nearest(flag.strip("-").replace("_", "-"), names, "--")
        raise SetupError(f"unknown setting {flag}{near}")
    layer = {name: (name, read_text(settings[name], text)) for name, text in vars(found).items()}
    return layer | ({"hparams": ("--hparams", hparams)} if hparams else {})


def _split_hparams(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes the flags for hparams out; ``--hparams.a.b 3`` is {a: {b: 3}}.

    Returns:
        The other flags, and the values.
    """
    others: list[str] = []
    found: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        flag, equals, text = word.partition("=")
        first, *names = flag.split(".")
        if first != "--hparams":
            others.append(word)
            continue
        if not equals:
            text = next(words, "--")
        where = label(flag)
        if not all(names) or (not equals and text.startswith("--")):
            raise SetupError(f"{where}: expected a name and a value: --hparams.width 64.")
        read = read_value(text)
        value: Any = read if isinstance(read, dict) else Word(text)
        for name in reversed(names):
            read, value = {name: read}, {name: value}
        checked({"hparams": (where, read)})
        found = laid_over(found, value, "")
    return others, found


@functools.cache
def _parser(command: str) -> argparse.ArgumentParser:
    """Builds the parser of one command: its own options, ``--config`` and every setting."""
    parser = argparse.ArgumentParser(
        prog=f"python -m ctl_core {command}" + " [NAME]" * (command != "train"),
        description=f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}"
        + ", that of the name, or else the newest" * (command != "train")
        + ". Settings come from "
        "the defaults, then config.yaml, or the run's own where it is there already, then the "
        f"environment ({ENV_PREFIX}BATCH_SIZE=32), then these flags.",
        exit_on_error=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, setting in (options_of(command).model_fields | dict(SETTINGS)).items():
        kind, flag = kind_of(setting), "--" + name.replace("_", "-")
        default = json.dumps(setting.get_default(call_default_factory=True)).strip('"')
        text = f"{setting.description} (default: {default})".replace("%", "%%")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, dest=name, help=text)
            continue
        choices = f"{{{','.join(map(str, get_args(setting.annotation)))}}}"
        metavar = {int: "N", float: "X", Literal: choices, list: "FILE"}.get(kind, "TEXT")
        metavar = (setting.examples or [metavar])[0]
        action = "append" if kind is list else "store"
        parser.add_argument(flag, action=action, dest=name, metavar=metavar, help=text)
    return parser
