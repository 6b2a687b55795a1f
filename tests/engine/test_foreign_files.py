"""Tests that files from untrusted sources neither run code nor redirect the engine's writes."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.checkpoint.initial_weights import load_initial_weights
from ctl_core.commands.cli import parse_command
from ctl_core.hooks.callbacks_file import find_callbacks
from ctl_core.run.errors import SetupError
from ctl_core.run.layers import write_config
from ctl_core.run.settings import Config
from tests.helpers.cases import make_hooks
from tests.helpers.project import Train
from tests.helpers.run_folders import write_checkpoint


def write_run(folder: Path, **settings: Any) -> Path:
    """Writes a run with the given settings and returns its folder."""
    config = Config(steps=8, **settings)
    write_checkpoint(folder / "ckpt", 4, config=config)
    write_config(config, folder / "config.yaml")
    return folder


def test_fork_does_not_run_the_code_that_the_other_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    foreign = write_run(
        tmp_path / "foreign", callbacks="theirs.py", listener="theirs.Listener", batch_size=7
    )
    command = parse_command(["train", "--fork", str(foreign), "--run-name", "mine"])
    config = command.config
    assert (config.callbacks, config.listener, config.batch_size) == ("callbacks.py", None, 7)
    assert [note.split(", but")[0] for note in command.notes] == [
        "fork: that run used --callbacks theirs.py",
        "fork: that run used --listener theirs.Listener",
    ]
    named = parse_command(["train", "--fork", str(foreign), "--callbacks", "theirs.py"])
    assert named.config.callbacks == "theirs.py"
    assert len(named.notes) == 1


@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "export"])
def test_file_outside_of_the_project_is_run_only_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("")
    project = tmp_path / "project"
    write_run(project / "runs" / "a", callbacks=str(outside))
    monkeypatch.chdir(project)

    def find(*flags: str) -> Path:
        parsed = parse_command([command, "--run-name", "a", *flags])
        return find_callbacks(
            parsed.config.callbacks,
            parsed.run,
            parsed.trained_with,
            command == "train",
            is_named=parsed.names_callbacks,
        ).path

    with pytest.raises(SetupError, match=r"outside\.py, outside the project .* pass it"):
        find()
    assert find("--callbacks", str(outside)).samefile(outside)


class WritesFile(tf.saved_model.experimental.TrackableResource):  # type: ignore[misc]
    """A resource whose initializer writes a file wherever the SavedModel is loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = str(path)
        self.resource_handle  # noqa: B018  # Reading the handle creates the resource.

    def _create_resource(self) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="written")

    def _initialize(self) -> None:
        tf.io.write_file(self._path, "written")


def test_saved_model_gives_its_weights_and_runs_nothing(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")], name="m")
    saved: Any = tf.Module()
    saved.model = model
    saved.resource = WritesFile(tmp_path / "written")
    tf.saved_model.save(saved, str(tmp_path / "saved"))
    (tmp_path / "written").unlink(missing_ok=True)
    tf.saved_model.load(str(tmp_path / "saved"))
    assert (tmp_path / "written").exists()  # Loading the SavedModel writes the file.
    (tmp_path / "written").unlink()
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")], name="m")
    hook: Any = "create_model"
    load_initial_weights(other, hook, Config(init_from=str(tmp_path / "saved")))
    assert not (tmp_path / "written").exists()
    for weight, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("name", ["env.json", "callbacks.py", "metrics.jsonl", "config.yaml"])
def test_links_in_a_run_folder_are_replaced(train: Train, tmp_path: Path, name: str) -> None:
    (tmp_path / "other").write_text("kept")
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / name).symlink_to(tmp_path / "other")
    train(make_hooks(), steps=1)
    assert (tmp_path / "other").read_text() == "kept"


def test_log_that_is_a_link_is_refused(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "train.log").symlink_to(tmp_path / "other")
    with pytest.raises(SetupError, match=r"train\.log: is a link"):
        train(make_hooks(), steps=1)
    assert not (tmp_path / "other").exists()
    assert not (run / "pid").exists()


@pytest.mark.parametrize("place", ["{folder}/outside/ckpt-1", "../../../outside/ckpt-1"])
def test_list_of_checkpoints_outside_of_the_folder_is_refused(
    train: Train, tmp_path: Path, place: str
) -> None:
    """The list is refused, because the manager would delete the listed files as old checkpoints."""
    folder = train(make_hooks(), steps=2, ckpt_every=1).run_dir / "ckpt"
    path = folder / "checkpoint"
    listed = f'all_model_checkpoint_paths: "{place.format(folder=tmp_path)}"\n'
    path.write_text(path.read_text() + listed)
    with pytest.raises(SetupError, match=r"outside/ckpt-1, which is outside the folder"):
        train(make_hooks(), steps=3)
    path.unlink()
    assert train(make_hooks(), steps=3).step == 3
