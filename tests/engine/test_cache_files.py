"""Tests of pipelines that cache elements in files, and of files left by a stopped process."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, small
from tests.helpers.cases import make_hooks
from tests.helpers.project import Train

EXAMPLES = small.EXAMPLES


def cached_hooks(file: Path, kind: str = "cache", **more: Any) -> Any:
    """Returns hooks that read examples through a cache or a snapshot file, then shuffle them."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices(small.data())
        cached = getattr(examples, kind)(str(file))
        return cached.shuffle(20, seed=3).batch(per_replica_batch_size, drop_remainder=True)

    return make_hooks(create_dataset=create_dataset, create_opt=small.create_opt, **more)


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        ("cache", 3),  # The run stops in the first pass, before the cache is complete.
        *small.slow_but(of=[("cache", 10), ("snapshot", 3), ("snapshot", 10)]),
    ],
)
def test_resumed_run_has_the_weights_of_an_undisturbed_one(
    train: Train, tmp_path: Path, kind: str, stop: int
) -> None:
    settings = {"batch_size": 16, "ckpt_every": 1}
    whole = train(cached_hooks(tmp_path / "a", kind), steps=14, run_name="whole", **settings)
    train(cached_hooks(tmp_path / "b", kind), steps=stop, run_name="parts", **settings)
    resumed = train(cached_hooks(tmp_path / "b", kind), steps=14, run_name="parts", **settings)
    compare.assert_same(resumed.train_model.weights, whole.train_model.weights)


@pytest.mark.parametrize("evaluates", small.slow_but(False, of=[False, True]))
def test_files_of_a_stopped_process_are_named(
    train: Train, tmp_path: Path, evaluates: bool
) -> None:
    """The error names all files of the stopped process, and training starts once they are gone."""
    file = tmp_path / "cached"
    hooks = cached_hooks(file)
    if evaluates:
        hooks = make_hooks(create_eval_dataset=hooks.create_dataset)
    leftovers = [tmp_path / "cached_0.lockfile", tmp_path / "cached_0.data-00000-of-00001"]
    for leftover in leftovers:
        leftover.write_text("")
    hook = "create_eval_dataset" if evaluates else "create_dataset"
    with pytest.raises(ctl_core.SetupError, match=f"^{hook} .*cached is unfinished") as refused:
        train(hooks, steps=2)
    for leftover in leftovers:
        assert str(leftover) in str(refused.value)
        leftover.unlink()
    assert train(hooks, steps=2).step == 2


def test_complete_cache_is_read(train: Train, tmp_path: Path) -> None:
    hooks = cached_hooks(tmp_path / "cached")
    train(hooks, steps=9, run_name="first", batch_size=16)
    assert (tmp_path / "cached.index").exists()
    train(hooks, steps=9, run_name="second", batch_size=16)


def test_a_cache_that_is_older_than_the_hooks_is_reported(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It contains what the functions returned before they were edited.

    https://github.com/huggingface/datasets/issues/3297
    """
    hooks = cached_hooks(tmp_path / "cached")
    warning = r"create_dataset \(test_cache_files.py:\d+\): the cache file .*/cached is older"
    for edited, name in ((False, "a"), (False, "b"), (True, "c")):
        if edited:
            os.utime(tmp_path / "cached.index", (0, 0))
        train(hooks, steps=9, run_name=name, batch_size=16)
        assert bool(re.search(warning, capsys.readouterr().out)) is edited


@pytest.mark.parametrize("character", "*?[]\\")
def test_name_that_is_a_pattern_is_refused(train: Train, tmp_path: Path, character: str) -> None:
    """TensorFlow would delete the cache of another run, whose name the pattern matches."""
    hooks = cached_hooks(tmp_path / f"cached{character}")
    with pytest.raises(ctl_core.SetupError, match="takes the name for a pattern") as error:
        train(hooks, steps=2)
    assert "test_cache_files.py" in str(error.value)
    assert not list(tmp_path.glob("cached*"))


def test_snapshot_whose_name_is_a_pattern_is_refused(train: Train, tmp_path: Path) -> None:
    """The next run would read an empty snapshot."""
    hooks = cached_hooks(tmp_path / "a[1]", "snapshot")
    with pytest.raises(ctl_core.SetupError, match=r"snapshot .* takes the name for a pattern"):
        train(hooks, steps=2)
