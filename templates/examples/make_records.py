"""Writes images, or the rows of a table, to TFRecord files of three splits. Change it as you like.

    python make_records.py photos records/photos      # photos/cat/1.jpg, photos/dog/2.png and so on
    python make_records.py table.csv records/table    # one feature per column

A tenth of the examples is for validation and a tenth for the test. A hash of an image's path, or of
a row's contents, decides: an example stays in its split when you add others.
"""

import contextlib
import csv
import os
import random
import sys
import tempfile
from pathlib import Path

import tensorflow as tf

from ctl_core.data import split_of

FRACTIONS = {"validation": 0.1, "test": 0.1}
SPLITS = ("train", *FRACTIONS)
FILES_PER_SPLIT = 4  # training reads them in parallel


# ---- Images and tables --------------------------------------------------------------------------
# Both functions shuffle, so that a small shuffle buffer is enough in training.


def read_images(folder):
    """Yields the key and the features of each image. Labels number the folders, by name."""
    paths = sorted(folder.glob("[!.]*/[!.]*"))
    classes = sorted({path.parent.name for path in paths})
    print("labels:", dict(enumerate(classes)))
    for path in random.Random(0).sample(paths, len(paths)):
        content = path.read_bytes()
        try:
            tf.io.decode_image(content)
        except tf.errors.InvalidArgumentError as error:
            sys.exit(f"{path} is not an image, or is damaged: {error.message}")
        name = path.parent.name
        yield f"{name}/{path.name}", {"image": content, "label": classes.index(name)}


def read_table(path):
    """Yields the key and the features of each row of a CSV file with a header."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = csv.reader(file, strict=True)
    random.Random(0).shuffle(rows)
    columns = [convert_column(texts) for texts in zip(*rows, strict=True)]
    for row, values in zip(rows, zip(*columns, strict=True), strict=True):
        yield ",".join(row), dict(zip(header, values, strict=True))


def convert_column(texts):
    """Returns a column as integers or floats if all of its texts are such, otherwise as bytes."""
    for number_type in (int, float):
        with contextlib.suppress(ValueError):
            return [number_type(text) for text in texts]
    return [text.encode() for text in texts]


# ---- TFRecord files -----------------------------------------------------------------------------


def make_feature(value):
    """Returns an integer, a float or bytes as a feature of a tf.train.Example."""
    if isinstance(value, int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
    if isinstance(value, float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def write_records(examples, output):
    """Writes examples, which are pairs of a key and features, to the files of a new folder.

    The files are written to a temporary folder, which is renamed when they are complete.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
        folder = Path(temporary, output.name)
        folder.mkdir()
        counts = write_files(examples, folder)
        try:
            folder.rename(output)
        except OSError:
            if not output.exists():  # otherwise, another process of a cluster was first
                raise
    sizes = ", ".join(f"{counts[split]} of {split}" for split in SPLITS)
    print(f"{os.path.relpath(output)}: {sizes}")


def write_files(examples, folder):
    """Writes examples to the files of each split; returns how many each split has."""
    counts = dict.fromkeys(SPLITS, 0)
    with contextlib.ExitStack() as stack:
        writers = {}
        for split in SPLITS:
            for number in range(FILES_PER_SPLIT):
                path = folder / f"{split}-{number}.tfrecord"
                writers[split, number] = stack.enter_context(tf.io.TFRecordWriter(str(path)))
        for key, values in examples:
            split = split_of(key, FRACTIONS).numpy().decode()
            features = {name: make_feature(value) for name, value in values.items()}
            example = tf.train.Example(features=tf.train.Features(feature=features))
            number = counts[split] % FILES_PER_SPLIT
            writers[split, number].write(example.SerializeToString())
            counts[split] += 1
    return counts


def main():
    """Converts the folder or the table that the command line names."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source = Path(sys.argv[1])
    output = Path(sys.argv[2])
    if output.exists():
        sys.exit(f"{output} exists: delete it, or name another folder")
    examples = read_images(source) if source.is_dir() else read_table(source)
    write_records(examples, output)


if __name__ == "__main__":
    main()
