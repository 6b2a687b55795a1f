"""``read_tfrecords``: what a plain loop reads; passes, folds, shares; training and resuming."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.data import fold_of, read_tfrecords
from ctl_core.data.manifest import read
from ctl_core.tools.record_options import parse
from ctl_core.tools.tfrecords import write_records
from tests.helpers.cases import assert_weights, squared_error
from tests.helpers.fixtures import Train
from tests.helpers.pictures import make_pictures, picture_hooks, picture_model, prepared
from tests.helpers.project import Cli, failed, refused

EXAMPLES, FILES = 203, 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """203 small images in 3 files."""
    folder = tmp_path_factory.mktemp("records")
    make_pictures(folder / "photos", EXAMPLES)
    write_records(parse([f"{folder}/photos", "--output", f"{folder}/data", "--shards", str(FILES)]))
    return folder / "data"


def keys(dataset: tf.data.Dataset, count: int = -1) -> list[bytes]:
    return [key.numpy() for key in dataset.take(count)]


def plain(data: Path) -> list[tuple[bytes, np.ndarray, int]]:
    """Key, image and label as a loop over ``TFRecordDataset`` reads them."""
    found = []
    for record in tf.data.TFRecordDataset(sorted(map(str, data.glob("*.tfrecord")))):
        feature = tf.train.Example.FromString(record.numpy()).features.feature
        image = tf.io.decode_png(feature["image"].bytes_list.value[0]).numpy()
        key = feature["key"].bytes_list.value[0]
        found.append((key, image, feature["label"].int64_list.value[0]))
    return found


def test_in_order_it_is_what_a_plain_loop_reads(data: Path) -> None:
    expected = plain(data)
    whole = read_tfrecords(data, "train", ("key", "image", "label"))
    assert int(whole.cardinality()) == EXAMPLES
    batches = read_tfrecords(data, "train", ("key", "image", "label"), batch_size=20)
    assert int(batches.cardinality()) == -(-EXAMPLES // 20)
    for found in (whole, batches.unbatch()):
        for one, other in itertools.zip_longest(found, expected):
            assert one[0].numpy() == other[0] and int(one[2]) == other[2]
            np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize("runs", [1, 7, pytest.param(1000, marks=pytest.mark.slow)])
def test_each_example_once_a_pass_in_another_order_each_time(
    data: Path, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """As for images of any size: runs of 1, of 7 and of many neighbours."""
    mean = sum(shard.bytes for shard in read(data).shards) / EXAMPLES
    monkeypatch.setattr("ctl_core.data.records._RUN", runs * mean)
    expected = sorted(key for key, _, _ in plain(data))
    found = keys(read_tfrecords(data, "train", "key", seed=3), 3 * EXAMPLES)
    passes = [found[i * EXAMPLES : (i + 1) * EXAMPLES] for i in range(3)]
    assert all(sorted(one) == expected for one in passes)
    moved = sum(a != b for a, b in itertools.combinations(passes, 2))
    assert moved == 3
    for one, other in itertools.combinations([*passes, expected], 2):
        assert sum(map(bytes.__eq__, one, other)) < 12, "next to none in its place"
    assert keys(read_tfrecords(data, "train", "key", seed=3), 400) == found[:400]
    assert keys(read_tfrecords(data, "train", "key", seed=4), 400) != found[:400]
    batches = read_tfrecords(data, "train", "key", seed=3, batch_size=31)
    assert keys(batches.unbatch(), 400) == found[:400]
    assert batches.element_spec.shape == [31] and int(batches.cardinality()) == -1


def test_folds_share_out_the_examples_by_their_keys(data: Path) -> None:
    whole = keys(read_tfrecords(data, "train", "key"))
    folds = fold_of(whole, 4).numpy()
    for fold in range(4):
        inside = [key for key, its in zip(whole, folds, strict=True) if its == fold]
        only = read_tfrecords(data, "train", "key", only=(fold, 4))
        assert keys(only) == inside and int(only.cardinality()) == len(inside)
        others = [key for key in whole if key not in inside]
        assert keys(read_tfrecords(data, "train", "key", leave_out=(fold, 4))) == others
        shuffled = read_tfrecords(data, "train", "key", leave_out=(fold, 4), seed=1)
        assert sorted(keys(shuffled, len(others))) == sorted(others)


@pytest.mark.parametrize("seed", [None, 5])
def test_processes_share_out_the_batches_of_one(data: Path, seed: int | None) -> None:
    """As the engine does: every P-th batch, from its own number on."""

    def batches(**more: Any) -> list[list[bytes]]:
        dataset = read_tfrecords(data, "train", "key", batch_size=8, seed=seed, **more)
        return [batch.numpy().tolist() for batch in dataset.take(60)]

    alone = batches()
    for index in range(3):
        context = tf.distribute.InputContext(3, index, 3)
        expected = alone[index::3]
        assert batches(input_context=context)[: len(expected)] == expected
        if seed is None:
            assert len(batches(input_context=context)) == len(expected)


def test_by_file_each_process_has_files_of_its_own(data: Path) -> None:
    def of(index: int, processes: int) -> list[bytes]:
        context = tf.distribute.InputContext(processes, index, processes)
        more = {"input_context": context, "by_file": True, "batch_size": 4}
        return keys(read_tfrecords(data, "train", "key", **more).unbatch())

    whole = [key for key, _, _ in plain(data)]
    first = read(data).shards[0].examples
    assert of(1, 3) == whole[first : first + read(data).shards[1].examples]
    assert of(0, 2) + of(1, 2) != whole and sorted(of(0, 2) + of(1, 2)) == sorted(whole)
    shared = [of(index, 4) for index in range(4)]  # more processes than files: by batch
    assert shared[0][:4] == whole[:4] and shared[1][:4] == whole[4:8]
    assert sorted(itertools.chain(*shared)) == sorted(whole)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 8])
def test_a_restored_iterator_goes_on_exactly_and_its_state_is_small(
    data: Path, tmp_path: Path, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after every seventh element over three passes, and around their ends."""
    mean = sum(shard.bytes for shard in read(data).shards) / EXAMPLES
    monkeypatch.setattr("ctl_core.data.records._RUN", 5 * mean)

    def pipeline() -> tf.data.Dataset:
        dataset = read_tfrecords(
            data, "train", ("key", "image"), seed=2, batch_size=batch_size, leave_out=(0, 9)
        )
        return (dataset if batch_size else dataset.batch(8)).prefetch(2)

    expected = [key.numpy().tolist() for key, _ in pipeline().take(90)]
    a_pass = EXAMPLES * 8 // 9 // 8
    for cut in sorted({*range(0, 66, 7), a_pass - 1, a_pass, a_pass + 1}):
        iterator = iter(pipeline())
        before = [next(iterator)[0].numpy().tolist() for _ in range(cut)]
        path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position"))
        size = sum(file.stat().st_size for file in tmp_path.glob("position*"))
        assert size < 200_000, f"{size} bytes"
        restored = iter(pipeline())
        tf.train.Checkpoint(iterator=restored).read(path)
        after = [next(restored)[0].numpy().tolist() for _ in range(90 - cut)]
        assert before + after == expected, f"saved after {cut}"


