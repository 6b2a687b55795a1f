"""What else may lie in a folder of checkpoints, and what a hook may do with a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ctl_core
from ctl_core.run_state.record import FORMAT
from tests.helpers.cases import assert_weights, make_hooks
from tests.helpers.fixtures import Train
from tests.helpers.resume import Blocks, seeded


def alter(folder: Path, **values: Any) -> None:
    record = folder / "ckpt-9.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **values}))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# What happened to the checkpoint of step 9, and what a message says of it.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a record of another step": (
        lambda engine: shutil.copy(engine / "ckpt-6.json", engine / "ckpt-9.json"),
        "its record is that of step 6, ckpt-6",
    ),
    "the files of another step": (
        lambda engine: [
            shutil.copy(path, path.with_name(path.name.replace("ckpt-6", "ckpt-9")))
            for path in (*engine.glob("ckpt-6.[id]*"), *engine.parent.glob("ckpt-6.[id]*"))
        ],
        "its files are of step 6",
    ),
    "a step that is no number": (lambda engine: alter(engine, step="9"), "wrong value for step"),
    "a pipe for a record": (
        lambda engine: replace_by_pipe(engine / "ckpt-9.json"),
        "ckpt-9.json is no file; it is called ckpt-9.json.aside now",
    ),
    "a pipe for the position": (
        lambda engine: replace_by_pipe(engine / "input-9.index"),
        "by reading and dropping 144 examples",
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """A run with checkpoints of steps 3, 6 and 9, and the weights of step 12."""
    runs = tmp_path_factory.mktemp("runs")
    settings: dict[str, Any] = {"batch_size": 16, "ckpt_every": 3, "run_name": "run"}
    for steps, folder in ((9, runs), (12, runs / "whole")):
        config = ctl_core.Config(steps=steps, runs_dir=str(folder), **settings)
        state = ctl_core.train(make_hooks(), config)
    return runs / "run", state.train_model.get_weights()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_not_what_it_seems_is_passed_over(
    train: Train,
    tmp_path: Path,
    finished: tuple[Path, list[np.ndarray]],
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, expected = finished
    shutil.copytree(run, tmp_path / "runs" / "run")
    engine = tmp_path / "runs" / "run" / "ckpt" / "engine"
    change, message = DAMAGES[damage]
    change(engine)
    capsys.readouterr()
    state = train(make_hooks(), steps=12, learning_rate=0.001, ckpt_every=3)
    assert_weights(state, expected, rtol=0)
    output = capsys.readouterr().out
    assert message in output
    assert ("resuming at step 6" in output) == (damage != "a pipe for the position")


# ---- Hooks ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_goes_back_to_a_checkpoint_and_training_goes_on(train: Train, replicas: int) -> None:
    """Model and optimizer are those of step 4; step and data go on, until the last step."""
    seen: dict[int, Any] = {}

    def note(step: int, train_model: Any, ckpt: Any, manager: Any, batch: Any) -> None:
        seen[step] = [np.array(w) for w in train_model.variables], batch[0].numpy()
        assert int(ckpt.step) == step
        if step == 7:
            ckpt.restore(next(p for p in manager.checkpoints if p.endswith("-4")))
            seen[-7] = [np.array(w) for w in train_model.variables], None

    def program() -> SimpleNamespace:
        return make_hooks(create_model=seeded(Blocks), every_steps={1: note})

    settings: dict[str, Any] = {"ckpt_every": 4, "virtual_devices": replicas, "steps": 9}
    state = train(program(), **settings)
    assert state.step == 9
    for name, before, after in zip(
        [v.path for v in state.train_model.variables], seen[4][0], seen[-7][0], strict=True
    ):
        if "seed" not in name and (replicas == 1 or "moving" not in name):
            np.testing.assert_array_equal(before, after, err_msg=name)
    batches = [seen[step][1] for step in range(1, 10)]
    seen.clear()
    undisturbed = make_hooks(create_model=seeded(Blocks), every_steps={
        1: lambda step, batch: seen.update({step: batch[0].numpy()})})  # fmt: skip
    train(undisturbed, run_name="undisturbed", **settings)
    for step, batch in enumerate(batches, start=1):
        np.testing.assert_array_equal(batch, seen[step])


def test_a_record_of_a_newer_engine_is_not_damaged(train: Train, tmp_path: Path) -> None:
    """Both versions are named; nothing is trained from an earlier checkpoint, and nothing lost."""
    train(make_hooks(), steps=9, ckpt_every=3)
    engine = tmp_path / "runs/run/ckpt/engine"
    written = json.loads((engine / "ckpt-9.json").read_text())
    assert (written["format"], written["engine"]) == (FORMAT, ctl_core.__version__)
    alter(engine, format=99, engine="9.9.0", colour=3)
    before = sorted(path.name for path in engine.iterdir())
    with pytest.raises(ctl_core.SetupError, match=r"of ctl_core 9\.9\.0, and") as error:
        train(make_hooks(), steps=12, ckpt_every=3)
    assert f"{ctl_core.__version__} cannot go on from them" in str(error.value)
    assert sorted(path.name for path in engine.iterdir()) == before
