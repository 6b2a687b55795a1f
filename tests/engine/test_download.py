"""``ctl_core.data.download``: once, whole or not at all, and what is said without a network."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ctl_core import SetupError
from ctl_core.data import download


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file somewhere, which a URL leads to; Keras' folder is empty."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    file = tmp_path / "web" / "digits.gz"
    file.parent.mkdir()
    file.write_bytes(b"published" * 1000)
    return file


def hashes(content: bytes) -> tuple[str, str]:
    return hashlib.md5(content).hexdigest(), hashlib.sha256(content).hexdigest()


def test_downloads_once(published: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also with another kind of checksum, and without the source."""
    content, url = published.read_bytes(), published.as_uri()
    md5, sha256 = hashes(content)
    path = download(url, md5, "small")
    assert path == tmp_path / "keras" / "datasets" / "small" / "digits.gz"
    assert path.read_bytes() == content and [*path.parent.iterdir()] == [path]
    assert capfd.readouterr().out == f"downloading {url} to {path}\n"
    published.unlink()
    assert download(url, sha256, "small") == path
    assert capfd.readouterr().out == ""


def test_without_a_network_it_says_what_to_put_where(published: Path, tmp_path: Path) -> None:
    url = published.as_uri()
    published.unlink()
    with pytest.raises(SetupError) as error:
        download(url, "0" * 32, "small")
    place = tmp_path / "keras" / "datasets" / "small" / "digits.gz"
    assert str(error.value).startswith(f"{url}: cannot be downloaded (")
    assert str(error.value).endswith(f"put it at {place}.") and "\n" not in str(error.value)
    assert not [*place.parent.iterdir()]


def test_another_file_is_not_taken_from_the_web(published: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="what came has the checksum"):
        download(published.as_uri(), "0" * 64, "small")
    assert not [*(tmp_path / "keras" / "datasets" / "small").iterdir()]


def test_a_file_of_ones_own_is_taken_with_one_line(
    published: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "keras" / "datasets" / "small" / "digits.gz"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"mine")
    for _ in range(2):
        assert download(published.as_uri(), hashes(b"published")[0], "small") == place
    said = capfd.readouterr().out
    assert place.read_bytes() == b"mine" and said.count("\n") == 1
    assert "is not the published file" in said and hashes(b"mine")[0] in said


def test_a_place_that_cannot_be_written(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "file"))
    with pytest.raises(SetupError, match="Not a directory"):
        download(published.as_uri(), "0" * 32, "small")


def test_a_hash_of_another_kind_is_refused(published: Path) -> None:
    with pytest.raises(ValueError, match="expected an MD5 or a SHA-256"):
        download(published.as_uri(), "0" * 40, "small")
