"""What an evaluation decides: hooks after it, the checkpoint that is kept, the end of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import (
    assert_weights,
    make_hooks,
    regression_data,
    sgd,
    sliced,
    small_model,
    unclipped,
)
from tests.helpers.fixtures import Train

EVERY = {"eval_every": 5, "ckpt_every": 10, "learning_rate": 0.3}


def hooks(**more: Any) -> Any:
    inputs, target = regression_data()
    own = {
        "create_opt": sgd,
        "create_eval_dataset": sliced((inputs[:64], -target[:64])),  # gets worse as it learns
        "create_metrics": lambda: {"error": keras.metrics.MeanAbsoluteError()},
        "update_pre": unclipped,
    }
    return make_hooks(**{**own, **more})


def plateau(seen: list[Any]) -> Any:
    """``keras.callbacks.ReduceLROnPlateau`` with patience 2, as a hook with a state."""

    def after_eval(metrics: dict[str, float], step: int, lr: Any, state: dict[str, Any]) -> None:
        seen.append((step, metrics["loss"], float(lr)))
        state.setdefault("best", float("inf"))
        if metrics["loss"] < state["best"] - 1e-4:
            state["best"], state["wait"] = metrics["loss"], 0
            return
        state["wait"] += 1
        if state["wait"] >= 2:
            lr.assign(lr * 0.5)
            state["wait"] = 0

    return after_eval


def test_a_resumed_run_decides_as_a_whole_one_does(train: Train) -> None:
    whole: list[Any] = []
    settings = {**EVERY, "keep_best": "loss", "early_stop": "error:min:9"}
    state = train(hooks(after_eval=plateau(whole)), steps=40, run_name="whole", **settings)
    parts: list[Any] = []
    for steps in (10, 25, 40):
        resumed = train(hooks(after_eval=plateau(parts)), steps=steps, run_name="parts", **settings)
    assert parts == whole
    assert resumed.progress == state.progress
    assert_weights(resumed, state, rtol=0)


def test_hooks_may_be_several_save_and_end_training(train: Train, tmp_path: Path) -> None:
    order: list[Any] = []

    def end(metrics: dict[str, float], step: int, manager: Any) -> None:
        order.append(("end", step, sorted(metrics)))
        manager.save()
        if step == 10:
            raise ctl_core.StopTraining("Enough.")

    own = hooks(after_eval=[lambda step: order.append(step), end])
    state = train(own, steps=40, eval_every=5, ckpt_every=0)
    assert order == [5, ("end", 5, ["error", "loss"]), 10, ("end", 10, ["error", "loss"])]
    assert state.ended and state.step == 10
    saved = sorted(path.stem for path in (tmp_path / "runs/run/ckpt/engine").glob("*.json"))
    assert saved == ["ckpt-10", "ckpt-5"]


def early(name: str, patience: int) -> int:
    """At which epoch ``keras.callbacks.EarlyStopping`` stops what the hooks above train."""
    inputs, target = (part[:80] for part in regression_data())
    held = (regression_data()[0][:64], -regression_data()[1][:64])
    model = small_model()
    model.compile(
        keras.optimizers.SGD(0.3), "mse", metrics=[keras.metrics.MeanAbsoluteError("error")]
    )
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((inputs, target)).batch(16),
        epochs=40,
        validation_data=held,
        callbacks=[keras.callbacks.EarlyStopping(name, patience=patience)],
        verbose=0,
    )
    return len(history.epoch)


@pytest.mark.parametrize(("metric", "patience"), [("loss", 1), ("loss", 3), ("error", 2)])
def test_early_stop_stops_where_that_of_keras_does(
    train: Train, capsys: pytest.CaptureFixture[str], metric: str, patience: int
) -> None:
    inputs, target = (part[:80] for part in regression_data())
    own = hooks(create_dataset=sliced((inputs, target)))
    settings = {**EVERY, "early_stop": f"{metric}:{patience}"}
    state = train(own, steps=200, **settings)
    assert state.ended and state.step == 5 * early(f"val_{metric}", patience)
    said = capsys.readouterr().out
    assert f"early_stop: {metric} was not better than" in said and "ended early: step" in said
    assert train(own, steps=200, **settings).step == state.step  # it stays stopped
    more = train(own, steps=400, **settings)
    assert more.step == state.step + 5 * patience  # and goes on where it is told to


def test_the_best_checkpoint_is_kept_apart(train: Train, tmp_path: Path) -> None:
    def create_ckpt(ckpt_path: str, train_model: Any) -> Any:
        ckpt = tf.train.Checkpoint(train_model=train_model)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=2)

    own = hooks(create_ckpt=create_ckpt)
    settings = {"eval_every": 5, "ckpt_every": 5, "keep_best": "error:max"}
    train(own, steps=60, **settings)
    folder = tmp_path / "runs/run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = {line["step"]: line["error"] for line in lines if line["split"] == "eval"}
    best = max(values, key=lambda step: values[step])
    rolling = {path.stem for path in (folder / "ckpt/engine").glob("*.json")}
    assert rolling == {"ckpt-55", "ckpt-60"}
    kept = sorted(path.name for path in (folder / "ckpt/best").rglob("*") if path.is_file())
    assert kept == sorted(
        [f"ckpt-{best}.json"]
        + [f"ckpt-{best}.{end}" for end in ("index", "data-00000-of-00001")] * 2
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [({}, "done"), ({"at_step": {7: "stop"}}, "ended"), ({"at_step": {7: "fail"}}, "failed")],
)
def test_at_end_is_told_how_training_ended(train: Train, how: Any, reason: str) -> None:
    def act(step: int) -> None:
        raise ctl_core.StopTraining if how["at_step"][7] == "stop" else ValueError("no")

    ends: list[Any] = []

    def at_end(reason: str, step: int, metrics: dict[str, float], state: dict[str, Any]) -> None:
        ends.append((reason, step, sorted(metrics)))

    own = hooks(at_end=at_end, **{name: {7: act} for name in how})
    if reason == "failed":
        with pytest.raises(ctl_core.RunError, match=r"at_step\[7\]"):
            train(own, steps=10)
        assert ends == [("failed", 7, [])]
        return
    train(own, steps=10)
    train(own, steps=10)  # nothing is left to train
    assert ends == [(reason, 10 if reason == "done" else 7, ["error", "loss"])]
