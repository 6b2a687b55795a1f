"""Tests of the restart of the command line with a fixed hash seed."""

import pytest

from ctl_core.run.hash_seed import is_run_by_python


@pytest.mark.parametrize(
    ("words", "is_python"),
    [
        ("python -m ctl_core train -m x", True),
        ("python -X dev -W ignore -u -m ctl_core train", True),
        ("python -m cProfile -o out -m ctl_core train", False),
        ("python /bin/memray run -m ctl_core train", False),
        ("python /x/debugpy --connect 127.0.0.1:1 -m ctl_core train", False),
        ("python -c pass -m ctl_core", False),
    ],
)
def test_a_debugger_or_profiler_is_not_started_again(words: str, is_python: bool) -> None:
    """A debugger loses its connection when its process starts a program with ``execv``.

    https://github.com/microsoft/vscode/issues/171238
    """
    assert is_run_by_python(words.split()) is is_python
