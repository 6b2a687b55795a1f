"""Folders of images by class, as examples to write."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.data.manifest import Feature
from ctl_core.data.splits import SPLITS, hash_of
from ctl_core.errors import SetupError, op_message
from ctl_core.files import from_here
from ctl_core.settings import shown
from ctl_core.tools.png import png_shape
from ctl_core.tools.record_options import TABLES, Options
from ctl_core.tools.record_source import Damaged, Example, Source, split_named

_ENDINGS = (".jpg", ".jpeg", ".png", ".gif", ".bmp")
_BLOCK, _TOGETHER = 256, 64  # images that are read together, and checked in one call


def image_source(options: Options) -> Source:
    """Finds the images of a folder; their files are read and decoded when they are written.

    Raises:
        SetupError: there is none, or an option is for tables.
    """
    folder = options.source
    for name in ("label", "key"):
        if getattr(options, name) is not None:
            raise SetupError(
                f"{name}: is for tables; images are labelled by their folders, and their keys are "
                "their paths."
            )
    if options.drop:
        raise SetupError("drop: is for tables; images have no columns.")
    others: collections.Counter[str] = collections.Counter()
    found = sorted(_images(str(folder), others))
    if not found:
        raise SetupError(
            f"{from_here(folder)}: holds no image ({', '.join(_ENDINGS)}) and no table "
            f"({', '.join(TABLES)})."
        )
    tops = {path.split("/")[0] for path, _, _ in found if "/" in path}
    by_split = bool(tops) and all(split_named(top) for top in tops)
    paths, splits, classes, misplaced = [], [], [], []
    labelled = any(path.count("/") > by_split for path, _, _ in found)
    for path, size, changed in found:
        *folders, _ = path.split("/")
        if (by_split and not folders) or (labelled and len(folders) == by_split):
            misplaced.append([path, "lies in no folder of a class"])
            continue
        paths.append((path, size, changed))
        splits.append(split_named(folders[0]) if by_split else "train")
        classes.append(folders[int(by_split)] if labelled else "")
    names = sorted(set(classes)) if labelled else []
    numbers = {name: number for number, name in enumerate(names)}
    features = {"image": Feature("uint8", [None, None, None], "image")}
    if labelled:
        features["label"] = Feature("int64", [], "value")
    features["key"] = Feature("string", [], "value")
    labels = [numbers.get(name, 0) for name in classes]

    def read(indices: np.ndarray) -> Iterator[Example | Damaged]:
        names = [paths[index][0] for index in indices]
        for index, name, checked in zip(indices, names, _checked(folder, names), strict=True):
            if isinstance(checked, str):
                yield Damaged(os.path.join(folder, name), checked)
                continue
            values: dict[str, Any] = {"image": checked[0], "key": name.encode()}
            if labelled:
                values["label"] = labels[index]
            yield Example(values, {"image": checked[1]})

    return Source(
        features=features,
        label="label" if labelled else None,
        class_names=names,
        hashes=hash_of([path for path, _, _ in paths]).numpy(),
        splits=np.array([SPLITS.index(split) for split in splits], "int8"),
        bytes=sum(size for _, size, _ in paths),
        state=[list(one) for one in paths],
        damaged=[Damaged(os.path.join(folder, path), why) for path, why in misplaced],
        read=read,
        notes=_notes(others),
    )


def _notes(others: collections.Counter[str]) -> list[str]:
    """Says which files are left out, and what is read."""
    if not others:
        return []
    count, kinds = others.total(), ", ".join(kind for kind, _ in others.most_common(5))
    return [
        f"{count} file{'s' * (count > 1)} of other endings left out ({kinds}); images are read "
        f"from {', '.join(_ENDINGS)}."
    ]


def _images(
    folder: str, others: collections.Counter[str], prefix: str = ""
) -> list[tuple[str, int, int]]:
    """Returns path below the first folder, size and time of change of each image, hidden ones not.

    Args:
        folder: to look in
        others: counts the endings of the files that are no images
        prefix: the folder's own path below the first

    Raises:
        SetupError: a folder cannot be read.
    """
    found, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith("."):
                    continue
                if not name.isprintable() or "\\" in name:
                    raise SetupError(
                        f"{shown(prefix + name)}: has a name that no message can show; rename it."
                    )
                if name.lower().endswith(_ENDINGS) and not entry.is_dir():
                    try:
                        stat = entry.stat()
                    except FileNotFoundError:  # a link to nothing; reading it says so
                        stat = entry.stat(follow_symlinks=False)
                    found.append((prefix + name, stat.st_size, stat.st_mtime_ns))
                elif entry.is_dir():
                    folders.append(name)
                else:
                    others[os.path.splitext(name)[1].lower() or name] += 1
    except OSError as error:
        raise SetupError(f"{from_here(folder)}: cannot be read: {error.strerror}.") from error
    for name in folders:
        found += _images(f"{folder}/{name}", others, f"{prefix}{name}/")
    return found


def _checked(folder: Path, names: list[str]) -> Iterator[tuple[bytes, list[int | None]] | str]:
    """Yields each file's content and the shape of its image, or why it is none, in their order.

    Files are read here, a block ahead of the one whose images another thread decodes, if it has to.
    """
    with ThreadPoolExecutor(1) as pool:
        waiting: collections.deque[Any] = collections.deque()
        for start in range(0, len(names), _BLOCK):
            block = [_content(f"{folder}/{name}") for name in names[start : start + _BLOCK]]
            shapes = [png_shape(each) if isinstance(each, bytes) else None for each in block]
            waiting.append(
                pool.submit(_decoded, block, shapes)
                if None in shapes
                else zip(block, shapes, strict=True)
            )
            if len(waiting) > 1:
                yield from _result(waiting.popleft())
        while waiting:
            yield from _result(waiting.popleft())


def _result(waiting: Any) -> Any:
    return waiting.result() if isinstance(waiting, Future) else waiting


def _content(path: str) -> bytes | str:
    """Returns what is in a file, or why it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            size = os.fstat(file).st_size
            content = os.read(file, size)
            while len(content) < size and (more := os.read(file, size - len(content))):
                content += more
            return content
        finally:
            os.close(file)
    except OSError as error:
        return error.strerror or str(error)


