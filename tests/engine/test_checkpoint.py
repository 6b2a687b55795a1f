"""Checkpoints: what is kept, hooks that save, damage, and what does not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import FEATURES, assert_weights, make_hooks, set_weights, sgd, small_model
from tests.helpers.fixtures import Train


def numbers(folder: Path, pattern: str) -> list[int]:
    return sorted(int(path.name.split("-")[1].split(".")[0]) for path in folder.glob(pattern))


def test_parts_share_their_number_and_go_together(train: Train) -> None:
    def create_ckpt(ckpt_path: str, train_model: Any) -> Any:
        ckpt = tf.train.Checkpoint(train_model=train_model)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)

    state = train(make_hooks(create_ckpt=create_ckpt), steps=20, ckpt_every=4)
    folder = state.run_dir / "ckpt"
    for pattern in ("ckpt-*.index", "engine/ckpt-*.index", "engine/ckpt-*.json"):
        assert numbers(folder, pattern) == [12, 16, 20]


def test_a_create_ckpt_of_ones_own_loses_nothing_of_the_engines(train: Train) -> None:
    def create_ckpt(ckpt_path: str, train_model: Any) -> Any:
        ckpt = tf.train.Checkpoint(train_model=train_model)  # no step, no lr, no optimizer
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)

    hooks = make_hooks(
        create_ckpt=create_ckpt,
        create_opt=sgd,  # has no state that could be lost
        at_step={3: lambda lr: lr.assign(0.005)},
    )
    whole = train(hooks, steps=12, run_name="whole")
    train(hooks, steps=5, run_name="parts")
    parts = train(hooks, steps=12, run_name="parts")
    assert parts.step == 12 and float(parts.lr) == pytest.approx(0.005)
    assert_weights(whole, parts, rtol=0)


def test_manager_save_in_a_hook_holds_what_later_hooks_of_the_step_do(train: Train) -> None:
    paths: list[str] = []
    hooks = make_hooks(
        every_steps={5: lambda manager: paths.append(manager.save())},
        at_step={10: lambda lr: lr.assign(0.125)},
    )
    state = train(hooks, steps=10, ckpt_every=0)
    folder = state.run_dir / "ckpt"
    assert [Path(path).name for path in paths] == ["ckpt-5", "ckpt-10"]
    assert numbers(folder, "engine/ckpt-*.json") == [5, 10]
    reader = tf.train.load_checkpoint(paths[1])
    assert reader.get_tensor("lr/value/.ATTRIBUTES/VARIABLE_VALUE") == 0.125


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(bytes(content))


PARTS = [
    "ckpt-10.index",
    "ckpt-10.data-00000-of-00001",
    "engine/ckpt-10.index",
    "engine/ckpt-10.data-00000-of-00001",
    "engine/ckpt-10.json",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """The folder of a run with checkpoints of steps 5 and 10, and its weights."""
    runs = tmp_path_factory.mktemp("runs")
    config = ctl_core.Config(
        steps=10,
        batch_size=16,
        learning_rate=0.01,
        ckpt_every=5,
        run_name="run",
        runs_dir=str(runs),
    )
    return runs, ctl_core.train(make_hooks(), config).train_model.get_weights()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", [cut_short, empty, flip, Path.unlink])
def test_a_damaged_newest_checkpoint_falls_back(
    train: Train,
    tmp_path: Path,
    trained: tuple[Path, list[np.ndarray]],
    capsys: pytest.CaptureFixture[str],
    part: str,
    damage: Any,
) -> None:
    runs, weights = trained
    shutil.copytree(runs, tmp_path / "runs")
    damage(tmp_path / "runs" / "run" / "ckpt" / part)
    state = train(make_hooks(), steps=10, ckpt_every=5)
    output = capsys.readouterr().out
    # Without its record a checkpoint never counted, so there is nothing to warn of.
    uncounted = damage is Path.unlink and part == PARTS[-1]
    assert ("step 10 is damaged" in output) is not uncounted, output
    assert "resuming at step 5" in output
    for one, other in zip(weights, state.train_model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("part", ["input-10.index", "input-10.data-00000-of-00001"])
@pytest.mark.parametrize("damage", [cut_short, Path.unlink])
def test_a_damaged_input_position_is_reached_by_skipping(
    train: Train,
    tmp_path: Path,
    trained: tuple[Path, list[np.ndarray]],
    capsys: pytest.CaptureFixture[str],
    part: str,
    damage: Any,
) -> None:
    shutil.copytree(trained[0], tmp_path / "runs")
    damage(tmp_path / "runs" / "run" / "ckpt" / "engine" / part)
    state = train(make_hooks(), steps=15)
    assert "reading and dropping 160 examples" in capsys.readouterr().out
    whole = train(make_hooks(), steps=15, run_name="whole")
    assert_weights(whole, state, rtol=0)


def test_a_first_checkpoint_that_was_never_finished_is_none(train: Train) -> None:
    folder = train(make_hooks(), steps=5).run_dir / "ckpt"
    for path in folder.glob("engine/ckpt-5.*"):  # written after the user's part
        path.unlink()
    seen: list[int] = []
    train(make_hooks(every_steps={1: lambda step, loss: seen.append(step)}), steps=6)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert numbers(folder, "engine/ckpt-*.json") == [6]


def test_one_checkpoint_to_keep_is_too_few(train: Train) -> None:
    def create_ckpt(ckpt_path: str, train_model: Any) -> Any:
        ckpt = tf.train.Checkpoint(train_model=train_model)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=1)

    with pytest.raises(ctl_core.SetupError, match=r"test_checkpoint.py:\d+\): max_to_keep=1 del"):
        train(make_hooks(create_ckpt=create_ckpt))


def test_no_whole_checkpoint_stops_instead_of_starting_over(train: Train) -> None:
    state = train(make_hooks(), steps=10, ckpt_every=5)
    for path in (state.run_dir / "ckpt").glob("ckpt-*.data*"):
        cut_short(path)
    with pytest.raises(ctl_core.SetupError, match="none of them is whole"):
        train(make_hooks(), steps=10)


def test_a_model_that_changed_is_refused_by_the_names_of_its_variables(train: Train) -> None:
    train(make_hooks(), steps=2)

    def wider() -> keras.Model:
        return set_weights(
            keras.Sequential(
                [
                    keras.Input((FEATURES,)),
                    keras.layers.Dense(9, name="hidden"),
                    keras.layers.Dense(1, name="out"),
                ]
            )
        )

    with pytest.raises(ctl_core.SetupError, match=r"hidden/kernel has shape \[5, 9\].*\[5, 8\]"):
        train(make_hooks(create_model=wider), steps=4)

    def deeper() -> keras.Model:
        model = small_model()
        return keras.Sequential([keras.Input((FEATURES,)), *model.layers, keras.layers.Dense(1)])

    with pytest.raises(ctl_core.SetupError, match=r"dense[^ ]*/kernel is new"):
        train(make_hooks(create_model=deeper), steps=4)
    with pytest.raises(ctl_core.SetupError, match="is gone"):
        train(make_hooks(create_opt=sgd), steps=4)
