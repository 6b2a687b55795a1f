"""Splits and folds by hash: stable, of the right size, and nothing moves when data are added."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.data import fold_of, hash_of, split_of

KEYS = [f"photos/{number}.jpg" for number in range(20_000)]


def test_the_hash_never_changes() -> None:
    """These were worked out once; others would put the examples of every data set elsewhere."""
    assert fold_of([7, 12], 5).numpy().tolist() == fold_of(["7", "12"], 5).numpy().tolist()
    with pytest.raises(ValueError, match="keys: expected strings or whole numbers, got float32"):
        hash_of([0.5])
    assert hash_of(["a", "cat/1.jpg", "ü"]).numpy().tolist() == [
        3694432073954588131,
        4408260386524130073,
        3883267778305733891,
    ]


def test_fractions_are_kept_and_the_rest_is_train() -> None:
    names, counts = np.unique(split_of(KEYS, {"validation": 0.1, "test": 0.25}), return_counts=True)
    assert names.tolist() == [b"test", b"train", b"validation"]
    # Four standard deviations of what tossing a coin would give.
    np.testing.assert_allclose(counts / len(KEYS), [0.25, 0.65, 0.1], atol=4 * 0.0034)
    assert set(split_of(KEYS, {}).numpy()) == {b"train"}


def test_a_part_that_grows_takes_from_train_only_and_more_examples_move_none() -> None:
    before = split_of(KEYS, {"validation": 0.1, "test": 0.1}).numpy()
    some = split_of(KEYS[99::-1], {"validation": 0.1, "test": 0.1}).numpy()
    np.testing.assert_array_equal(some[::-1], before[:100])
    after = split_of(KEYS, {"validation": 0.2, "test": 0.3}).numpy()
    for name in (b"validation", b"test"):
        assert set(np.nonzero(before == name)[0]) < set(np.nonzero(after == name)[0])


def test_folds_are_even_in_each_split() -> None:
    train = split_of(KEYS, {"test": 0.5}).numpy() == b"train"
    folds = fold_of(KEYS, 5).numpy()
    for part in (folds, folds[train]):
        np.testing.assert_allclose(np.bincount(part) / len(part), 0.2, atol=0.02)
    kept = tf.data.Dataset.from_tensor_slices(KEYS[:500]).filter(lambda key: fold_of(key, 5) == 1)
    expected = [key.encode() for key, fold in zip(KEYS, folds[:500], strict=False) if fold == 1]
    assert [key.numpy() for key in kept] == expected
