"""What an evaluation decides: hooks after it, the best checkpoint, early stop; and the end."""

from __future__ import annotations

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
    for steps in (15, 40):
        resumed = train(hooks(after_eval=plateau(parts)), steps=steps, run_name="parts", **settings)
    assert parts == whole
    assert resumed.progress == state.progress
    assert_weights(resumed, state, rtol=0)


def test_hooks_may_be_several_save_and_end_training(train: Train) -> None:
    """More steps go on as if it had not ended, also where the checkpoint of the end is lost."""
    whole = train(hooks(), steps=21, run_name="whole", eval_every=5, ckpt_every=0)
    order: list[Any] = []

    def end(metrics: dict[str, float], step: int, manager: Any) -> None:
        order.append(("end", step, sorted(metrics)))
        manager.save()
        if step == 10:
            raise ctl_core.StopTraining("Enough.")

    own = hooks(after_eval=[lambda step: order.append(step), end])
    state = train(own, steps=20, eval_every=5, ckpt_every=0)
    assert order == [5, ("end", 5, ["error", "loss"]), 10, ("end", 10, ["error", "loss"])]
    (state.run_dir / "ckpt/engine/ckpt-10.json").unlink()
    state = train(own, steps=20, eval_every=5, ckpt_every=0)
    assert (state.step, state.ended) == (10, True)
    assert {p.stem for p in (state.run_dir / "ckpt").rglob("*.json")} == {"ckpt-5", "ckpt-10"}
    state = train(hooks(), steps=21, eval_every=5, ckpt_every=0)
    assert (state.step, state.ended) == (21, False)
    assert_weights(state, whole, rtol=0)


def test_early_stop_stops_where_that_of_keras_does(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    (inputs, target), patience = regression_data(), 2
    model = small_model()
    error = keras.metrics.MeanAbsoluteError("error")
    model.compile(keras.optimizers.SGD(0.3), "mse", metrics=[error])
    stopped = model.fit(
        tf.data.Dataset.from_tensor_slices((inputs[:80], target[:80])).batch(16),
        epochs=40,
        validation_data=(inputs[:64], -target[:64]),
        callbacks=[keras.callbacks.EarlyStopping("val_error", patience=patience)],
        verbose=0,
    )
    own = hooks(create_dataset=sliced((inputs[:80], target[:80])))
    settings = {**EVERY, "early_stop": f"error:{patience}"}
    state = train(own, steps=200, **settings)
    assert state.ended and state.step == 5 * len(stopped.epoch)
    said = capsys.readouterr().out
    assert "early_stop: error was not better than" in said and "ended early: step" in said
    assert train(own, steps=200, **settings).step == state.step  # it stays stopped
    more = train(own, steps=400, **settings)
    assert more.step == state.step + 5 * patience  # and goes on where it is told to


def test_a_metric_that_is_none_or_has_no_better(train: Train) -> None:
    metrics = {"error": keras.metrics.MeanAbsoluteError(), "own": keras.metrics.Mean()}
    own = hooks(create_metrics=lambda: metrics, metric_pre=lambda output, batch: {
        "error": (batch[1], output), "own": (output,)})  # fmt: skip
    for keep_best, words in (("eror", "did you mean 'error'"), ("own", "own:max")):
        with pytest.raises(ctl_core.SetupError, match=words):
            train(own, keep_best=keep_best)
