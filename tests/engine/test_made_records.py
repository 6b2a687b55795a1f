"""``ctl_core.data.write_tfrecords``: the command's files, once, also for several at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ctl_core import SetupError
from ctl_core.__main__ import main
from ctl_core.data import read_tfrecords, write_tfrecords


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", x=np.arange(60).reshape(30, 2), y=np.arange(30) % 3, z=np.zeros(30))
    return tmp_path / "x.npz"


def contents(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_the_files_are_the_commands(source: Path) -> None:
    found = write_tfrecords("x.npz", "a", test=0.3, label="y", drop=["z"])
    flags = ["--test", "0.3", "--label", "y", "--drop", "z"]
    assert main(["tfrecords", "x.npz", "--output", "b", *flags]) == 0
    assert found == Path("a") and contents("a") == contents("b")
    assert {"x", "y"} == set(next(iter(read_tfrecords(found, "test"))))


def test_complete_files_are_taken_as_they_are(
    source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without the source, too; what is missing is written again."""
    write_tfrecords(source, "a", test=0.3)
    before = contents("a")
    assert "wrote a" in capfd.readouterr().out
    (victim,) = Path("a").glob("test-*.tfrecord")
    victim.unlink()
    write_tfrecords(source, "a", test=0.3)
    assert contents("a") == before
    source.unlink()
    capfd.readouterr()
    assert write_tfrecords(source, "a", test=0.5) == Path("a")
    assert contents("a") == before and capfd.readouterr().out == ""


def test_several_at_once(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One writes, the others wait for it."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: write_tfrecords(source, "a", test=0.3), range(4)))
    assert found == 4 * [Path("a")] and capfd.readouterr().out.count("wrote a") == 1
    assert sum(1 for _ in read_tfrecords("a")) + sum(1 for _ in read_tfrecords("a", "test")) == 30


def test_what_cannot_be_is_one_line(source: Path) -> None:
    for options, said in (
        ({"tset": 0.3}, "unknown option '--tset=0.3'"),
        ({"test": 1.5}, "validation and test: expected numbers"),
        ({"label": "price"}, "price"),
    ):
        with pytest.raises(SetupError, match=said) as error:
            write_tfrecords(source, "a", **options)
        assert "\n" not in str(error.value)
    with pytest.raises(SetupError, match="there is no such file or folder"):
        write_tfrecords("nowhere", "a")