def _decoded(
    block: list[bytes | str], shapes: list[list[int] | None]
) -> list[tuple[bytes, list[int]] | str]:
    """Decodes the files whose shape is not known; what is text is why one could not be read."""
    contents = [
        content
        for content, shape in zip(block, shapes, strict=True)
        if shape is None and isinstance(content, bytes)
    ]
    contents += [_filler()] * (-len(contents) % _TOGETHER)
    found: list[list[int]] = []
    try:
        for start in range(0, len(contents), _TOGETHER):
            found += _shapes_of(contents[start : start + _TOGETHER]).numpy().tolist()
    except tf.errors.OpError:  # which one it is, the error does not say
        return [each if isinstance(each, str) else _decoded_one(each) for each in block]
    rest = iter(found)
    return [
        each if isinstance(each, str) else (each, shape or next(rest))
        for each, shape in zip(block, shapes, strict=True)
    ]


@functools.cache
def _filler() -> bytes:
    """Returns an image where there are not as many as are checked in one call."""
    return tf.io.encode_png(tf.zeros([1, 1, 1], tf.uint8)).numpy()  # type: ignore[no-any-return]


def _decoded_one(content: bytes) -> tuple[bytes, list[int]] | str:
    try:
        return content, tf.io.decode_image(content, expand_animations=False).shape.as_list()
    except tf.errors.OpError as error:
        return op_message(error, 100)


@tf.function(input_signature=[tf.TensorSpec([_TOGETHER], tf.string)], autograph=False)
def _shapes_of(contents: tf.Tensor) -> tf.Tensor:
    """Decodes files, to see whether they can be, and returns [height, width, channels] of each.

    Without a loop in the graph, which takes as long as small images do.
    """
    images = [tf.io.decode_image(c, expand_animations=False) for c in tf.unstack(contents)]
    return tf.stack([tf.shape(image) for image in images])
