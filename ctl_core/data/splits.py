"""Splits and folds by a hash of an example's key: nothing moves when examples are added.

An example's part depends on its own key and nothing else: not on the other examples, their order,
the machine or Python's hash seed. Examples of one key, such as all pictures of one patient, stay
together. The hash is FarmHash's Fingerprint64, which TensorFlow promises never to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

_HASHES = 2**62


def hash_of(keys: Any) -> tf.Tensor:
    """Returns the hash of each key: int64, from 0 up to below 2**62, of the shape of ``keys``.

    Whole numbers are hashed as they are written down.

    Raises:
        ValueError: keys are neither strings nor whole numbers.
    """
    keys = tf.convert_to_tensor(keys, tf.string if isinstance(keys, list) and not keys else None)
    if keys.dtype.is_integer:
        keys = tf.strings.as_string(keys)
    if keys.dtype != tf.string:
        raise ValueError(f"keys: expected strings or whole numbers, got {keys.dtype.name}")
    return tf.strings.to_hash_bucket_fast(keys, _HASHES)


def split_of(keys: Any, fractions: Mapping[str, float]) -> tf.Tensor:
    """Returns the name of each example's split, in a graph or outside.

    ``dataset.filter(lambda key, x: split_of(key, {"validation": 0.1}) == "train")``, for data of
    your own. A part that grows takes from ``train`` only, as long as all fit.

    Args:
        keys: strings or whole numbers, of any shape
        fractions: how much of all goes to ``validation`` and to ``test``; the rest is ``train``

    Returns:
        Strings of the shape of ``keys``.

    Raises:
        ValueError: keys are of another type, a name is another one, or the fractions do not lie
            between 0 and 1 together.
    """
    validation, test = fractions.get("validation", 0.0), fractions.get("test", 0.0)
    if others := sorted(set(fractions) - {"validation", "test"}):
        raise ValueError(f"fractions: expected validation and test, got {', '.join(others)}")
    if min(validation, test) < 0 or validation + test >= 1:
        raise ValueError(f"fractions must be from 0 up and leave some for train, got {fractions}")
    hashes = hash_of(keys)
    names = tf.where(hashes >= int((1 - validation) * _HASHES), "validation", "train")
    return tf.where(hashes < int(test * _HASHES), "test", names)


def fold_of(keys: Any, folds: int) -> tf.Tensor:
    """Returns each example's fold for cross-validation, which has nothing to do with its split.

    Args:
        keys: strings or whole numbers, of any shape
        folds: how many there are

    Returns:
        int64, from 0 up to below ``folds``, of the shape of ``keys``.

    Raises:
        ValueError: keys are of another type, or there are fewer than two folds.
    """
    if folds < 2:
        raise ValueError(f"folds must be 2 or more, got {folds}")
    return tf.strings.to_hash_bucket_fast(tf.strings.as_string(hash_of(keys)), folds)