# ---- Training -----------------------------------------------------------------------------------


def test_weights_are_those_of_a_plain_loop_over_the_files(train: Train, data: Path) -> None:
    """Two epochs in order; what fills no batch at the end of a pass is left out."""
    model, update = picture_model(), keras.optimizers.SGD(0.01)
    examples = [prepared(image, label) for _, image, label in plain(data)]
    for _ in range(2):
        for start in range(0, EXAMPLES - 15, 16):
            inputs, target = (
                tf.stack(part) for part in zip(*examples[start : start + 16], strict=True)
            )
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(squared_error((model(inputs), target))) / 16
            update.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    state = train(picture_hooks(data), steps=None, epochs=2)
    assert state.step == 24
    assert_weights(state, model, rtol=1e-5)


@pytest.mark.parametrize("batched", [True, False])
def test_weights_do_not_depend_on_devices(train: Train, data: Path, batched: bool) -> None:
    states = [
        train(picture_hooks(data, seed=1, batched=batched), virtual_devices=n, run_name=f"on-{n}")
        for n in (1, 2, 4)
    ]
    for state in states[1:]:
        assert_weights(state, states[0], rtol=1e-5)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_resumed_run_is_the_whole_run(
    train: Train, data: Path, seed: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, and by the saved position: nothing is read and dropped."""
    whole = train(picture_hooks(data, seed=seed), steps=40, run_name="whole")
    for steps in (11, 26, 40):
        state = train(picture_hooks(data, seed=seed), steps=steps)
    assert_weights(state, whole, rtol=0)
    assert "reading and dropping" not in capsys.readouterr().out


def test_records_that_were_written_anew_are_noticed_by_a_resumed_run(
    train: Train, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of other pictures stand where the run has read before."""
    train(picture_hooks(copied, seed=1), steps=5)
    photos = copied.parent / "photos"
    make_pictures(photos, EXAMPLES - 1)
    write_records(parse([str(photos), "--output", str(copied), "--shards", "3", "--overwrite"]))
    capsys.readouterr()
    train(picture_hooks(copied, seed=1), steps=9)
    (line,) = (x for x in "".join(capsys.readouterr()).splitlines() if "warning" in x)
    assert "reached by reading and dropping 80 examples, since the records of" in line
    assert "data (train) are others than those it was trained on" in line
    train(picture_hooks(copied, seed=1), steps=12)
    assert "dropping" not in "".join(capsys.readouterr())


# ---- What does not fit --------------------------------------------------------------------------


def test_arguments_that_cannot_be_are_one_line(data: Path) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "no split 'tran'; did you mean 'train'": {"split": "tran"},
        "has no 'lable'; did you mean 'label'": {"features": ("image", "lable")},
        "batch_size must be 1 or more": {"batch_size": 0},
        "batch_size: expected a whole number, got 2.5": {"batch_size": 2.5},
        "seed: expected a whole number, got 'a'": {"seed": "a"},
        r"image_size: expected \(height, width\), .* got 8": {"image_size": 8},
        r"image_size: expected .* got \(8,\)": {"image_size": (8,)},
        "give one of the two": {"only": (0, 2), "leave_out": (1, 2)},
        r"expected \(fold, folds\)": {"only": (2, 2)},
        "input_context: needs a batch_size": {"input_context": tf.distribute.InputContext(2, 0, 2)},
        "by_file: needs the input_context": {"by_file": True},
    }
    for message, arguments in wrong.items():
        with pytest.raises(ctl_core.SetupError, match=message):
            read_tfrecords(data, **arguments)


