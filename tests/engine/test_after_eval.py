"""What ends training, and what an evaluation decides: hooks after it, the best checkpoint."""

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
    for steps in (10, 25, 40):
        resumed = train(hooks(after_eval=plateau(parts)), steps=steps, run_name="parts", **settings)
    assert parts == whole
    assert resumed.progress == state.progress
    assert_weights(resumed, state, rtol=0)


def test_hooks_may_be_several_save_and_end_training(train: Train) -> None:
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
    assert {p.stem for p in (state.run_dir / "ckpt").rglob("*.json")} == {"ckpt-5", "ckpt-10"}


def early(name: str, patience: int) -> int:
    """At which epoch ``keras.callbacks.EarlyStopping`` stops what the hooks above train."""
    inputs, target = regression_data()
    model = small_model()
    error = keras.metrics.MeanAbsoluteError("error")
    model.compile(keras.optimizers.SGD(0.3), "mse", metrics=[error])
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((inputs[:80], target[:80])).batch(16),
        epochs=40,
        validation_data=(inputs[:64], -target[:64]),
        callbacks=[keras.callbacks.EarlyStopping(name, patience=patience)],
        verbose=0,
    )
    return len(history.epoch)


@pytest.mark.parametrize(("metric", "patience"), [("loss", 1), ("error", 2)])
def test_early_stop_stops_where_that_of_keras_does(
    train: Train, capsys: pytest.CaptureFixture[str], metric: str, patience: int
) -> None:
    own = hooks(create_dataset=sliced(tuple(part[:80] for part in regression_data())))
    settings = {**EVERY, "early_stop": f"{metric}:{patience}"}
    state = train(own, steps=200, **settings)
    assert state.ended and state.step == 5 * early(f"val_{metric}", patience)
    said = capsys.readouterr().out
    assert f"early_stop: {metric} was not better than" in said and "ended early: step" in said
    assert train(own, steps=200, **settings).step == state.step  # it stays stopped
    more = train(own, steps=400, **settings)
    assert more.step == state.step + 5 * patience  # and goes on where it is told to


def test_the_best_checkpoint_is_kept_apart(train: Train) -> None:
    def create_ckpt(ckpt_path: str, train_model: Any) -> Any:
        ckpt = tf.train.Checkpoint(train_model=train_model)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=2)

    settings = {"eval_every": 5, "ckpt_every": 5, "keep_best": "error:max"}
    state = train(hooks(create_ckpt=create_ckpt), steps=60, **settings)
    best = max(state.history, key=lambda line: line["error"])["step"]
    rolling = {path.stem for path in (state.run_dir / "ckpt/engine").glob("*.json")}
    assert rolling == {"ckpt-55", "ckpt-60"}
    assert [p.stem for p in (state.run_dir / "ckpt/best").rglob("*.json")] == [f"ckpt-{best}"]


@pytest.mark.parametrize(
    ("keep_best", "words"),
    [("eror", "did you mean 'error'"), ("error_of_mine:max", "no metric"), ("own", "own:max")],
)
def test_a_metric_that_is_none_or_has_no_better(train: Train, keep_best: str, words: str) -> None:
    metrics = {"error": keras.metrics.MeanAbsoluteError(), "own": keras.metrics.Mean()}
    own = hooks(create_metrics=lambda: metrics, metric_pre=lambda output, batch: {
        "error": (batch[1], output), "own": (output,)})  # fmt: skip
    with pytest.raises(ctl_core.SetupError, match=words):
        train(own, keep_best=keep_best)


def test_at_end_is_told_how_training_ended(train: Train) -> None:
    def fail(step: int) -> None:
        raise ValueError("no")

    ends: list[Any] = []

    def at_end(reason: str, step: int, metrics: dict[str, float], state: dict[str, Any]) -> None:
        ends.append((reason, step, sorted(metrics)))

    for _ in range(2):  # the second time, nothing is left to train
        train(hooks(at_end=at_end), steps=10, run_name="done")
    with pytest.raises(ctl_core.RunError, match=r"at_step\[7\]"):
        train(hooks(at_end=at_end, at_step={7: fail}), steps=10)
    assert ends == [("done", 10, ["error", "loss"]), ("failed", 7, [])]


# ---- StopTraining ------------------------------------------------------------------------------


def stop(step: int) -> None:
    raise ctl_core.StopTraining("Good enough.")


def test_more_steps_go_on_as_if_it_had_not_ended(train: Train) -> None:
    """Also where the checkpoint of the end is lost: then the run is not ended yet."""
    whole = train(make_hooks(create_opt=sgd), steps=21, run_name="whole")
    ended = make_hooks(create_opt=sgd, at_step={7: stop})
    state = train(ended, steps=20, ckpt_every=5)
    (state.run_dir / "ckpt/engine/ckpt-7.json").unlink()
    state = train(ended, steps=20, ckpt_every=5)
    assert (state.step, state.ended) == (7, True)
    state = train(ended, steps=21)
    assert (state.step, state.ended) == (21, False)
    assert_weights(state, whole, rtol=0)
