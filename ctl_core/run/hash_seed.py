"""Fixes the order of sets, which otherwise differs from process to process.

A program may number its classes in the order of a set of strings, as in ``list({...})``. The order
depends on the seed of Python's hash function. This seed can only be set before Python starts, by
the environment variable ``PYTHONHASHSEED``.
"""

import os
import sys

_VARIABLE = "PYTHONHASHSEED"


def restart_with_fixed_seed() -> None:
    """Starts ``python -m ctl_core`` again in this process, with ``PYTHONHASHSEED=0``.

    Does nothing if the environment sets a seed, or if another program, such as a debugger, runs the
    command line.
    """
    words = sys.orig_argv
    module = []
    if "-m" in words:
        module = words[words.index("-m") + 1 :][:1]
    # On Windows, the shell would not wait for the process that execv starts.
    if _VARIABLE in os.environ or module != ["ctl_core"] or os.name == "nt":
        return
    os.environ[_VARIABLE] = "0"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words[1:]])


def fingerprint_order() -> int:
    """Returns a number that is equal in processes in which sets of strings have the same order."""
    return hash("the order of a set of strings")
