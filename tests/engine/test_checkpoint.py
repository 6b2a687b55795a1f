"""Checkpoints: what is kept, hooks that save and restore, damage, and what does not fit."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.run.errors import RunError
from tests.helpers.cases import FEATURES, assert_weights, make_hooks, sgd, small_model
from tests.helpers.fixtures import Train
from tests.helpers.resume import Blocks, seeded


def numbers(folder: Path, pattern: str) -> list[int]:
    return sorted(int(path.name.split("-")[1].split(".")[0]) for path in folder.glob(pattern))


def create_ckpt(ckpt_path: str, train_model: Any) -> Any:
    ckpt = tf.train.Checkpoint(train_model=train_model)  # no step, no lr, no optimizer
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)


def test_parts_share_their_number_and_go_together(train: Train) -> None:
    state = train(make_hooks(create_ckpt=create_ckpt), steps=20, ckpt_every=4)
    folder = state.run_dir / "ckpt"
    for pattern in ("ckpt-*.index", "engine/ckpt-*.index", "engine/ckpt-*.json"):
        assert numbers(folder, pattern) == [12, 16, 20]


def test_a_create_ckpt_of_ones_own_loses_nothing_of_the_engines(train: Train) -> None:
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
    assert reader.get_tensor("lr/variable/.ATTRIBUTES/VARIABLE_VALUE") == 0.125


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def take_from_step_5(path: Path) -> None:
    shutil.copy(path.with_name(path.name.replace("10", "5")), path)


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


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    ("ckpt-10.index", Path.unlink),
    ("ckpt-10.data-00000-of-00001", cut_short),
    ("ckpt-10.*", take_from_step_5),
    ("engine/ckpt-10.index", cut_short),
    ("engine/ckpt-10.data-00000-of-00001", Path.unlink),
    ("engine/ckpt-10.json", cut_short),
    ("engine/ckpt-10.json", take_from_step_5),
]


@pytest.mark.parametrize(("parts", "damage"), DAMAGES)
def test_a_damaged_newest_checkpoint_falls_back(
    train: Train,
    tmp_path: Path,
    trained: tuple[Path, list[np.ndarray]],
    capsys: pytest.CaptureFixture[str],
    parts: str,
    damage: Callable[[Path], object],
) -> None:
    runs, weights = trained
    shutil.copytree(runs, tmp_path / "runs")
    for path in (tmp_path / "runs" / "run" / "ckpt").glob(parts):
        damage(path)
    state = train(make_hooks(), steps=10, ckpt_every=5)
    output = capsys.readouterr().out
    assert "step 10 is damaged" in output and "resuming at step 5" in output
    assert_weights(state, weights, rtol=0)


@pytest.mark.parametrize("damage", [cut_short, Path.unlink])
def test_a_damaged_input_position_is_reached_by_skipping(
    train: Train,
    tmp_path: Path,
    trained: tuple[Path, list[np.ndarray]],
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
) -> None:
    shutil.copytree(trained[0], tmp_path / "runs")
    damage(tmp_path / "runs" / "run" / "ckpt" / "engine" / "input-10.index")
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
    def keep_one(ckpt_path: str, train_model: Any) -> Any:
        ckpt, _ = create_ckpt(ckpt_path, train_model)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=1)

    with pytest.raises(ctl_core.SetupError, match=r"test_checkpoint.py:\d+\): .* keeps 2 or more"):
        train(make_hooks(create_ckpt=keep_one))


def test_a_manager_of_another_folder_is_refused(train: Train, tmp_path: Path) -> None:
    hooks = make_hooks(create_ckpt=lambda train_model: create_ckpt(str(tmp_path), train_model))
    with pytest.raises(ctl_core.SetupError, match=r"create_ckpt .* a manager that does not use"):
        train(hooks, steps=1)


def test_no_whole_checkpoint_stops_instead_of_starting_over(train: Train) -> None:
    state = train(make_hooks(), steps=10, ckpt_every=5)
    for path in (state.run_dir / "ckpt").glob("ckpt-*.data*"):
        cut_short(path)
    with pytest.raises(ctl_core.SetupError, match="none of them is whole"):
        train(make_hooks(), steps=10)
    shutil.rmtree(state.run_dir / "ckpt" / "engine")
    with pytest.raises(ctl_core.SetupError, match="none of them is whole"):
        train(make_hooks(), steps=10)


def test_a_model_that_changed_is_refused_by_the_names_of_its_variables(train: Train) -> None:
    train(make_hooks(), steps=2)

    def wider() -> keras.Model:
        layers = keras.layers.Dense(9, name="hidden"), keras.layers.Dense(1, name="out")
        return keras.Sequential([keras.Input((FEATURES,)), *layers])

    with pytest.raises(ctl_core.SetupError, match=r"does not fit .*\(5, 8\).*\(5, 9\).*hidden/k"):
        train(make_hooks(create_model=wider), steps=4)

    def deeper() -> keras.Model:
        model = small_model()
        return keras.Sequential([keras.Input((FEATURES,)), *model.layers, keras.layers.Dense(1)])

    with pytest.raises(ctl_core.SetupError, match=r"does not fit .*not bound.*dense"):
        train(make_hooks(create_model=deeper), steps=4)
    with pytest.raises(ctl_core.SetupError, match=r"does not fit .*optimizer"):
        train(make_hooks(create_opt=sgd), steps=4)


def test_a_power_cut_that_emptied_the_managers_list(train: Train) -> None:
    state = train(make_hooks(), steps=10, ckpt_every=5)
    (state.run_dir / "ckpt" / "checkpoint").write_text("")
    assert_weights(
        train(make_hooks(), steps=12), train(make_hooks(), steps=12, run_name="whole"), rtol=0
    )


# ---- Hooks that go back ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hook_goes_back_to_a_checkpoint_and_training_goes_on(train: Train) -> None:
    """The model is that of step 4; step, data and random numbers go on, until the last step."""
    seen: dict[int, Any] = {}

    def note(step: int, train_model: Any, ckpt: Any, manager: Any, batch: Any) -> None:
        assert int(ckpt.step) == step
        if step == 7:
            seeds = [v.numpy() for v in train_model.variables if "seed" in v.path]
            ckpt.restore(next(p for p in manager.checkpoints if p.endswith("-4")))
            after = [v.numpy() for v in train_model.variables if "seed" in v.path]
            np.testing.assert_array_equal(after, seeds)
        seen[step] = train_model.stem[0].kernel.numpy(), batch[0].numpy()
        if step == 7:
            np.testing.assert_array_equal(seen[7][0], seen[4][0])

    model = {"create_model": seeded(Blocks)}
    settings: dict[str, Any] = {"ckpt_every": 4, "virtual_devices": 2, "steps": 9}
    assert train(make_hooks(**model, every_steps={1: note}), **settings).step == 9
    batches: list[np.ndarray] = []
    undisturbed = make_hooks(**model, every_steps={1: lambda batch: batches.append(batch[0])})
    train(undisturbed, run_name="undisturbed", **settings)
    for step, batch in enumerate(batches, start=1):
        np.testing.assert_array_equal(seen[step][1], batch)


def test_a_table_that_create_ckpt_returns_is_part_of_it(train: Train) -> None:
    """It has no copy, so that no checkpoint is written while it is changed."""
    key = tf.constant([1], tf.int64)

    def program() -> SimpleNamespace:
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

        def create_ckpt(ckpt_path: str, train_model: Any) -> Any:
            ckpt = tf.train.Checkpoint(train_model=train_model, table=table)
            return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)

        def update_pre(gradients: Any) -> Any:
            count = table.lookup(key) + 1.0
            with tf.control_dependencies([table.insert(key, count)]):
                return [gradient / count[0] for gradient in gradients], gradients

        return make_hooks(create_ckpt=create_ckpt, update_pre=update_pre, create_opt=sgd)

    whole = train(program(), steps=9, run_name="whole")
    for steps in (7, 9):
        parts = train(program(), steps=steps, ckpt_every=2)
    assert_weights(parts, whole, rtol=0)


# ---- In the background: they hold what the variables were when they were due -------------------


class Late(ThreadPoolExecutor):
    """Starts no sooner than somebody waits: training has long changed every variable by then."""

    starts: ClassVar[list[Callable[..., object]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **values: Any) -> Any:
        self.starts.append(function)
        run = functools.partial(function, *args, **values)
        return SimpleNamespace(result=lambda: ThreadPoolExecutor(1).submit(run).result())


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[Late]:
    """Checkpoints are written as late as can be."""
    monkeypatch.setattr(Late, "starts", [])
    monkeypatch.setattr("ctl_core.checkpoint.writer.ThreadPoolExecutor", Late)
    return Late


def model_of_many_kinds() -> keras.Model:
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8)(inputs))
    hidden = keras.layers.Dropout(0.3, seed=5)(hidden)
    nested = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    return keras.Model(inputs, keras.layers.Dense(1)(nested(hidden)))


def values_of(train_model: Any, optimizer: Any, lr: Any) -> list[np.ndarray]:
    """Everything but the states of random generators, which are in the engine's part."""
    variables = [v for v in train_model.variables if "seed" not in v.path]
    return [np.array(v.numpy()) for v in [*variables, *optimizer.variables, lr]]


