"""Tests of checkpoints: retention, saving and restoring in hooks, damage, and changed programs."""

import os
import re
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.run import console
from ctl_core.run.errors import RunError
from tests.golden import compare, engine, small
from tests.helpers.cases import FEATURES, assert_weights, dropout_model, make_hooks, norm_model, sgd
from tests.helpers.project import Train


def numbers(folder: Path, pattern: str) -> list[int]:
    return sorted(int(path.name.split("-")[1].split(".")[0]) for path in folder.glob(pattern))


def create_ckpt(ckpt_path: str, train_model: Any) -> Any:
    # The checkpoint omits step, lr and optimizer, which the engine then has to save.
    ckpt = tf.train.Checkpoint(train_model=train_model)
    return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)


def test_users_create_ckpt_loses_no_state_of_the_engine(train: Train) -> None:
    """The engine saves its state in a second part, and deletes both parts of old checkpoints."""
    hooks = make_hooks(
        create_ckpt=create_ckpt,
        create_opt=sgd,  # Plain SGD has no state that could be lost.
        at_step={3: lambda lr: lr.assign(0.005)},
    )
    whole = train(hooks, steps=12, run_name="whole")
    train(hooks, steps=5, run_name="parts", ckpt_every=1)
    resumed = train(hooks, steps=12, run_name="parts")
    assert resumed.step == 12
    assert float(resumed.lr) == pytest.approx(0.005)
    assert_weights(whole, resumed, rtol=0)
    for pattern in ("ckpt-*.index", "engine/ckpt-*.index", "engine/ckpt-*.json"):
        assert numbers(resumed.run_dir / "ckpt", pattern) == [4, 5, 12]


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
    """Returns a folder with one run, saved at steps 5 and 10, and the final weights of the run."""
    runs = tmp_path_factory.mktemp("runs")
    state = engine.train(make_hooks(), runs, steps=10, ckpt_every=5)
    return runs, state.train_model.get_weights()


@pytest.fixture
def folder(trained: tuple[Path, list[np.ndarray]], tmp_path: Path) -> Path:
    """Returns the checkpoint folder of a copy of the trained run."""
    return Path(shutil.copytree(trained[0], tmp_path / "runs")) / "run" / "ckpt"


@pytest.mark.parametrize(
    ("files", "damage"),
    [
        ("ckpt-10.index", Path.unlink),
        ("ckpt-10.*", take_from_step_5),
        ("engine/ckpt-10.index", cut_short),
        ("engine/ckpt-10.json", cut_short),
        ("engine/ckpt-10.json", take_from_step_5),
    ],
)
def test_a_damaged_newest_checkpoint_falls_back(
    train: Train, folder: Path, trained: Any, capsys: Any, files: str, damage: Any
) -> None:
    for path in folder.glob(files):
        damage(path)
    state = train(make_hooks(), steps=10, ckpt_every=5)
    output = capsys.readouterr().out
    assert "step 10 is damaged" in output
    assert "resuming at step 5" in output
    assert_weights(state, trained[1], rtol=0)


def test_a_damaged_input_position_is_reached_by_skipping(
    train: Train, folder: Path, capsys: Any
) -> None:
    """The run reads and drops examples up to its step if the saved input position is damaged.

    The manager's list of checkpoints is empty, too, as after a power cut.
    """
    cut_short(folder / "engine" / "input-10.index")
    (folder / "checkpoint").write_text("")
    state = train(make_hooks(), steps=15)
    assert "reading and dropping 160 examples" in capsys.readouterr().out
    assert_weights(train(make_hooks(), steps=15, run_name="whole"), state, rtol=0)


def test_run_without_a_whole_checkpoint_does_not_start_over(train: Train, folder: Path) -> None:
    for path in folder.glob("ckpt-*.data*"):
        cut_short(path)
    with pytest.raises(ctl_core.SetupError, match="all of them are damaged"):
        train(make_hooks(), steps=10)
    shutil.rmtree(folder / "engine")
    with pytest.raises(ctl_core.SetupError, match="all of them are damaged"):
        train(make_hooks(), steps=10)


def test_run_whose_folder_is_removed_during_training_fails(train: Train, tmp_path: Path) -> None:
    """The run would otherwise save checkpoints without settings, and report success."""
    runs = tmp_path / "runs"

    def remove_folders() -> None:
        for folder in runs.iterdir():
            shutil.rmtree(folder)

    text = "/ckpt: No such file or directory; the folder of the run was removed during training"
    with pytest.raises(ctl_core.RunError, match=text):
        train(make_hooks(at_step={5: remove_folders}), steps=8, ckpt_every=4, run_name=None)
    assert not list(runs.iterdir())


