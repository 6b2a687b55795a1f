"""Formats a callbacks.py with every hook, for ``python -m ctl_core hooks --stub``.

The file contains the code of each default that is a function or a schedule. For all other hooks,
including the required ones, it contains an example in comments. The template's example ``blank`` is
identical to this file, which a test checks.
"""

import textwrap

from ctl_core.hooks.reference import read_default_source
from ctl_core.hooks.spec import Form, HookSpec
from ctl_core.hooks.table import TABLE

_WIDTH = 100
_HEAD = '''\
"""EDIT THIS FILE: all hooks. Write the three that are required; the others have defaults.

The engine calls these functions, the *hooks*, by name, and passes the arguments that they declare.
A hook may declare more arguments than it does here: `python -m ctl_core hooks NAME` lists them.
After an edit, `./train.sh --check` tries every hook. With a small model, this takes half a minute.
"""

import keras
import tensorflow as tf

import ctl_core as ctl
'''
_REQUIRED = "Required: remove the # and write your own"
_OPTIONAL = "Optional: code is the default, so deleting it changes nothing; comments are examples"


def format_stub() -> str:
    """Returns the source of a callbacks.py with all hooks: the required ones, then the others."""
    required = [spec for spec in TABLE if spec.is_required]
    optional = [spec for spec in TABLE if not spec.is_required]
    sections = [
        f"{_HEAD}\n{_format_rule(_REQUIRED)}",
        *map(format_hook_stub, required),
        _format_rule(_OPTIONAL),
        *map(format_hook_stub, optional),
    ]
    return "\n\n".join(sections)


def format_hook_stub(spec: HookSpec) -> str:
    """Returns the source of one hook: the code of its default, or an example in comments."""
    source = read_default_source(spec.name)
    if spec.form is Form.SCHEDULE:
        *functions, assignment = source.split("\n\n\n")
        comment = _comment(_describe(spec))
        return "\n\n\n".join([*functions, f"{comment}{assignment}\n"])
    if source.startswith(("def ", "@")):
        return f"{source}\n"
    return _comment([*_describe(spec), "", *spec.example.splitlines()])


def _describe(spec: HookSpec) -> list[str]:
    """Returns the lines that say what a hook is for, and what happens without it."""
    if spec.is_required:
        text = f"{spec.purpose}. {spec.details}"
    elif spec.form is Form.SCHEDULE:
        text = f"{spec.purpose}."
    else:
        text = f"{spec.purpose}. Default: {spec.default}."
    return textwrap.wrap(text, _WIDTH - len("# "))


def _comment(lines: list[str]) -> str:
    """Returns lines as comments."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _format_rule(title: str) -> str:
    """Returns a comment with a title that is as wide as the file."""
    return f"# ---- {title} ".ljust(_WIDTH, "-") + "\n"
