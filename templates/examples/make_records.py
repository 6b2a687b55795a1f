"""Writes images, or the rows of a table, as TFRecord files of three splits. Yours to change.

    python make_records.py photos records/photos      # photos/cat/1.jpg, photos/dog/2.png and so on
    python make_records.py table.csv records/table    # a feature of each column

A tenth is for validation and a tenth for the test, by a hash of an image's path or of what a row
holds: an example stays in its split, whatever is added.
"""

import contextlib
import csv
import random
import sys
import tempfile
from pathlib import Path

import tensorflow as tf

from ctl_core.data import split_of

FRACTIONS = {"validation": 0.1, "test": 0.1}
FILES = 4  # of each split; training reads them side by side
LISTS = {int: "int64_list", float: "float_list", bytes: "bytes_list"}


# Examples are mixed before they are written, so that a small shuffle in training will do.
def images_by_class(folder):
    """Yields key and features of each image; a label is the place of its folder, by name."""
    paths = sorted(folder.glob("[!.]*/[!.]*"))
    classes = sorted({path.parent.name for path in paths})
    print("labels:", dict(enumerate(classes)))
    for path in random.Random(0).sample(paths, len(paths)):
        content, name = path.read_bytes(), path.parent.name
        try:
            tf.io.decode_image(content)
        except tf.errors.InvalidArgumentError as error:
            sys.exit(f"{path} is no image, or is damaged: {error.message}")
        yield f"{name}/{path.name}", {"image": content, "label": classes.index(name)}


def rows_of_table(path):
    """Yields key and features of each row."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = csv.reader(file, strict=True)
    random.Random(0).shuffle(rows)
    columns = [converted(column) for column in zip(*rows, strict=True)]
    for row, values in zip(rows, zip(*columns, strict=True), strict=True):
        yield ",".join(row), dict(zip(header, values, strict=True))


def converted(column):
    """Returns a column as whole numbers if all of it are, else as numbers if all are, or bytes."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return [kind(text) for text in column]
    return [text.encode() for text in column]


def write_records(examples, output):
    """Writes the files beside; the folder gets its name when all of it is there."""
    counts = dict.fromkeys(("train", *FRACTIONS), 0)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as beside:
        folder = Path(beside, output.name)
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            writers = {}
            for name in (f"{s}-{n}" for s in ("train", *FRACTIONS) for n in range(FILES)):
                writer = tf.io.TFRecordWriter(str(folder / f"{name}.tfrecord"))
                writers[name] = stack.enter_context(writer)
            for key, features in examples:
                split = split_of(key, FRACTIONS).numpy().decode()
                lists = {k: {LISTS[type(v)]: {"value": [v]}} for k, v in features.items()}
                example = tf.train.Example(features={"feature": lists})
                writers[f"{split}-{counts[split] % FILES}"].write(example.SerializeToString())
                counts[split] += 1
        try:
            folder.rename(output)
        except OSError:
            if not output.exists():  # else another process of the training was first
                raise
    print(f"{output}: {', '.join(f'{n} of {split}' for split, n in counts.items())}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, output = map(Path, sys.argv[1:])
    if output.exists():
        sys.exit(f"{output} is there: delete it, or name another folder")
    write_records(images_by_class(source) if source.is_dir() else rows_of_table(source), output)