def test_unfinished_first_checkpoint_does_not_count(train: Train) -> None:
    folder = train(make_hooks(), steps=5).run_dir / "ckpt"
    for path in folder.glob("engine/ckpt-5.*"):  # The engine's part is written after the user's.
        path.unlink()
    seen: list[int] = []
    train(make_hooks(every_steps={1: lambda step: seen.append(step)}), steps=6)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert numbers(folder, "engine/ckpt-*.json") == [6]


def test_a_model_that_changed_is_refused_by_the_names_of_its_variables(train: Train) -> None:
    train(make_hooks(), steps=2)

    def wider() -> keras.Model:
        layers = keras.layers.Dense(9, name="hidden"), keras.layers.Dense(1, name="out")
        return keras.Sequential([keras.Input((FEATURES,)), *layers])

    def deeper() -> keras.Model:
        layers = small.create_model().layers
        return keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(1)])

    for changed, message in (
        ({"create_model": wider}, r"\(5, 8\).*\(5, 9\).*hidden/k"),
        ({"create_model": deeper}, r"not bound.*dense"),
        ({"create_opt": sgd}, "optimizer"),
    ):
        with pytest.raises(ctl_core.SetupError, match=f"no longer fits .*{message}"):
            train(make_hooks(**changed), steps=4)


def test_a_hook_goes_back_to_a_checkpoint_and_training_goes_on(train: Train) -> None:
    """Restoring step 4 changes only the model. Step, data and random numbers are not reset."""
    seen: dict[int, Any] = {}

    def note(step: int, train_model: Any, ckpt: Any, manager: Any, batch: Any) -> None:
        assert int(ckpt.step) == step
        if step == 7:
            seeds = [v.numpy() for v in train_model.variables if "seed" in v.path]
            ckpt.restore(next(p for p in manager.checkpoints if p.endswith("-4")))
            after = [v.numpy() for v in train_model.variables if "seed" in v.path]
            np.testing.assert_array_equal(after, seeds)
            np.testing.assert_array_equal(train_model.layers[0].kernel, seen[4][0])
        seen[step] = train_model.layers[0].kernel.numpy(), batch[0].numpy()

    model = {"create_model": dropout_model}
    settings: dict[str, Any] = {"ckpt_every": 4, "virtual_devices": 2, "steps": 9}
    assert train(make_hooks(**model, every_steps={1: note}), **settings).step == 9
    batches = small.create_dataset(16).repeat().take(9)
    for step, (inputs, _) in enumerate(batches, start=1):
        np.testing.assert_array_equal(seen[step][1], inputs)


def test_lookup_table_of_create_ckpt_is_saved(train: Train) -> None:
    """A lookup table cannot be copied, so no checkpoint is written while a step changes it."""
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
        resumed = train(program(), steps=steps, ckpt_every=2)
    assert_weights(resumed, whole, rtol=0)


# ---- Weights that are not finite ---------------------------------------------------------------


def spoil_from(first: int) -> Any:
    """Returns an ``update_pre`` that makes the weights NaN from the step ``first`` on."""

    def update_pre(gradients: Any, step: Any) -> Any:
        factor = tf.where(step >= first, float("nan"), 1.0)
        return [gradient * factor for gradient in gradients], gradients

    return update_pre


@pytest.mark.parametrize("settings", [{}, {"virtual_devices": 2}])
def test_weights_that_became_nan_replace_no_checkpoint(
    train: Train, capsys: Any, settings: dict[str, Any]
) -> None:
    """The losses of all steps are finite: only the last update makes the weights NaN."""
    hooks = make_hooks(create_ckpt=create_ckpt, update_pre=spoil_from(8))
    state = train(hooks, steps=8, ckpt_every=2, **settings)
    assert numbers(state.run_dir / "ckpt", "engine/ckpt-*.json") == [2, 4, 6, 8]
    assert state.diverged
    assert np.isnan(state.train_model.get_weights()[0]).all()
    assert "after step 8, sequential/hidden/kernel is not finite" in capsys.readouterr().out


