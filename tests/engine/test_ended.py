"""A run that a hook has ended by ``StopTraining`` is ended, until it is told to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ctl_core
from ctl_core.__main__ import main
from tests.helpers.cases import assert_weights, make_hooks, regression_data, sgd, sliced
from tests.helpers.fixtures import Train
from tests.helpers.project import REGRESSION


def stop(step: int) -> None:
    raise ctl_core.StopTraining("Good enough.")


def hooks(**more: Any) -> Any:
    return make_hooks(create_opt=sgd, **more)


@pytest.mark.parametrize(
    "schedule", [{"at_step": {7: stop}}, {"every_steps": {7: stop}}, {"every_steps": {1: stop}}]
)
@pytest.mark.parametrize("settings", [{"steps": 20}, {"epochs": 4}])
def test_the_same_again_says_so_and_trains_nothing(
    train: Train, capsys: pytest.CaptureFixture[str], schedule: Any, settings: Any
) -> None:
    at = 1 if 1 in schedule.get("every_steps", ()) else 7
    settings = {"steps": None, "ckpt_every": 7, **settings}
    ended = hooks(create_eval_dataset=sliced(regression_data()), **schedule)
    state = train(ended, **settings)
    assert (state.step, state.ended, state.stopped_by) == (at, True, None)
    weights, metrics = state.train_model.get_weights(), state.metrics
    assert (state.run_dir / "ckpt" / f"ckpt-{at}.index").exists()
    assert "a hook ends training. Good enough." in capsys.readouterr().out
    for _ in range(2):
        state = train(ended, **settings)
        assert (state.step, state.ended) == (at, True) and state.metrics == metrics
        last = settings["steps"] or 4 * 6
        said = capsys.readouterr().out
        assert f"ended early, at step {at} of {last}, nothing left to train" in said
        assert_weights(state, weights, rtol=0)


def test_more_steps_go_on_as_if_it_had_not_ended(train: Train) -> None:
    whole = train(hooks(), steps=21, run_name="whole")
    ended = hooks(at_step={7: stop})
    train(ended, steps=20)
    state = train(ended, steps=21)
    assert (state.step, state.ended) == (21, False)
    assert_weights(state, whole, rtol=0)
    assert not train(ended, steps=21).ended


def test_what_an_interrupted_run_has_after_its_checkpoint_is_trained_again(
    train: Train, tmp_path: Path
) -> None:
    """Without the checkpoint of its end, the run is not ended yet."""
    ended = hooks(at_step={7: stop})
    train(ended, ckpt_every=5)
    (tmp_path / "runs/run/ckpt/engine/ckpt-7.json").unlink()
    state = train(ended, ckpt_every=5)
    assert (state.step, state.ended) == (7, True)


CALLBACKS = (
    REGRESSION
    + """
def enough():
    raise ctl_core.StopTraining


at_step = {2: enough}
"""
)


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "callbacks.py").write_text(CALLBACKS)
    (tmp_path / "config.yaml").write_text("steps: 4\nbatch_size: 16\nrun_name: run\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train"]) == 0
    assert "ended early: step 2" in capsys.readouterr().out
    assert main(["train", "--continue"]) == 0
    assert "resuming at step 2, to step 4" in capsys.readouterr().out
    assert main(["train", "--continue"]) == 0
    assert "at step 4 of 4, nothing left" in capsys.readouterr().out
