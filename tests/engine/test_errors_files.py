"""Files that cannot be read, imported or written: one line that says which, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.project import (
    PIECES,
    Cli,
    files,
    refused,
    source_of,
)

# A callbacks.py that cannot be imported, then words of the message.
IMPORTS: dict[str | bytes, tuple[str, ...]] = {
    "x = 1\ndef f(:\n": ("callbacks.py:2: SyntaxError: ",),
    "def f():\npass\n": ("callbacks.py:2: IndentationError: ",),
    "def f():\n\tif 1:\n        pass\n": ("callbacks.py:3: TabError: ",),
    b"x = 1\0": ("callbacks.py: ", "null bytes"),
    b"x = '\xe4'\n": ("callbacks.py:1: SyntaxError: ", "utf-8"),
    b"# -*- coding: foo -*-\n": ("callbacks.py", "SyntaxError: ", "foo"),
    "import os\nimport not_there\n": (
        "callbacks.py:2: ModuleNotFoundError: No module named 'not_there'",
    ),
    "from os import nothing\n": ("callbacks.py:1: ImportError: ", "'nothing'"),
    "\nimport helper\n": ("callbacks.py:2: ZeroDivisionError",),
    "\nimport wrong\n": ("wrong.py:2: SyntaxError",),
    "raise ValueError('two\\nlines')\n": ("callbacks.py:1: ValueError: two lines",),
    "\n\nassert False\n": ("callbacks.py:3: AssertionError",),
    "def f():\n    f()\nf()\n": ("callbacks.py:2: RecursionError",),
    "import sys\nsys.exit(0)\n": ("callbacks.py:2: SystemExit: 0",),
    "": ("callbacks.py: create_dataset, create_model, create_loss still to be written",),
}


@pytest.mark.parametrize("source", IMPORTS, ids=repr)
def test_a_callbacks_file_that_cannot_be_imported(
    cli: Cli, tmp_path: Path, source: str | bytes
) -> None:
    (tmp_path / "helper.py").write_text("1 / 0\n")
    (tmp_path / "wrong.py").write_text("\nx = (\n")
    refused(cli(source), *IMPORTS[source])


def test_no_callbacks_file(cli: Cli, tmp_path: Path) -> None:
    refused(cli(None), "no file callbacks.py in", str(tmp_path))
    (tmp_path / "callbacks.py").mkdir()
    refused(cli(None), "no file callbacks.py in", str(tmp_path))


@pytest.mark.parametrize("change", ["windows", "old mac", "byte order mark", "prints"])
def test_a_callbacks_file_that_is_odd_but_right(cli: Cli, change: str) -> None:
    text = source_of()
    source = {
        "windows": text.replace("\n", "\r\n").encode(),
        "old mac": text.replace("\n", "\r").encode(),
        "byte order mark": b"\xef\xbb\xbf" + text.encode(),
        "prints": text.encode() + b"print('hello from callbacks')\n",
    }[change]
    outcome = cli(source, "--steps", "1")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("hello from callbacks\n") == (change == "prints")


@pytest.mark.parametrize("name", ["runs", "runs/a", "runs/a/train.log/x", "runs/a/config.yaml/x"])
def test_a_run_folder_that_cannot_be_written(cli: Cli, tmp_path: Path, name: str) -> None:
    """A file stands where a folder should, or a folder where a file should."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("in the way")
    refused(cli(source_of()), "runs/a: the run folder cannot be written", "choose another")
    assert (tmp_path / name).read_text() == "in the way"


def test_a_checkpoint_that_does_not_fit_any_more(cli: Cli, tmp_path: Path) -> None:
    assert cli(source_of(), "--steps", "2").code == 0
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    changed = PIECES["create_model"].replace("Dense(1,", "Dense(1, use_bias=False,")
    outcome = cli(source_of(create_model=changed))
    refused(outcome, "runs/a/ckpt/ckpt-2", "does not fit the model any more", "dense/bias is gone")
    for name in before.keys() - {"callbacks.py", "runs/a/train.log"}:
        assert (tmp_path / name).read_bytes() == before[name], name
    assert cli(source_of()).code == 0, "with the old model it goes on"


def test_debug_may_stand_in_the_config_file(cli: Cli) -> None:
    source = source_of(create_model="def create_model():\n    pass\n")
    outcome = cli(source, config="debug: true")
    assert outcome.code == 2 and "Traceback (most recent call last)" in outcome.err
    refused(cli(source, "--no-debug"), "create_model")


def test_a_config_file_that_is_a_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    refused(cli(source_of()), "config.yaml: cannot be read", "Is a directory")