def test_no_further_checkpoint_is_written_while_weights_are_nan(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The console reports only the checkpoints that are written."""
    monkeypatch.setattr(console, "STEP_SECONDS", 0.0)
    hooks = make_hooks(create_ckpt=create_ckpt, update_pre=spoil_from(5))
    state = train(hooks, steps=12, ckpt_every=2)
    assert numbers(state.run_dir / "ckpt", "engine/ckpt-*.json") == [2, 4, 6]
    printed = capsys.readouterr().out
    assert printed.count("is not finite. No further checkpoints") == 1
    assert re.findall(r"^step (\d+)/12 .* saved$", printed, re.M) == ["2", "4", "6"]


def test_on_nan_stop_writes_no_checkpoint_of_weights_that_are_nan(train: Train) -> None:
    hooks = make_hooks(update_pre=spoil_from(8))
    with pytest.raises(RunError, match=r"after step 8, .*/kernel is not finite \(on_nan: stop\)"):
        train(hooks, steps=8, ckpt_every=4, on_nan="stop", run_name="stop")
    state = train(hooks, steps=8, ckpt_every=4, on_nan="ignore")
    folders = (state.run_dir.parent / "stop" / "ckpt", state.run_dir / "ckpt")
    assert [numbers(folder, "engine/ckpt-*.json") for folder in folders] == [[4], [4, 8]]
    assert not state.diverged


def spoil_row(row: int) -> Any:
    """Returns a ``create_dataset`` hook with a NaN in one row of the inputs."""
    inputs, target = small.data()
    inputs[row, 2] = np.nan
    return small.slices((inputs, target), drop_remainder=True)


def spoil_average(first: int) -> dict[int, Any]:
    """Returns ``at_step`` hooks that make the weights NaN for a single step."""
    kept: list[np.ndarray] = []

    def spoil(train_model: Any) -> None:
        kept[:] = train_model.get_weights()
        train_model.set_weights([np.full_like(weight, np.nan) for weight in kept])

    return {first: spoil, first + 1: lambda train_model: train_model.set_weights(kept)}


@pytest.mark.parametrize(
    ("hooks", "settings", "name"),
    [
        ({"create_dataset": spoil_row(70)}, {}, "moving_mean"),
        ({"create_dataset": spoil_row(70)}, {"virtual_devices": 3}, "moving_mean"),
        ({"at_step": spoil_average(5)}, {"ema": 0.5}, "ema/"),
    ],
)
def test_no_checkpoint_that_an_evaluation_cannot_use_replaces_a_usable_one(
    train: Train, tmp_path: Path, capsys: Any, hooks: Any, settings: dict[str, Any], name: str
) -> None:
    """The loss is finite again in the next step, but moving statistics or averages stay NaN."""
    mirror = tmp_path / "m"
    settings = {"ckpt_every": 2, "keep": 2, "mirror": str(mirror), **settings}
    program = make_hooks(create_model=norm_model, **hooks)
    state = train(program, steps=12, batch_size=16, **settings)
    assert numbers(state.run_dir / "ckpt", "engine/ckpt-*.json") == [2, 4, 6]
    assert numbers(mirror / "run" / "ckpt", "engine/ckpt-*.json")[-1] == 4
    assert state.diverged
    assert np.isfinite(state.train_model.layers[-1].get_weights()[0]).all()
    assert re.search(rf"after step 6, \S*{name}\S* is not finite", capsys.readouterr().out)


def test_restarts_after_a_nan_keep_the_good_checkpoints(
    train: Train, tmp_path: Path, capsys: Any
) -> None:
    """Each start resumes from the last good checkpoint, here and on another machine."""
    mirror = tmp_path / "m"
    settings = {"ckpt_every": 2, "keep": 2, "mirror": str(mirror), "mirror_keep": 1}
    hooks = make_hooks(update_pre=spoil_from(5))
    for steps in (8, 9, 12):
        state = train(hooks, steps=steps, **settings)
        assert numbers(state.run_dir / "ckpt", "engine/ckpt-*.json") == [2, 4, 6]
        assert numbers(mirror / "run" / "ckpt", "engine/ckpt-*.json") == [4]
        assert state.diverged
    assert capsys.readouterr().out.count("so training resumes from step 4;") == 2
    shutil.rmtree(state.run_dir)
    repaired = train(make_hooks(update_pre=spoil_from(99)), steps=12, **settings)
    whole = train(make_hooks(update_pre=spoil_from(99)), steps=12, run_name="whole")
    assert_weights(repaired, whole, rtol=0)
    assert numbers(mirror / "run" / "ckpt", "engine/ckpt-*.json") == [12]


def test_what_is_not_finite_is_not_called_saved(train: Train, capsys: Any) -> None:
    """A run that is stopped while its weights are NaN says so; ``load`` warns of its checkpoint."""

    def stop(step: int) -> None:
        if step in (5, 7):
            os.kill(os.getpid(), signal.SIGTERM)

    hooks = make_hooks(update_pre=spoil_from(5), every_steps={1: stop})
    for said in ("stopped by SIGTERM, saved: step 5;", "not saved after step 4, because"):
        state = train(hooks, steps=12, ckpt_every=4)
        assert said in capsys.readouterr().out
        assert state.stopped_by == signal.SIGTERM
    assert numbers(state.run_dir / "ckpt", "engine/ckpt-*.json") == [4, 5]
    ctl_core.load(state.run_dir, "last", callbacks=hooks)
    assert "the checkpoint of step 5 is not finite: sequential" in capsys.readouterr().out
    ctl_core.load(state.run_dir, 4, callbacks=hooks)
    assert "not finite" not in capsys.readouterr().out


def test_on_nan_ignore_mirrors_only_finite_checkpoints(train: Train, tmp_path: Path) -> None:
    hooks = make_hooks(create_model=norm_model, create_dataset=spoil_row(70))
    settings = {"ckpt_every": 2, "mirror": str(tmp_path / "m"), "on_nan": "ignore"}
    state = train(hooks, steps=10, batch_size=16, **settings)
    assert numbers(state.run_dir / "ckpt", "engine/ckpt-*.json") == [2, 4, 6, 8, 10]
    assert numbers(tmp_path / "m/run/ckpt", "engine/ckpt-*.json")[-1] == 4


class Masked(keras.Model):
    """Has values that are infinite from the beginning: a mask, and a minimum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small.create_model()
        mask = keras.initializers.Constant(np.array([0.0] + [-np.inf] * 15, "float32")[:, None])
        self.mask = self.add_weight(shape=(16, 1), initializer=mask, trainable=False)
        lowest = keras.initializers.Constant(np.inf)
        self.lowest = self.add_weight(shape=(2,), initializer=lowest, trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        output = self.inner(inputs)
        if training:
            self.lowest.assign(tf.stack([tf.reduce_min(output), np.inf]))
        return output + tf.reduce_max(self.mask)


def test_values_that_are_infinite_from_the_beginning_do_not_count(
    train: Train, tmp_path: Path
) -> None:
    hooks = make_hooks(create_model=Masked, create_opt=small.create_opt)
    settings = {"ckpt_every": 2, "mirror": str(tmp_path / "m"), "on_nan": "stop"}
    for steps in (4, 6):
        state = train(hooks, steps=steps, batch_size=16, **settings)
    assert numbers(state.run_dir / "ckpt", "engine/ckpt-*.json") == [2, 4, 6]
    assert numbers(tmp_path / "m/run/ckpt", "engine/ckpt-*.json")[-1] == 6
    assert not state.diverged
    assert np.isfinite(state.train_model.lowest.numpy()).tolist() == [True, False]


# ---- Checkpoints that are written in the background ----------------------------------------------


def test_a_checkpoint_that_is_written_late_holds_the_values_of_its_step(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that fails while a checkpoint is being written does not affect the checkpoint."""
    reached, failing = threading.Event(), threading.Event()
    write = tf.train.Checkpoint.write
    seen: dict[int, list[np.ndarray]] = {}

    def slowly(self: Any, path: str, options: Any = None) -> Any:
        if str(path).endswith("/ckpt-6"):
            reached.set()
            assert failing.wait(600)
        return write(self, path, options)

    def values_of(train_model: Any, optimizer: Any, lr: Any) -> list[np.ndarray]:
        """Returns the values that the user's part of a checkpoint contains."""
        variables = [v for v in train_model.variables if "seed" not in v.path]
        return [np.array(v.numpy()) for v in [*variables, *optimizer.variables, lr]]

    def note(step: int, train_model: Any, optimizer: Any, lr: Any) -> None:
        lr.assign(0.01 / step)
        seen[step] = values_of(train_model, optimizer, lr)

    def fail() -> None:
        assert reached.wait(600)
        failing.set()
        raise ValueError("mine")

    monkeypatch.setattr(tf.train.Checkpoint, "write", slowly)
    hooks = {"create_model": dropout_model, "every_steps": {1: note}}
    with pytest.raises(RunError, match="mine"):
        train(make_hooks(**hooks, at_step={8: fail}), steps=20, ckpt_every=2)
    monkeypatch.undo()
    state = train(make_hooks(**hooks), steps=6)  # The run is restored at step 6 and has ended.
    actual = values_of(state.train_model, state.optimizer, state.lr)
    for value, expected in zip(actual, seen[6], strict=True):
        np.testing.assert_array_equal(value, expected)
    assert not np.array_equal(seen[6][0], seen[8][0])


def test_another_order_of_sets_is_reported(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small.hooks(), **small.settings(2))
    train(small.hooks(), **small.settings(4))
    assert "PYTHONHASHSEED" not in capsys.readouterr().out
    monkeypatch.setattr("ctl_core.checkpoint.checkpoints.fingerprint_order", lambda: 1)
    state = train(small.hooks(), **small.settings(6))
    assert "PYTHONHASHSEED: sets have another order in this proc" in capsys.readouterr().out
    compare.assert_close(state.train_model.weights, small.plain(6).weights)
    monkeypatch.undo()
    ctl_core.load(state.run_dir, callbacks=small.hooks())
    assert "PYTHONHASHSEED" not in capsys.readouterr().out