@pytest.fixture
def copied(data: Path, tmp_path: Path) -> Path:
    shutil.copytree(data, tmp_path / "data")
    return tmp_path / "data"


def source(seed: int | None) -> str:
    """A callbacks.py that trains on the files."""
    return f"""
import keras
import tensorflow as tf
from ctl_core.data import read_tfrecords


def create_dataset(per_replica_batch_size):
    data = read_tfrecords("data", "train", ("image", "label"), batch_size=per_replica_batch_size,
                          seed={seed})
    return data.map(lambda x, y: (tf.cast(x, tf.float32), tf.cast(y, tf.float32)[:, None]))


def create_model():
    return keras.Sequential([keras.Input((6, 5, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])


def create_loss():
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2)


every_steps = {{}}
"""


def test_a_manifest_that_does_not_fit_is_refused_before_training(cli: Cli, copied: Path) -> None:
    manifest = copied / "manifest.json"
    whole = manifest.read_text()
    begun = json.dumps({**json.loads(whole), "complete": False})
    for text, words in (
        (whole[:100], "is damaged, or no manifest"),
        (whole.replace('"format": 1', '"format": 9'), "has the format 9, this engine reads 1"),
        (begun, "only 3 of 3 files are written"),
    ):
        manifest.write_text(text)
        refused(cli(source(None)), "data/manifest.json", words)
    manifest.write_text(whole)
    (copied / "train-00001.index").write_bytes(b"")
    refused(cli(source(None)), "does not fit its files: train-00001.index has 0 bytes, not")
    shutil.rmtree(copied)
    refused(cli(source(None)), "data/manifest.json: No such file or directory; expected the manif")


@pytest.mark.parametrize(("seed", "place"), [(None, 20), (1, 20), (1, 2)])
def test_a_damaged_record_is_named_while_running(
    cli: Cli, copied: Path, seed: int | None, place: int
) -> None:
    """Its size is right, so that only reading tells; the offset is that of a record's begin."""
    path = copied / "train-00002.tfrecord"
    content = bytearray(path.read_bytes())
    index = np.fromfile(path.with_suffix(".index"), "<i8").reshape(-1, 2)
    begin = int(index[-3, 0])
    content[begin + place] ^= 1
    path.write_bytes(content)
    outcome = cli(source(seed), "--steps", "30")
    failed(outcome, f"data/train-00002.tfrecord: the record at byte {begin} is damaged (del")
