"""Reading the TFRecord files that ``python -m ctl_core tfrecords`` writes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.data.manifest import FRAME, Feature, Manifest, Shard, merged, read_complete
from ctl_core.data.splits import fold_of_hash
from ctl_core.errors import EXPLAINERS, SetupError
from ctl_core.files import from_here
from ctl_core.settings import nearest, shown

# Neighbours that are read at once (bytes), and runs of them that are mixed.
_RUN, _RUNS = 64 * 2**10, 32
_CHUNK = 256  # records, at most, that go through the pipeline together
_PASSES = 2**40  # more than any run sees


def read_tfrecords(
    manifest: str | Path,
    split: str = "train",
    features: Any = None,
    *,
    batch_size: int | None = None,
    seed: int | None = None,
    image_size: tuple[int, int] | None = None,
    leave_out: tuple[int, int] | None = None,
    only: tuple[int, int] | None = None,
    input_context: tf.distribute.InputContext | None = None,
    by_file: bool = False,
) -> tf.data.Dataset:
    """Reads a split of the files of a manifest.

    Without a seed it is one pass, in the order of the files, which is that of the hashes of the
    examples' keys. With one it is shuffled, and endless, so that a run is measured in steps: pass
    after pass, each example once in each, in another order each time. Runs of neighbours (64 KB
    or one record, whichever is more) are read in random order from all files, and of 32 such runs
    the examples are mixed: a full shuffle where a record has 64 KB. The order of any pass follows
    from the seed and the pass's number alone, and a checkpoint holds the examples in between, a few
    megabytes, not a buffer as large as the shuffle.

    In a cluster, a hook that does not name ``input_context`` is right: the engine deals out the
    batches, and processes drop those of the others. With ``input_context`` each process reads the
    same files but decodes its own batches only, so that weights are those of one process all the
    same. With ``by_file``, too, each reads files of its own where there are as many as processes:
    least to read, but other examples meet in a batch than in one process.

    Args:
        manifest: the folder, or its manifest.json
        split: such as ``train``
        features: what an element is: a structure of features' names, such as
            ``("image", "label")``; default: a dict of all features
        batch_size: examples in an element; default: single examples
        seed: where the order of the passes starts from; default: no shuffle
        image_size: height and width that images are resized to, as float32 then; needed to batch
            images of different sizes
        leave_out: (fold, folds): all examples but those of one fold, for cross-validation
        only: (fold, folds): the examples of that fold
        input_context: as the hook gets it; needs a batch_size
        by_file: whether processes share out files instead of batches

    Returns:
        A dataset. Images are uint8 of shape [height, width, channels]; lists of different lengths
        are ragged.

    Raises:
        SetupError: the manifest does not fit its files or is not complete, there is no such split
            or feature, or the arguments contradict each other.
    """
    found = read_complete(manifest)
    shards = [shard for shard in found.of(split) if shard.examples]
    if not shards:
        raise SetupError(f"{from_here(found.folder)}: all input of {split} was left out.")
    wanted = _wanted(found, features)
    _check_types(batch_size, seed, image_size)
    decoder = _Decoder(found, shards, sorted(set(tf.nest.flatten(wanted))), image_size)
    _check(found, decoder, batch_size, leave_out, only, input_context, by_file)
    found.open(split)
    _OPENED.update({found.records(shard): found.index(shard) for shard in shards})
    pipelines = input_context.num_input_pipelines if input_context else 1
    own_files = by_file and len(shards) >= pipelines > 1
    if own_files:
        assert input_context
        shards = shards[input_context.input_pipeline_id :: pipelines]
    records = _Records.of(found, shards, leave_out, only)
    if records.examples == 0:
        raise SetupError(f"{split}: no example of {from_here(found.folder)} is in that fold.")
    dataset = _in_order(records) if seed is None else _shuffled(records, seed)
    left = records.examples if seed is None else tf.data.INFINITE_CARDINALITY
    if batch_size is None:
        dataset = dataset.map(decoder.parse, tf.data.AUTOTUNE).unbatch()
        dataset = dataset.map(decoder.decode_one, tf.data.AUTOTUNE)
    else:
        dataset = dataset.rebatch(batch_size, drop_remainder=seed is not None)
        left = -(-left // batch_size) if left > 0 else left
        if pipelines > 1 and not own_files:
            assert input_context
            index = input_context.input_pipeline_id
            dataset = dataset.shard(pipelines, index)
            left = len(range(index, left, pipelines)) if left > 0 else left
        dataset = dataset.map(lambda batch: decoder.decode(decoder.parse(batch)), tf.data.AUTOTUNE)
    dataset = dataset.map(
        lambda values: tf.nest.map_structure(lambda name: values[name], wanted),
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(left))


def _wanted(manifest: Manifest, features: Any) -> Any:
    names = list(manifest.features)
    if features is None:
        return {name: name for name in names}
    for name in tf.nest.flatten(features):
        if name not in names:
            raise SetupError(
                f"features: {from_here(manifest.folder)} has no {shown(name)}"
                f"{nearest(str(name), names)} (there: {', '.join(names)})"
            )
    return features


def _check_types(batch_size: Any, seed: Any, image_size: Any) -> None:
    """Refuses arguments that TensorFlow would fail on, without saying which.

    Raises:
        SetupError: one is of another type.
    """
    for name, value in (("batch_size", batch_size), ("seed", seed)):
        if value is not None and not _whole(value):
            raise SetupError(f"{name}: expected a whole number, got {shown(value)}.")
    if image_size is not None and not (
        isinstance(image_size, Sequence)
        and len(image_size) == 2
        and all(_whole(size) and size > 0 for size in image_size)
    ):
        raise SetupError(
            f"image_size: expected (height, width), such as (160, 160), got {shown(image_size)}."
        )


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check(
    manifest: Manifest,
    decoder: _Decoder,
    batch_size: int | None,
    leave_out: tuple[int, int] | None,
    only: tuple[int, int] | None,
    input_context: Any,
    by_file: bool,
) -> None:
    if batch_size is not None and batch_size < 1:
        raise SetupError(f"batch_size must be 1 or more, got {batch_size}.")
    if leave_out is not None and only is not None:
        raise SetupError("leave_out and only: give one of the two.")
    fold = leave_out or only
    if fold is not None and not (len(fold) == 2 and 0 <= fold[0] < fold[1] >= 2):
        raise SetupError(f"leave_out and only: expected (fold, folds), such as (0, 5), got {fold}.")
    if input_context is not None and batch_size is None:
        raise SetupError("input_context: needs a batch_size, since batches are shared out.")
    if by_file and input_context is None:
        raise SetupError("by_file: needs the input_context, which the hook may name.")
    for name, shape in decoder.shapes.items():
        if batch_size is not None and None in shape:
            raise SetupError(
                f"{name}: the images of {from_here(manifest.folder)} differ in size; to batch them "
                "give image_size=(height, width), or leave out batch_size and batch yourself."
            )


@dataclasses.dataclass(frozen=True)
class _Records:
    """The records to read, in the order of the files.

    Attributes:
        files: paths
        file: of each run of neighbours, the number of its file
        begin: of each run, where it begins in that file (bytes)
        first: of each run, the number of its first record; and of one more than the last
        longest: bytes of the longest run
        kept: of each record, whether it is read; None if all are
        examples: how many those are
    """

    files: list[str]
    file: np.ndarray
    begin: np.ndarray
    first: np.ndarray
    longest: int
    kept: np.ndarray | None
    examples: int

    @staticmethod
    def of(
        manifest: Manifest,
        shards: list[Shard],
        leave_out: tuple[int, int] | None,
        only: tuple[int, int] | None,
    ) -> _Records:
        mean = sum(shard.bytes for shard in shards) / sum(shard.examples for shard in shards)
        run = int(max(1, min(_CHUNK, _RUN // mean)))
        file, begin, first, hashes, longest, before = [], [], [], [], 0, 0
        for number, shard in enumerate(shards):
            index = np.fromfile(manifest.index(shard), "<i8").reshape(-1, 2)
            starts = index[::run, 0]
            file.append(np.full(len(starts), number))
            begin.append(starts)
            first.append(before + np.arange(0, shard.examples, run))
            before += shard.examples
            hashes.append(index[:, 1])
            longest = max(longest, int(np.diff([*starts, shard.bytes]).max()))
        kept = None
        if fold := leave_out or only:
            kept = (fold_of_hash(np.concatenate(hashes), fold[1]).numpy() == fold[0]) == bool(only)
        return _Records(
            [str(manifest.records(shard)) for shard in shards],
            np.concatenate(file),
            np.concatenate(begin),
            np.concatenate([*first, [before]]),
            longest,
            kept,
            before if kept is None else int(kept.sum()),
        )


def _in_order(records: _Records) -> tf.data.Dataset:
    """Returns a pass as vectors of serialized examples."""
    dataset = tf.data.TFRecordDataset(records.files, buffer_size=2**20)
    longest_run = int(np.diff(records.first).max())
    dataset = dataset.batch(longest_run)
    if records.kept is None:
        return dataset
    kept = tf.constant(records.kept)

    def keep(number: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
        begin = number * longest_run
        return tf.boolean_mask(batch, kept[begin : begin + tf.size(batch, tf.int64)])

    return dataset.enumerate().map(keep)


def _shuffled(records: _Records, seed: int) -> tf.data.Dataset:
    """Returns endless passes as vectors of serialized examples.

    A run is read by a dataset of its own, of one file from an offset on: an op that has no other
    public form, ``tf.raw_ops.TFRecordDatasetV2``.
    """
    files, begin = tf.constant(records.files), tf.constant(records.begin, tf.int64)
    file, first = tf.constant(records.file, tf.int64), tf.constant(records.first, tf.int64)
    kept = None if records.kept is None else tf.constant(records.kept)
    runs, most = len(records.file), int(np.diff(records.first).max())

    def key_of(number: tf.Tensor, block: Any) -> tf.Tensor:
        salt = tf.stack([number, tf.cast(block, tf.int64)])
        key = tf.random.stateless_uniform([2], [seed, 0], None, None, tf.int64)
        return tf.random.stateless_uniform([2], key ^ salt, None, None, tf.uint32)

    def read(number: tf.Tensor, place: tf.Tensor) -> tf.data.Dataset:
        run = tf.random.experimental.index_shuffle(
            place, key_of(number, -1), tf.constant(runs - 1, tf.int64)
        )
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=files[file[run]][None],
            compression_type="",
            buffer_size=tf.constant(min(records.longest, 2**20), tf.int64),
            byte_offsets=begin[run][None],
        )
        dataset = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
        count = first[run + 1] - first[run]
        dataset = dataset.take(count).batch(most)
        if kept is None:
            return dataset
        return dataset.map(lambda batch: tf.boolean_mask(batch, kept[first[run] : first[run + 1]]))

    def a_pass(number: tf.Tensor) -> tf.data.Dataset:
        def mix(block: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
            size = tf.size(batch, tf.int64)
            order = tf.random.experimental.index_shuffle(
                tf.range(size), key_of(number, block), tf.maximum(size - 1, 0)
            )
            return tf.gather(batch, order)

        batches = tf.data.Dataset.range(runs).interleave(
            lambda place: read(number, place),
            cycle_length=8,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        return batches.rebatch(most * _RUNS).enumerate().map(mix)

    return tf.data.Dataset.range(_PASSES).flat_map(a_pass)


class _Decoder:
    """Makes tensors of serialized examples.

    Attributes:
        shapes: of images, as they are decoded
    """

    def __init__(
        self,
        manifest: Manifest,
        shards: Sequence[Shard],
        names: list[str],
        image_size: tuple[int, int] | None,
    ) -> None:
        self._features = {name: manifest.features[name] for name in names}
        self._size = image_size
        self.shapes: dict[str, list[int | None]] = {}
        for name, feature in self._features.items():
            if feature.encoding == "image":
                shape = merged(shard.shapes[name] for shard in shards)
                shape[2] = shape[2] or 3
                self.shapes[name] = [*image_size, shape[2]] if image_size else shape

    def parse(self, batch: tf.Tensor) -> dict[str, Any]:
        """Parses a vector of serialized examples; images stay files."""
        parsed = tf.io.parse_example(batch, {k: _spec(f) for k, f in self._features.items()})
        for name, feature in self._features.items():
            if feature.encoding == "raw":
                values = tf.io.decode_raw(parsed[name], feature.dtype)
                parsed[name] = tf.reshape(values, [-1, *feature.shape])
        return parsed  # type: ignore[no-any-return]

    def decode(self, values: dict[str, Any]) -> dict[str, Any]:
        """Decodes the images of a batch."""
        decoded = {}
        for name, shape in self.shapes.items():
            spec = tf.TensorSpec(shape, tf.float32 if self._size else tf.uint8)
            decoded[name] = tf.map_fn(
                lambda file, shape=shape: self._image(file, shape),
                values[name],
                fn_output_signature=spec,
            )
        return {**values, **decoded}

    def decode_one(self, values: dict[str, Any]) -> dict[str, Any]:
        """Decodes the images of a single example."""
        images = {name: self._image(values[name], shape) for name, shape in self.shapes.items()}
        return {**values, **images}

    def _image(self, file: tf.Tensor, shape: list[int | None]) -> tf.Tensor:
        channels = shape[2] if shape[2] in (1, 3, 4) else 0
        image = tf.io.decode_image(file, channels=channels, expand_animations=False)
        if self._size:
            image = tf.image.resize(image, self._size)
        return tf.ensure_shape(image, shape)


def _spec(feature: Feature) -> Any:
    if feature.encoding == "ragged":
        return tf.io.RaggedFeature(tf.as_dtype(feature.dtype), row_splits_dtype=tf.int64)
    if feature.encoding == "value":
        return tf.io.FixedLenFeature([], tf.as_dtype(feature.dtype))
    return tf.io.FixedLenFeature([], tf.string)


# ---- What a failure of reading is about ---------------------------------------------------------

# The files that this process reads, each with its index.
_OPENED: dict[Path, Path] = {}
_HEAD = 12  # bytes of a record before its data
_AT = re.compile(r"(?:corrupted|truncated) record at (\d+)")


def _explain(error: BaseException) -> str | None:
    """Names the file of a damaged record, of which TensorFlow says no more than the offset."""
    found = _AT.search(str(error))
    if not (isinstance(error, tf.errors.DataLossError) and found):
        return None
    at = int(found[1])
    for path, index in _OPENED.items():
        begins = set(np.fromfile(index, "<i8")[::2].tolist()) if index.exists() else set()
        for begin in (at, at - _HEAD):  # where its length stands, or its data
            if begin in begins and not whole_record(path, begin):
                return (
                    f"{from_here(path)}: the record at byte {begin} is damaged (delete the file "
                    "and run the same tfrecords command again, which writes what is missing)"
                )
    return None


def whole_record(path: Path, offset: int) -> bool:
    """Whether a record begins at a byte of a file whose checksums are right."""
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[str(path)], compression_type="", buffer_size=FRAME, byte_offsets=[offset]
    )
    dataset = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
    try:
        return len(list(dataset.take(1))) == 1
    except tf.errors.OpError:
        return False


EXPLAINERS.append(_explain)
