"""Tests of the text example: packed rows, training, resuming and serving."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.example import EXAMPLES, Example, assert_lives
from tests.helpers.project import Cli

SMALL = ("--hparams.width", "8", "--hparams.heads", "2", "--hparams.layers", "1")
DATA = ("--batch-size", "4", "--hparams.written", "3", "--hparams.files", "texts/*.txt")


@pytest.fixture(scope="module")
def hooks() -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / "text.py")))


def write_texts(folder: Path) -> list[bytes]:
    """Writes twenty text files of 1 to 400 bytes, and returns their contents.

    The example holds out two of them.
    """
    random = np.random.default_rng(0)
    texts = [
        random.integers(97, 123, size).astype(np.uint8).tobytes() for size in range(1, 401, 21)
    ]
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number:02d}.txt").write_bytes(text)
    return texts


def test_rows_hold_each_byte_once(hooks: Any, tmp_path: Path) -> None:
    """Unpacking the rows by ``piece`` and ``place`` gives the bytes of the texts again."""
    texts = write_texts(tmp_path)
    rows = hooks.pack(texts)
    assert {values.shape for values in rows.values()} == {(len(rows["byte"]), 128)}
    pieces = []
    for byte, after, piece, place in zip(*rows.values(), strict=True):
        assert (np.diff((piece > 0).astype(int)) >= 0).all()  # padding is on the left
        for number in range(1, piece.max() + 1):
            in_piece = piece == number
            np.testing.assert_array_equal(place[in_piece], np.arange(in_piece.sum()))
            np.testing.assert_array_equal(byte[in_piece][1:], after[in_piece][:-1])
            pieces.append(bytes([*byte[in_piece].astype(np.uint8), after[in_piece][-1]]))
    cut = [text[at : at + 129] for text in texts for at in range(0, len(text), 128)]
    assert sorted(pieces) == sorted(piece for piece in cut if len(piece) > 1)
    assert len(rows["byte"]) < len(pieces)  # some pieces share a row


def test_pieces_of_a_row_do_not_see_each_other(hooks: Any) -> None:
    """A piece has the same output alone as when it shares a row, and does not see later bytes."""
    model = hooks.create_model({"width": 8, "layers": 2, "heads": 2})
    texts = [b"the first one", b"another of them", b"and a third"]
    together = hooks.pack(texts)
    assert len(together["byte"]) == 1
    output = model({name: together[name] for name in ("byte", "piece", "place")})[0].numpy()
    for text in texts:
        alone = hooks.pack([text])
        expected = model({name: alone[name] for name in ("byte", "piece", "place")})[0].numpy()
        size = len(text) - 1
        (begin,) = (
            at for at in range(128 - size + 1)
            if bytes(together["byte"][0, at : at + size].astype(np.uint8)) == text[:-1]
        )  # fmt: skip
        np.testing.assert_allclose(output[begin : begin + size], expected[-size:], atol=1e-5)
        changed = {name: alone[name].copy() for name in ("byte", "piece", "place")}
        changed["byte"][0, -1] += 1
        other = model(changed)[0].numpy()
        np.testing.assert_allclose(other[:-1][-size + 1 :], expected[:-1][-size + 1 :], atol=1e-5)
        assert np.abs(other[-1] - expected[-1]).max() > 1e-4


def test_texts_as_rows(hooks: Any) -> None:
    """A served string becomes the row that training would make of it.

    The row begins with a line break. If the string is too long, the row contains its last bytes.
    """
    rows = {name: array.numpy() for name, array in hooks.serve(["abc", "", "x" * 300, "é"]).items()}
    for number, text in enumerate([b"\nabc", b"\n", b"x" * 128, "\né".encode()]):
        size = len(text)
        assert bytes(rows["byte"][number, -size:].astype(np.uint8)) == text
        assert rows["piece"][number].sum() == size == rows["piece"][number, -size:].sum()
        np.testing.assert_array_equal(rows["place"][number, -size:], np.arange(size))


def test_writing_goes_on_byte_by_byte(hooks: Any) -> None:
    """Writing several bytes at once gives the same bytes as writing them one at a time."""
    keras.utils.set_random_seed(1)
    model = hooks.create_model({"width": 8, "layers": 1, "heads": 2})
    hparams = {"temperature": 1e-6, "written": 6}  # the likeliest byte, whatever is drawn
    for start in ("ab", "y" * 125):  # of which the first bytes slide out
        whole = hooks.generate(model, hooks.serve([start]), hparams)[0].numpy()
        text = b"\n" + start.encode()
        for _ in range(6):
            last = text[-128:]
            codes = np.frombuffer(last, np.uint8).astype(np.int32)
            rows = {name: np.zeros((1, 128), np.int32) for name in ("byte", "piece", "place")}
            rows["byte"][0, -len(last) :] = codes
            rows["piece"][0, -len(last) :] = 1
            rows["place"][0, -len(last) :] = np.arange(len(last))
            text += bytes([int(model(rows)[0, -1].numpy().argmax())])
        assert text.endswith(whole)
        assert len(whole) == 6


@pytest.mark.slow
def test_example_is_trained_killed_resumed_and_served(cli: Cli, tmp_path: Path) -> None:
    write_texts(tmp_path)
    example = Example("text", cli, tmp_path, *SMALL, *DATA)
    inputs = np.array([b"the first", b"a longer one than that"])
    line = "step 1500: The for statement of the class’s except argument value. It attribute"
    assert_lives(example, inputs, atol=1e-4, written=[line])
    written = ctl_core.load(tmp_path / "runs" / "whole")(["def f(x):"])
    assert written.dtype == tf.string
    assert len(written[0].numpy()) == 3
