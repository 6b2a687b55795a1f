"""Tests of streams that are closed or full, of the lock of a run, of permissions and signals."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console as Terminal
from rich.progress import Progress

from ctl_core import __main__
from ctl_core.cluster import signals
from ctl_core.run.console import LOG, Console
from ctl_core.run.files import is_run_locked, lock_run, release_run
from ctl_core.run.output import DroppableOutput, restore_letters
from ctl_core.run.progress import LineColumn, ProgressLine
from tests.golden.engine import ENDING, PYTHONPATH

SAYS = """
import os, sys
from ctl_core.run.output import keep_outputs

keep_outputs()
for number in range(10):
    print("line", number, flush=True)
    print("warning", number, file=sys.stderr)
os.write(3, b"went on")
print("in the buffer at the end")
"""


@pytest.mark.parametrize("outputs", [">/dev/full", "2>/dev/full", "| true", ">&-", ">&- 2>&-"])
def test_process_goes_on_without_its_outputs(tmp_path: Path, outputs: str) -> None:
    """The process exits with code 0, and its messages do not end up in files that it opens."""
    (tmp_path / "says.py").write_text(SAYS)
    command = f"set -o pipefail; {sys.executable} says.py 3>file {outputs}"
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "went on"
    assert b"Error" not in done.stderr


def test_output_that_can_be_written_is_the_stream() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as reader, os.fdopen(write_end, "w") as stream:
        output = DroppableOutput(stream)
        print("a line", file=output, flush=True)  # type: ignore[call-overload]
        assert reader.readline() == "a line\n"
        assert not output.isatty()


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_in_any_encoding_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str
) -> None:
    """Letters that the encoding does not have are written as escapes."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding, errors)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(LOG, "disabled", True)  # pytest cannot report this letter
    Console().warn("größe … \udcff")
    stream.flush()
    written = stream.buffer.getvalue().decode(encoding)
    expected = {
        "ascii": "gr\\xf6\\xdfe \\u2026 \\udcff",
        "latin-1": "größe \\u2026 \\udcff",
        "utf-8": "größe … \\udcff",
    }
    assert written == f"warning: {expected[encoding]}\n"


def test_the_live_line_uses_letters_of_the_terminal() -> None:
    task = Progress().tasks
    for encoding, letters in (("ascii", {"=", "-"}), ("utf-8", {"━", "─"})):
        terminal = Terminal(file=io.TextIOWrapper(io.BytesIO(), encoding), width=80)
        column = LineColumn(terminal, lambda: ProgressLine("step 1/2", share=0.5))
        line = column.render(task)  # type: ignore[arg-type]  # the task is not used
        assert {*line.plain.removeprefix("step 1/2").split()[0]} == letters


def test_a_note_has_its_letters_in_any_locale() -> None:
    """In an ASCII locale, Python decodes the bytes of a flag to surrogates."""
    note = "größer".encode().decode("ascii", "surrogateescape")
    assert restore_letters(note) == restore_letters("größer") == "größer"
    assert restore_letters("\udcff") == "\\xff"


def test_run_is_locked_until_it_is_released(tmp_path: Path) -> None:
    lock = lock_run(tmp_path)
    assert lock is not None
    assert (tmp_path / "pid").read_text() == f"{os.getpid()}\n"
    assert lock_run(tmp_path) is None
    assert is_run_locked(tmp_path)
    assert (tmp_path / "pid").read_text() == f"{os.getpid()}\n"
    release_run(tmp_path, lock)
    assert not (tmp_path / "pid").exists()
    assert not is_run_locked(tmp_path)
    second = lock_run(tmp_path)
    assert second is not None
    release_run(tmp_path, second)


def test_run_stays_locked_if_the_file_pid_is_removed(tmp_path: Path) -> None:
    lock = lock_run(tmp_path)
    assert lock is not None
    (tmp_path / "pid").unlink()
    assert is_run_locked(tmp_path)
    assert lock_run(tmp_path) is None
    assert not (tmp_path / "pid").exists()
    release_run(tmp_path, lock)
    again = lock_run(tmp_path)
    assert again is not None
    assert (tmp_path / "pid").read_text() != ""
    release_run(tmp_path, again)


def test_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / "pid").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="pid"):
        lock_run(tmp_path)
    assert (tmp_path / "other").read_text() == "kept"


# ---- Permissions -------------------------------------------------------------------------------


def test_missing_permission_is_one_line_that_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user of a container may not be allowed to read any file of the project."""

    def refuse(*_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "runs/a"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(__main__, "_run", refuse)
    assert __main__.main(["train"]) == 1
    expected = (
        "error: runs/a: cannot be read or written: Permission denied; change its permissions, "
        "or choose another folder.\n"
    )
    assert capsys.readouterr().err == expected


# ---- Signals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_counts_even_if_a_library_raises_another_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """pydantic reports an exception in one of its validators as an error of the schema."""

    def convert(*_: object) -> NoReturn:
        signals.end_quietly()
        signals.end_on_signals()
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            raise ValueError("Error building the validator") from error
        raise AssertionError("no signal was received")

    monkeypatch.setattr(__main__, "_run", convert)
    before = {each: signal.getsignal(each) for each in (*ENDING, signal.SIGINT)}
    try:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        code = __main__.main(["train"])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert code == 128 + number
    (line,) = capsys.readouterr().err.splitlines()
    assert "interrupted" in line or "SIGTERM: the process ends" in line