@pytest.mark.slow
def test_a_late_written_checkpoint_holds_the_values_of_its_step(
    train: Train, late: type[Late]
) -> None:
    seen: dict[int, list[np.ndarray]] = {}

    def note(step: int, train_model: Any, optimizer: Any, lr: Any) -> None:
        lr.assign(0.01 / step)
        seen[step] = values_of(train_model, optimizer, lr)

    hooks = make_hooks(create_model=model_of_many_kinds, every_steps={4: note})
    state = train(hooks, steps=24, ckpt_every=4)
    assert len(late.starts) == 5  # all but the first
    for step in (8, 16, 20):
        status = state.ckpt.restore(str(state.run_dir / "ckpt" / f"ckpt-{step}"))
        status.assert_consumed()
        values = values_of(state.train_model, state.optimizer, state.lr)
        for value, expected in zip(values, seen[step], strict=True):
            np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("last", [8, 12])
def test_a_failure_in_the_background_is_told_by_its_step(
    train: Train, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Before the next checkpoint, or at the end of the run."""
    write = tf.train.Checkpoint.write

    def full(self: Any, path: str, options: Any = None) -> Any:
        if str(path).endswith("engine/ckpt-8"):
            assert threading.current_thread() is not threading.main_thread()
            raise OSError(28, "No space left on device")
        return write(self, path, options)

    monkeypatch.setattr(tf.train.Checkpoint, "write", full)
    with pytest.raises(RunError, match=r"the checkpoint of step 8 cannot .* No space left .* kept"):
        train(make_hooks(every_steps={1: lambda loss: None}), steps=last, ckpt_every=2)
    monkeypatch.undo()
    assert train(make_hooks(), steps=6).step == 6


def test_a_failing_hook_leaves_the_checkpoint_that_was_being_written(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, failing = threading.Event(), threading.Event()
    write = tf.train.Checkpoint.write

    def slowly(self: Any, path: str, options: Any = None) -> Any:
        if str(path).endswith("engine/ckpt-6"):
            reached.set()
            assert failing.wait(600)
        return write(self, path, options)

    def fail() -> None:
        assert reached.wait(600)
        failing.set()
        raise ValueError("mine")

    monkeypatch.setattr(tf.train.Checkpoint, "write", slowly)
    with pytest.raises(RunError, match="mine"):
        train(make_hooks(at_step={7: fail}), steps=20, ckpt_every=2)
    assert (tmp_path / "runs/run/ckpt/engine/ckpt-6.json").exists()
