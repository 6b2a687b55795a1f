"""Tests of ctl_core.data, of the states of readers, and of the code in the pages about data."""

import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.data import (
    fold_of,
    hash_of,
    index_shuffle,
    index_shuffle_with_seeds,
    split_of,
    with_seeds,
)
from ctl_core.input.readers import decode, encode
from tests.helpers.cases import assert_resumes, make_hooks
from tests.helpers.project import Train
from tests.helpers.rendering import ROOT, TEMPLATE

EXAMPLES = 60


def read(dataset: tf.data.Dataset, count: int) -> list[Any]:
    return [tf.nest.map_structure(lambda t: t.numpy(), e) for e in dataset.take(count)]


def indices(batch_size: int, count: int, seed: int = 6) -> np.ndarray:
    return np.concatenate(read(index_shuffle(EXAMPLES, batch_size, seed), count))


def test_index_shuffle_has_each_index_once_a_pass() -> None:
    passes = indices(7, 60).reshape(7, EXAMPLES)
    for batch_size in (1, EXAMPLES):
        tf.random.set_seed(batch_size)
        np.testing.assert_array_equal(passes.ravel(), indices(batch_size, 420 // batch_size))
    for seed in (0, 7, 2**31):
        assert not np.array_equal(indices(5, 12, seed), passes[0])
    for number in range(7):
        np.testing.assert_array_equal(np.sort(passes[number]), np.arange(EXAMPLES))
        for other in range(number):
            assert (passes[number] == passes[other]).mean() < 0.2


def test_seeds_are_unique_and_independent_of_the_batch_size() -> None:
    seeds = [
        np.concatenate([s for _, s in read(index_shuffle_with_seeds(EXAMPLES, b, 3), 360 // b)])
        for b in (4, 10)
    ]
    np.testing.assert_array_equal(seeds[0], seeds[1])
    assert len(np.unique(seeds[0], axis=0)) == 360
    elements = tf.data.Dataset.range(20)
    singly = read(with_seeds(elements, 3), 60)
    assert [int(element) for element, _ in singly] == [*range(20)] * 3
    assert len({tuple(seed) for _, seed in singly}) == 60


def test_the_saved_position_is_small(tmp_path: Path) -> None:
    iterator = iter(index_shuffle(200_000, 64, seed=1))
    next(iterator)
    path = Path(tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position")))
    assert sum(file.stat().st_size for file in path.parent.glob(path.name + "*")) < 50_000


def test_the_state_of_a_reader_may_hold_a_tensor_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader's state may contain PyTorch tensors, such as the state of a sampler's generator.

    The test uses a fake PyTorch module.
    """
    Tensor = type("Tensor", (list,), {"__module__": "torch"})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=Tensor))
    decoded = decode(encode({"generator": Tensor(range(5))}))["generator"]
    assert isinstance(decoded, Tensor)
    assert decoded == [*range(5)]


# ---- Splits and folds by hash: additional data move no example ----------------------------------

KEYS = [f"photos/{number}.jpg" for number in range(20_000)]


def test_hash_of_keys_never_changes() -> None:
    """The hashes are fixed, because other hashes would change the splits of existing projects."""
    assert fold_of([7, 12], 5).numpy().tolist() == fold_of(["7", "12"], 5).numpy().tolist()
    assert hash_of(["a", "cat/1.jpg", "ü"]).numpy().tolist() == [
        3694432073954588131,
        4408260386524130073,
        3883267778305733891,
    ]


def test_fractions_are_kept_and_the_rest_is_train() -> None:
    names, counts = np.unique(split_of(KEYS, {"validation": 0.1, "test": 0.25}), return_counts=True)
    assert names.tolist() == [b"test", b"train", b"validation"]
    # The tolerance is four standard deviations of a random split.
    np.testing.assert_allclose(counts / len(KEYS), [0.25, 0.65, 0.1], atol=4 * 0.0034)
    assert set(split_of(KEYS, {}).numpy()) == {b"train"}


def test_a_part_that_grows_takes_from_train_only_and_more_examples_move_none() -> None:
    before = split_of(KEYS, {"validation": 0.1, "test": 0.1}).numpy()
    splits_of_fewer = split_of(KEYS[99::-1], {"validation": 0.1, "test": 0.1}).numpy()
    np.testing.assert_array_equal(splits_of_fewer[::-1], before[:100])
    after = split_of(KEYS, {"validation": 0.2, "test": 0.3}).numpy()
    for name in (b"validation", b"test"):
        assert set(np.nonzero(before == name)[0]) < set(np.nonzero(after == name)[0])


def test_folds_are_even_in_each_split() -> None:
    train = split_of(KEYS, {"test": 0.5}).numpy() == b"train"
    folds = fold_of(KEYS, 5).numpy()
    for folds_of_split in (folds, folds[train]):
        np.testing.assert_allclose(
            np.bincount(folds_of_split) / len(folds_of_split), 0.2, atol=0.02
        )
    kept = tf.data.Dataset.from_tensor_slices(KEYS[:500]).filter(lambda key: fold_of(key, 5) == 1)
    expected = [key.encode() for key, fold in zip(KEYS, folds[:500], strict=False) if fold == 1]
    assert [key.numpy() for key in kept] == expected


# ---- The pages about data ------------------------------------------------------------------------


def create_loss() -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda pair: loss(pair[1], pair[0])


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


@pytest.mark.slow
def test_code_of_the_pages_on_data_trains_and_resumes(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each pipeline that the pages show trains and resumes in a project with the digits dataset."""
    pytest.importorskip("grain")
    (tmp_path / "data").symlink_to(TEMPLATE / "data")
    monkeypatch.chdir(tmp_path)
    pages = (
        ROOT / "docs" / f"{name}.md" for name in ("data", "readers", "large-datasets", "clusters")
    )
    text = "".join(page.read_text() for page in pages)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    shown: dict[str, Any] = {"__file__": str(tmp_path / "callbacks.py")}
    trained = 0
    for number, block in enumerate(blocks):
        (tmp_path / "block.py").write_text(block)
        exec(compile(block, str(tmp_path / "block.py"), "exec"), shown)
        if "def create_dataset" not in block:
            continue
        hooks = {"create_model": create_model, "create_loss": create_loss}
        program = partial(make_hooks, create_dataset=shown["create_dataset"], **hooks)
        assert_resumes(train, program, runs=tmp_path / f"runs-{number}")
        trained += 1
    assert trained == 5
    assert "warning" not in capsys.readouterr().out
