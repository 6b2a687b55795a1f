"""Checkpoints and evaluations by the epoch or the clock, and a run that has so much time."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctl_core import trainer
from ctl_core.model import schedule
from tests.helpers.cases import make_hooks, regression_data, sliced
from tests.helpers.fixtures import Train


def hooks(**more: Any) -> Any:
    return make_hooks(**{"create_eval_dataset": sliced(regression_data()), **more})


def evaluated(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["split"] == "eval"]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in (folder / "ckpt/engine").glob("*.json"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_epoch_is_a_pass_over_the_data(train: Train, replicas: int) -> None:
    """100 examples in batches of 16: six steps, the rest is left out."""
    more = {"eval_every": "1epoch", "ckpt_every": "2epochs", "virtual_devices": replicas}
    state = train(hooks(), steps=26, **more)
    assert evaluated(state.run_dir) == [6, 12, 18, 24, 26]
    assert saved(state.run_dir) == [12, 24, 26]
    again = train(hooks(), epochs=5, steps=None, **more)
    assert evaluated(again.run_dir)[-1] == 30 and saved(again.run_dir)[-1] == 30


class Clock:
    """A clock that goes on by so many seconds each time that it is read."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def monotonic(self) -> float:
        self.now += self.seconds
        return self.now


def test_checkpoints_by_the_clock(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two stops; the run is the one without them, however it goes on."""
    plain = train(hooks(), steps=40, run_name="plain", ckpt_every=0)
    monkeypatch.setattr(trainer, "MOST_STEPS", 4)
    monkeypatch.setattr(schedule, "time", Clock(25.0))
    for steps in (17, 40):
        state = train(hooks(), steps=steps, ckpt_every="1min")
    found = saved(state.run_dir)
    assert len(found) > 4 and any(step not in (17, 40) for step in found)
    for ours, theirs in zip(
        state.train_model.get_weights(), plain.train_model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_run_with_so_much_time_stops_and_goes_on(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more: dict[str, Any] = {"max_time": "1m30s", "eval_every": 0}
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "MOST_STEPS", 2)
        patch.setattr(schedule, "time", Clock(20.0))
        state = train(hooks(), steps=40, **more)
    assert state.stopped_by == signal.SIGTERM and 0 < state.step < 40
    assert saved(state.run_dir) == [state.step]
    said = capsys.readouterr().out
    assert "max_time is over." in said
    assert "stopped by SIGTERM, saved; goes on from here with --run-name run" in said
    whole = train(hooks(), steps=40, run_name="whole", eval_every=0)
    rest = train(hooks(), steps=40, **{**more, "max_time": "1h"})
    assert rest.step == 40 and rest.stopped_by is None
    for ours, theirs in zip(
        rest.train_model.get_weights(), whole.train_model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
