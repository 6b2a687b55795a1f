"""``ctl_core tfrecords``: what it writes of which source, what it refuses, and going on."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.data import read_tfrecords, split_of
from ctl_core.data.manifest import read
from ctl_core.errors import SetupError
from ctl_core.tools import tfrecords as command
from ctl_core.tools.png import png_shape
from ctl_core.tools.table_source import load_pyarrow
from tests.helpers.pictures import CLASSES, make_pictures, pixels
from tests.helpers.project import Cli, Outcome

Command = Callable[..., Outcome]


@pytest.fixture
def tfrecords(cli: Cli) -> Command:
    """Returns ``tfrecords("photos --output data", ...)``, which runs the command."""

    def run(words: str) -> Outcome:
        return cli(None, command=("tfrecords", *words.split()))

    return run


def done(outcome: Outcome, *words: str) -> None:
    assert (outcome.code, outcome.err) == (0, ""), outcome
    for word in words:
        assert word in outcome.out, outcome.out


def said(outcome: Outcome, code: int, *words: str) -> None:
    """Checks that the command ended with one line that has these words."""
    assert outcome.code == code and len(outcome.err.splitlines()) == 1, outcome
    assert outcome.err.startswith("error: ")
    for word in words:
        assert word in outcome.err, outcome.err


def examples(folder: str, split: str = "train") -> list[dict[str, Any]]:
    return [
        {name: value.numpy() for name, value in example.items()}
        for example in read_tfrecords(folder, split)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- Images -------------------------------------------------------------------------------------


def test_images_by_class_and_splits_by_the_hash_of_their_path(
    tfrecords: Command, tmp_path: Path
) -> None:
    made = make_pictures(tmp_path / "photos", 60)
    outcome = tfrecords("photos --output data/photos --validation 0.2 --test 0.1 --shards 2")
    done(outcome, "image uint8 [6, 5, 1]", "classes: cat, dog, eel")
    manifest = json.loads((tmp_path / "data/photos/manifest.json").read_text())
    assert manifest["class_names"] == list(CLASSES) and manifest["complete"]
    seen = {}
    for split, total in manifest["totals"].items():
        found = examples("data/photos", split)
        assert len(found) == total
        for example in found:
            name = example["key"].decode()
            assert split_of(name, {"validation": 0.2, "test": 0.1}).numpy().decode() == split
            seen[name] = (example["image"], int(example["label"]))
    assert seen.keys() == made.keys() and len(manifest["totals"]) == 3
    for name, (image, label) in made.items():
        np.testing.assert_array_equal(seen[name][0], image)
        assert seen[name][1] == label


def test_a_plain_loop_of_tensorflow_reads_the_files(tfrecords: Command, tmp_path: Path) -> None:
    made = make_pictures(tmp_path / "photos", 9)
    done(tfrecords("photos --output data"))
    found = {}
    for record in tf.data.TFRecordDataset(str(tmp_path / "data/train-00000.tfrecord")):
        features = tf.train.Example.FromString(record.numpy()).features.feature
        image = tf.io.decode_png(features["image"].bytes_list.value[0]).numpy()
        found[features["key"].bytes_list.value[0].decode()] = image
    assert found.keys() == made.keys()
    for name, image in found.items():
        np.testing.assert_array_equal(image, made[name][0])


def test_folders_called_train_and_val_are_splits(tfrecords: Command, tmp_path: Path) -> None:
    make_pictures(tmp_path / "photos/train", 6)
    make_pictures(tmp_path / "photos/val", 3, start=6)
    done(tfrecords("photos --output data"), "train 6, validation 3")
    assert {e["key"].decode() for e in examples("data", "validation")} == {
        f"val/{CLASSES[n % 3]}/{n}.png" for n in (6, 7, 8)
    }
    said(tfrecords("photos --output d --validation 0.1"), 2, "has a split of that name already")


def test_images_of_all_formats_and_sizes(tfrecords: Command, tmp_path: Path) -> None:
    """Sizes differ, so that batches need a common one; images without classes have no label."""
    (tmp_path / "photos").mkdir()
    for number in range(8):
        image = pixels(number, (5 + number % 2, 6), 3)
        encode = tf.io.encode_jpeg if number % 2 else tf.io.encode_png
        (tmp_path / f"photos/{number}.{'JPG' if number % 2 else 'png'}").write_bytes(
            encode(image).numpy()
        )
    (tmp_path / "photos/notes.txt").write_text("no image")
    (tmp_path / "photos/9.webp").write_text("of a format that is not read")
    outcome = tfrecords("photos --output data")
    done(outcome, "train 8 in 1 file;", "image uint8 [?, 6, 3]")
    assert (
        "2 files of other endings left out (" in outcome.out and "from .jpg, .jpeg" in outcome.out
    )
    assert {e["image"].shape for e in examples("data")} == {(5, 6, 3), (6, 6, 3)}
    assert "label" not in read("data").features
    with pytest.raises(ctl_core.SetupError, match=r"differ in size.*image_size=\(height, width\)"):
        read_tfrecords("data", batch_size=4)
    (batch,) = read_tfrecords("data", features=("image",), batch_size=8, image_size=(4, 4)).take(1)
    one = next(iter(read_tfrecords("data")))["image"]
    np.testing.assert_array_equal(batch[0][0], tf.image.resize(one, (4, 4)))


DAMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "Input is empty;"),
    "a text": (b"hello", "Unknown image file format"),
    "cut off": (tf.io.encode_png(pixels(1)).numpy()[:-20], ""),
    "a JPEG cut off": (tf.io.encode_jpeg(pixels(1, (40, 40), 3)).numpy()[:400], ""),
    "a bit": (b"".join([(p := tf.io.encode_png(pixels(1)).numpy())[:45], b"\0", p[46:]]), ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_images_are_named_and_refused_or_skipped(
    tfrecords: Command, tmp_path: Path, damage: str
) -> None:
    content, words = DAMAGES[damage]
    made = make_pictures(tmp_path / "photos", 30)
    bad = tmp_path / "photos/dog/4.png"
    bad.write_bytes(content)
    said(tfrecords("photos --output data"), 1, "photos/dog/4.png: ", words, "--on-error skip")
    outcome = tfrecords("photos --output data --on-error skip")
    done(outcome, "warning: photos/dog/4.png: ", "; 1 left out")
    assert {e["key"].decode() for e in examples("data")} == made.keys() - {"dog/4.png"}
    (shard,) = read("data").shards
    assert [where for where, _ in shard.skipped] == ["photos/dog/4.png"]


def test_a_png_is_whole_only_if_tensorflow_decodes_it() -> None:
    """Each of its bytes changed, and each place where it may be cut off."""
    for channels in (1, 3, 4):
        whole = tf.io.encode_png(pixels(5, (4, 3), channels)).numpy()
        assert png_shape(whole) == [4, 3, channels]
        assert all(png_shape(whole[:end]) is None for end in range(len(whole) - 4))
        for place in range(len(whole) - 8):
            changed = bytearray(whole)
            changed[place] ^= 0x11
            assert png_shape(bytes(changed)) is None, place


def test_an_image_beside_the_folders_of_classes_is_damaged_input(
    tfrecords: Command, tmp_path: Path
) -> None:
    make_pictures(tmp_path / "photos", 3)
    shutil.copy(tmp_path / "photos/cat/0.png", tmp_path / "photos/0.png")
    said(tfrecords("photos --output data"), 1, "photos/0.png: lies in no folder of a class")
    done(tfrecords("photos --output data --on-error skip"), "train 3", "1 left out")


# ---- Tables -------------------------------------------------------------------------------------


def test_csv(tfrecords: Command, tmp_path: Path) -> None:
    """A number that is missing is NaN, a text is a class; the rows of a key stay together."""
    rows = [
        f'{i // 4},{i * 0.5},{"" if i == 7 else i},{"no" if i % 2 else "yes"},"a, {i}"'
        for i in range(80)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["id,x,n,kind,text", *rows]) + "\n")
    done(tfrecords("t.csv --output data --label kind --key id --test 0.3"), "classes: no, yes")
    train, test = examples("data"), examples("data", "test")
    assert len(train) + len(test) == 80
    assert not {int(e["id"]) for e in train} & {int(e["id"]) for e in test}
    for example in train + test:
        number = int(example["text"].decode().removeprefix("a, "))
        assert (example["id"], example["x"]) == (number // 4, number * 0.5)
        assert example["kind"] == (number % 2 == 0)
        assert np.isnan(example["n"]) if number == 7 else example["n"] == number
    semicolons = (tmp_path / "t.csv").read_text().replace(",", ";")
    (tmp_path / "semicolons.csv").write_text(semicolons)
    done(tfrecords("semicolons.csv --output other --drop text"))
    assert sorted(examples("other")[0]) == ["id", "kind", "n", "x"]


# What is written, the type, what it is then, and what the command says of it.
COLUMNS: dict[str, tuple[list[str], str, list[Any], str]] = {
    "halves": (["0.5", "-1e3", ".25"], "float32", [0.5, -1000, 0.25], ""),
    "stamp": (["1700000000.5", "1", "2"], "float64", [1700000000.5, 1, 2], "stamp is kept as flo"),
    "tiny": (["1e-300", "1", "2"], "float64", [1e-300, 1, 2], "tiny is kept as float64"),
    "id": (["9007199254740993", "1", "-5"], "int64", [9007199254740993, 1, -5], ""),
    "gap": (["16777217", "NA", "1"], "float64", [16777217, np.nan, 1], "gap is kept as float64"),
    "few": (["3", "", "1"], "float32", [3, np.nan, 1], ""),
    "zip": (["01234", "5", "00"], "string", [b"01234", b"5", b"00"], "zip is kept as string"),
    "hash": (["9" * 20, "1", "2"], "string", [b"9" * 20, b"1", b"2"], ""),
    "lost": (["9007199254740993", "", "2"], "string", [b"9007199254740993", b"", b"2"], ""),
    "word": (["1_000", "NA", "x\ny"], "string", [b"1_000", b"NA", b"x\ny"], ""),
    "none": (["", "", ""], "string", [b"", b"", b""], ""),
    "ends": (["inf", "-Infinity", "1"], "float32", [np.inf, -np.inf, 1], ""),
}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_keeps_what_is_written(tfrecords: Command, tmp_path: Path, end: str) -> None:
    """Numbers beyond float32, missing ones, zeros in front; quotes, blank lines, a BOM."""
    rows = [["row", *COLUMNS]]
    rows += [[str(row), *(texts[row] for texts, *_ in COLUMNS.values())] for row in range(3)]
    lines = [",".join(f'"{text}"' for text in row) for row in rows]
    content = f"{end}{end}".join(lines) + end
    (tmp_path / "t.csv").write_bytes(content.encode("utf-8-sig"))
    outcome = tfrecords("t.csv --output data")
    done(outcome, *(note for *_, note in COLUMNS.values()))
    assert outcome.out.count("is kept as") == sum(bool(note) for *_, note in COLUMNS.values()) + 2
    for example in examples("data"):
        for name, (_, kind, expected, _) in COLUMNS.items():
            found = np.asarray(example[name])
            assert isinstance(example[name], bytes) if kind == "string" else found.dtype == kind
            np.testing.assert_equal(found.item(), expected[int(example["row"])], err_msg=name)


def test_csv_files_of_a_folder_are_read_by_the_names_of_their_columns(
    tfrecords: Command, tmp_path: Path
) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/a.csv").write_text("x,y\n1,a\n2,b\n")
    (tmp_path / "parts/b.csv").write_text("y;x\na;3\nb;1e400\n")
    said(tfrecords("parts --output data"), 1, "b.csv: byte 8: x is beyond what float64 holds")
    outcome = tfrecords("parts --output data --on-error skip --label y")
    assert outcome.code == 0 and "1 left out" in outcome.out
    found = sorted((int(e["x"]), int(e["y"])) for e in examples("data"))
    assert found == [(1, 0), (2, 1), (3, 0)]
    (tmp_path / "parts/b.csv").write_text("y,z\na,3\n")
    said(tfrecords("parts --output other"), 2, "b.csv: has other columns than parts/a.csv", "'x'")


@pytest.mark.slow
def test_a_table_takes_little_memory_a_row(tmp_path: Path) -> None:
    """Run in a process of its own, whose memory grows by less than the file has."""
    with (tmp_path / "t.csv").open("w") as file:
        file.write("a,b,text\n")
        file.writelines(f"{i},{i / 8},{'x' * 400}\n" for i in range(150_000))
    program = """
