"""Fixes the order of sets, which otherwise differs from process to process.

A program may number its classes in the order of a set of strings, as in ``list({...})``. The order
depends on the seed of Python's hash function. This seed can only be set before Python starts, by
the environment variable ``PYTHONHASHSEED``.
"""

import os
import sys
from collections.abc import Sequence

_VARIABLE = "PYTHONHASHSEED"


def restart_with_fixed_seed() -> None:
    """Starts ``python -m ctl_core`` again in this process, with ``PYTHONHASHSEED=0``.

    Does nothing if the environment sets a seed, or if another program, such as a debugger or a
    profiler, runs the command line: that program would be started again, too, and would lose its
    connection or what it has recorded.
    """
    words = sys.orig_argv
    # On Windows, the shell would not wait for the process that execv starts.
    if _VARIABLE in os.environ or not is_run_by_python(words) or os.name == "nt":
        return
    os.environ[_VARIABLE] = "0"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words[1:]])


def is_run_by_python(words: Sequence[str]) -> bool:
    """Returns whether Python itself runs ``-m ctl_core``, rather than another program.

    Args:
        words: the command line of the process. That of another program has the path or the name of
            that program before ``-m ctl_core``
    """
    options = iter(words[1:])
    for word in options:
        if word == "-m":
            return next(options, None) == "ctl_core"
        if word in ("-W", "-X"):
            next(options, None)
        elif not word.startswith("-"):
            return False
    return False


def fingerprint_order() -> int:
    """Returns a number that is equal in processes in which sets of strings have the same order."""
    return hash("the order of a set of strings")