import resource, sys, numpy as np, tensorflow as tf
from ctl_core.tools.record_options import parse
from ctl_core.tools.tfrecords import write_records
write_records(parse([sys.argv[2], "--output", "warm"]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_records(parse([sys.argv[1], "--output", "data"]))
print("grew", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    (tmp_path / "few.csv").write_text("a,b,text\n1,2,x\n")
    words = [sys.executable, "-c", program, "t.csv", "few.csv"]
    out = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    size = (tmp_path / "t.csv").stat().st_size / 1024
    assert int(out.split()[-1]) < size / 2, (out, size)


def test_npz_with_the_names_of_keras_data_sets(tfrecords: Command, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x_train": random.integers(0, 255, (30, 4, 4)).astype("uint8"),
        "y_train": np.arange(30, dtype="uint8"),
        "x_test": random.integers(0, 255, (5, 4, 4)).astype("uint8"),
        "y_test": np.arange(5, dtype="uint8"),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    done(tfrecords("a.npz --output data --label y"), "train 30, test 5", "x uint8 [4, 4], y int64")
    for split in ("train", "test"):
        ((x, y),) = read_tfrecords("data", split, ("x", "y"), batch_size=30)
        assert sorted(y.numpy()) == arrays[f"y_{split}"].tolist()
        np.testing.assert_array_equal(x, arrays[f"x_{split}"][y.numpy()])


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "uint32", "float16", "float32", "float64", ">f8", "<U3"]
)
def test_npz_types_come_back_as_they_were(tfrecords: Command, tmp_path: Path, dtype: str) -> None:
    values = (np.arange(12) % 5).astype(dtype)
    table = values if values.dtype.kind == "U" else values.reshape(4, 3)
    np.savez(tmp_path / "a.npz", number=np.arange(len(table)), one=values[: len(table)], t=table)
    done(tfrecords("a.npz --output data"))
    for example in examples("data"):
        row = int(example["number"])
        for name, array in (("one", values), ("t", table)):
            found, expected = example[name], array[row]
            if array.dtype.kind == "U":
                assert found.decode() == expected
                continue
            np.testing.assert_array_equal(found, expected)
            assert array.dtype.kind in "iu" or found.dtype == array.dtype.newbyteorder("=")


def test_parquet(tfrecords: Command, tmp_path: Path) -> None:
    try:
        pa, parquet = load_pyarrow()
    except SetupError as error:
        pytest.skip(str(error))
    files = [{"bytes": tf.io.encode_png(pixels(i)).numpy(), "path": str(i)} for i in range(6)]
    table = pa.table(
        {
            "id": list(range(6)),
            "x": [0.1 * i for i in range(6)],
            "tags": [list(range(i)) for i in range(6)],
            "words": [["a"] * (i % 3) for i in range(6)],
            "vec": [[1.0 * i, 2.0] for i in range(6)],
            "ok": [i % 2 == 0 for i in range(6)],
            "kind": pa.array(["a", "b"] * 3).dictionary_encode(),
            "image": files,
            "when": pa.array([0] * 6, pa.timestamp("s")),
        }
    )
    (tmp_path / "parts").mkdir()
    parquet.write_table(table.slice(0, 4), tmp_path / "parts/0.parquet")
    parquet.write_table(table.slice(4), tmp_path / "parts/1.parquet")
    said(tfrecords("parts --output d"), 2, "'when' is of the type timestamp", "--drop when")
    done(tfrecords("parts --output d --drop when --label kind --key id"), "classes: a, b")
    found = sorted(read_tfrecords("d"), key=lambda e: int(e["id"]))
    for number, example in enumerate(found):
        assert example["x"].numpy() == 0.1 * number
        assert example["tags"].numpy().tolist() == list(range(number))
        assert example["words"].numpy().tolist() == [b"a"] * (number % 3)
        assert example["vec"].numpy().tolist() == [number, 2.0]
        assert example["ok"].numpy() == (number % 2 == 0)
        assert example["kind"].numpy() == number % 2
        np.testing.assert_array_equal(example["image"], pixels(number))
    batch = next(iter(read_tfrecords("d", features="tags", batch_size=6)))
    assert sorted(batch.row_lengths().numpy()) == list(range(6))
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in threads if "jemalloc" in name]  # which crashes beside TensorFlow


def test_parquet_without_pyarrow_says_how_to_install_it(
    tfrecords: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said(tfrecords("t.parquet --output d"), 2, "need pyarrow", "-m pip install --editable '.[par")


def test_the_split_of_a_row_without_key_follows_from_its_values(
    tfrecords: Command, tmp_path: Path
) -> None:
    rows = [f"{i},{i * i % 31}" for i in range(60)]
    splits = []
    for name, chosen in (("few", rows[:40]), ("many", rows[::-1])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b", *chosen]))
        done(tfrecords(f"{name}.csv --output {name} --validation 0.4"))
        splits.append({int(e["a"]): s for s in ("train", "validation") for e in examples(name, s)})
    assert len(set(splits[0].values())) == 2
    assert splits[0].items() <= splits[1].items()


# ---- What is refused before anything is written -------------------------------------------------

SOURCES: dict[str, tuple[str, bytes, int, str]] = {
    "fields": ("t.csv", b"a,b\n1,2\n3\n", 1, "t.csv:3: has 1 fields, expected 2"),
    "no label": ("t.csv --label b", b"a,b\n1,x\n2,\n", 1, "t.csv:3: has no value of b"),
    "latin": ("t.csv", "a,b\n1,é\n".encode("latin1"), 2, "t.csv: is not UTF-8 text"),
    "empty": ("t.csv", b"", 2, "t.csv: is empty"),
    "twice": ("t.csv", b"a,a\n1,2\n", 2, "has the column 'a' twice"),
    "no rows": ("t.csv", b"a,b\n", 2, "holds no example"),
    "quote": ("t.csv", b'a,b\n1,"2\n', 2, "is no CSV"),
    "column": ("t.csv --label prize", b"price,b\n1,2\n", 2, "did you mean 'price'?"),
    "no npz": ("t.npz", b"x", 2, "t.npz: is damaged, or no .npz file"),
    "other": ("t.txt", b"x", 2, "expected a folder of images, or a file that ends with .csv"),
    "fraction": ("t.csv --test 1", b"a\n1\n", 2, "validation and test: expected numbers"),
    "option": ("t.csv --lable a", b"a\n1\n", 2, "did you mean '--label'?"),
    "shards": ("t.csv --shards 0", b"a\n1\n", 2, "shards: expected a whole number from 1 up"),
    "both": ("t.csv --shards 1 --shard-size 1", b"a\n1\n", 2, "give one of the two"),
    "dropped": ("t.csv --label a --drop a", b"a,b\n1,2\n", 2, "label: a is left out by --drop"),
    "url": ("gs://a/t.csv", b"", 2, "got the URL"),
    "missing": ("nothing", b"", 2, "there is no such file or folder"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_what_cannot_be_read_is_one_line(tfrecords: Command, tmp_path: Path, case: str) -> None:
    words, content, code, message = SOURCES[case]
    if words.startswith("t."):
        (tmp_path / words.split()[0]).write_bytes(content)
    outcome = tfrecords(f"{words} --output data")
    said(outcome, code, message)
    assert not list(tmp_path.glob("data/*.tfrecord"))


def test_arrays_that_are_no_examples(tfrecords: Command, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(4))
    said(tfrecords("a.npz --output d"), 2, "one row for each example; got x [3], y [4]")
    done(tfrecords("a.npz --output e --drop y"), "train 3 in 1 file; features: x float64.")
    np.savez(tmp_path / "b.npz", x=np.array([1, "a"], object))
    said(tfrecords("b.npz --output d"), 2, "holds Python objects")
    np.savez(tmp_path / "c.npz", x=np.full(2, 2**63, "uint64"))
    said(tfrecords("c.npz --output d"), 2, "'x' is of the type uint64", "--drop x")


def test_other_files_at_the_output_are_kept(tfrecords: Command, tmp_path: Path) -> None:
    make_pictures(tmp_path / "photos", 3)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.txt").write_text("mine")
    said(tfrecords("photos --output data"), 2, "holds other files (mine.txt)")
    assert contents(tmp_path / "data") == {"mine.txt": b"mine"}
    said(tfrecords("photos --output photos/cat/0.png"), 2, "holds other files")


def test_one_command_at_a_time_writes_to_a_folder(tfrecords: Command, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a\n1\n2\n")
    (tmp_path / "data").mkdir()
    program = (
        "import fcntl, os, time; f = os.open('data', 0); fcntl.flock(f, 2); print(1, flush=True); "
    )
    words = [sys.executable, "-c", program + "time.sleep(60)"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        said(tfrecords("t.csv --output data"), 2, "another process writes to data")
        other.kill()
    done(tfrecords("t.csv --output data"), "train 2")
    said(tfrecords("t.npz --output none"), 2, "there is no such file")
    said(tfrecords("t.csv --label b --output none"), 2, "has no column 'b'")
    assert not (tmp_path / "none").exists()


def test_verify_names_each_damaged_file(tfrecords: Command, tmp_path: Path) -> None:
    make_pictures(tmp_path / "photos", 20)
    done(tfrecords("photos --output data --shards 3"))
    done(tfrecords("--verify data"), "data: 20 examples in 3 files, as written")
    record, index = tmp_path / "data/train-00001.tfrecord", tmp_path / "data/train-00002.index"
    content = bytearray(record.read_bytes())
    content[40] ^= 1
    record.write_bytes(content)
    index.unlink()
    outcome = tfrecords("--verify data")
    said(outcome, 1, "data: 2 of its files are not as they were written; delete")
    assert outcome.out.splitlines() == [
        "data/train-00001.tfrecord: has another checksum than when it was written",
        "data/train-00002.index: No such file or directory",
    ]
    record.unlink()
    done(tfrecords("photos --output data --shards 3"), "going on after 1 of 3 files")
    done(tfrecords("--verify data"))
    said(tfrecords("--verify data --output other"), 2, "verify: takes the folder and no other")
    said(tfrecords("--verify photos"), 2, "photos/manifest.json: No such file")
    said(tfrecords("photos"), 2, "--output is missing")


def test_a_complete_folder_is_left_as_it_is_or_replaced_when_told(
    tfrecords: Command, tmp_path: Path
) -> None:
    make_pictures(tmp_path / "photos", 9)
    done(tfrecords("photos --output data --shards 3"))
    before = contents(tmp_path / "data")
    done(tfrecords("photos --output data --shards 3"), "is complete already: train 9")
    said(tfrecords("photos --output data --shards 2"), 2, "other data or options", "--overwrite")
    make_pictures(tmp_path / "photos", 1, start=9)
    said(tfrecords("photos --output data --shards 3"), 2, "the source has changed")
    assert contents(tmp_path / "data") == before
    done(tfrecords("photos --output data --shards 2 --overwrite"), "train 10 in 2 files")
    assert len(contents(tmp_path / "data")) == 5


def test_a_file_that_is_lost_or_cut_off_is_written_again(
    tfrecords: Command, tmp_path: Path
) -> None:
    make_pictures(tmp_path / "photos", 9)
    done(tfrecords("photos --output data --shards 3"))
    before = contents(tmp_path / "data")
    (tmp_path / "data/train-00001.tfrecord").unlink()
    (tmp_path / "data/train-00002.tfrecord").write_bytes(b"x")
    with pytest.raises(
        ctl_core.SetupError, match=r"does not fit its files: train-00001.*and 1 mor"
    ):
        read_tfrecords("data")
    done(tfrecords("photos --output data --shards 3"), "going on after 1 of 3 files")
    assert contents(tmp_path / "data") == before


# ---- Going on -----------------------------------------------------------------------------------


def test_a_full_disk_leaves_a_manifest_to_go_on_from(
    tfrecords: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third file on none may grow, as if the disk were full, until there is room again."""
    random = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=random.integers(0, 255, (40, 5000)).astype("uint8"))
    done(tfrecords("a.npz --output whole --shards 4"))
    limits, write, begun = resource.getrlimit(resource.RLIMIT_FSIZE), command._write, []

    def write_less(planned: Any, *others: Any) -> Any:
        begun.append(planned.name)
        if len(begun) == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        return write(planned, *others)

    monkeypatch.setattr(command, "_write", write_less)
    try:
        outcome = tfrecords("a.npz --output data --shards 4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said(outcome, 1, "data/train-00002.tfrecord: cannot be written: File too large; 2 of 4 files")
    assert [shard.name for shard in read("data").shards] == begun[:2]
    assert not list(tmp_path.glob("data/*.tmp"))
    done(tfrecords("a.npz --output data --shards 4"), "going on after 2 of 4 files")
    assert begun[3:] == ["train-00002", "train-00003"]
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bytes(
    tfrecords: Command, tmp_path: Path
) -> None:
    make_pictures(tmp_path / "photos", 2000)
    done(tfrecords("photos --output whole --shards 200 --test 0.2"))
    words = ["tfrecords", "photos", "--output", "data", "--shards", "200", "--test", "0.2"]
    start = [sys.executable, "-m", "ctl_core", *words]
    environ = {**os.environ, "PYTHONPATH": str(Path(ctl_core.__file__).parents[1])}
    data = tmp_path / "data"
    for kill in range(2):
        process = subprocess.Popen(start, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL)
        limit = time.monotonic() + 600
        before = len(list(data.glob("*.tfrecord")))
        while len(list(data.glob("*.tfrecord"))) < before + 40 and process.poll() is None:
            assert time.monotonic() < limit
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it has to be killed before it ends"
        assert not read(data).complete, kill
        with pytest.raises(ctl_core.SetupError, match=r"only \d+ of 400 files are written"):
            read_tfrecords(data)
    done(tfrecords("photos --output data --shards 200 --test 0.2"))
    assert contents(data) == contents(tmp_path / "whole")
