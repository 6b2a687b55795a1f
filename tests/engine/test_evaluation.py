"""Tests of evaluations on several datasets, of training metrics, and of early stopping."""

import math
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.evaluation.criteria import read_criteria
from ctl_core.evaluation.sets import find_wrong_name
from ctl_core.run.settings import Config
from tests.golden import small
from tests.helpers.cases import (
    assert_weights,
    eval_hooks,
    evaluated_by_hand,
    make_hooks,
    regression_data,
    sliced,
    small_model,
)
from tests.helpers.project import EVALUATED, Cli, Train, refused


def sets_hooks(**sets: Any) -> Any:
    """Returns hooks that evaluate several datasets with the metrics of ``eval_hooks``."""
    hooks = eval_hooks(1)
    hooks.create_eval_dataset = lambda per_replica_batch_size: {
        name: small.slices(arrays)(per_replica_batch_size) for name, arrays in sets.items()
    }
    return hooks


def test_values_of_each_evaluation_set_equal_numpy(train: Train) -> None:
    """Each dataset has separate metrics, and the datasets may have different dtypes."""
    inputs, target = small.data(25)
    hooks = sets_hooks(a=small.data(7), b=(inputs.astype("float64"), target))
    hooks.input_pre = lambda batch: tf.cast(batch[0], tf.float32)
    seen: list[Any] = []
    hooks.after_eval = lambda metrics: seen.append(metrics)
    state = train(hooks, steps=0, batch_size=24, virtual_devices=3)
    by_hand = {f"a/{name}": value for name, value in evaluated_by_hand(7).items()}
    by_hand |= {f"b/{name}": value for name, value in evaluated_by_hand(25).items()}
    assert list(state.metrics) == list(by_hand)
    assert state.metrics == pytest.approx(by_hand, rel=1e-5)
    assert state.history == [{"step": 0, "split": "eval", **state.metrics}]
    assert seen == [state.metrics]


def test_eval_pre_says_what_the_loss_is(train: Train) -> None:
    hooks = eval_hooks(23)
    hooks.eval_pre = lambda loss: (3 * loss, 0.5)
    state = train(hooks, steps=0, virtual_devices=2)
    assert state.metrics["loss"] == pytest.approx(3 * evaluated_by_hand(23)["loss"] + 0.5, rel=1e-5)


CHOOSING = (
    EVALUATED
    + """

def create_eval_dataset():
    data = tf.data.Dataset.from_tensor_slices(small.data())
    return {"val": data.take(37).batch(8), "test": data.skip(37).batch(8)}
"""
)


@pytest.mark.slow
def test_several_sets_decide_and_are_evaluated_and_predicted(cli: Cli) -> None:
    """With ``max``, an error that becomes smaller is no improvement, so training stops early."""
    flags = ["--limit-eval=1", "--eval-every=5", "--keep-best=test/loss"]
    out = cli(CHOOSING, *flags, "--steps=20", "--early-stop=val/error:max:1").out
    assert "eval: val/loss " in out
    assert "ended early: step 10" in out
    assert Path("runs/a/ckpt/best/engine/ckpt-10.json").exists()
    assert "  test/error " in cli(None, command=("evaluate",)).out
    flags = ["--dataset", "test", "--include", "1", "--include", "0"]
    assert cli(None, *flags, command=("predict",)).code == 0
    inputs, target = (array[37:] for array in small.data())  # ``predict`` ignores limit_eval.
    with np.load("runs/a/predictions-test.npz") as file:
        np.testing.assert_array_equal(file["batch/0"], inputs)
        np.testing.assert_array_equal(file["batch/1"], target)
        np.testing.assert_allclose(file["output"], ctl_core.load("runs/a")(inputs), rtol=1e-5)
    outcome = cli(None, *flags, "--include", "label", command=("predict",))
    refused(outcome, "include: expected names from 0, 1, got 'label'")
    for flags in ([], ["--dataset", "tset"]):
        refused(cli(None, *flags, command=("predict",)), "dataset: expected one of val, test")


# ---- Graph hooks that exchange values ----------------------------------------------------------


def mean(values: Any) -> Any:
    return tf.reduce_mean(ctl_core.all_gather(values), 0)


def in_function(batch: Any) -> Any:
    return tf.function(lambda values: values - mean(values))(batch[0])


def in_branch(batch: Any) -> Any:
    inputs = batch[0]
    if tf.reduce_sum(inputs) > 0.0:
        inputs = inputs - mean(inputs)
    return inputs


def test_an_exchange_where_replicas_cannot_meet_is_refused(train: Train) -> None:
    """On several replicas, an exchange in a branch or in a nested function is an error."""
    for hook, compiled in ((in_function, False), (in_branch, False), (in_branch, True)):
        hooks, message = (
            make_hooks(input_pre=hook),
            "exchanges between replicas"
            if compiled
            else "exchanges values between replicas inside",
        )
        with pytest.raises(ctl_core.SetupError, match=rf"^input_pre \(\w+.py:\d+\): .*{message}"):
            train(hooks, steps=1, virtual_devices=2, jit_compile=compiled)
    assert train(hooks, steps=2, jit_compile=True).step == 2


# ---- Metrics of training, computed over all examples since the last line -------------------------

STEPS, EVERY = 14, 4


def metrics() -> dict[str, keras.Metric]:
    return {
        "error": keras.metrics.MeanAbsoluteError(),
        "f1": keras.metrics.F1Score("macro", 0.5),  # F1Score creates its variables on first use.
        "mean": keras.metrics.Mean(),
    }


def arguments(loss: Any, output: Any, batch: Any) -> Any:
    return {
        "error": (batch[1], output),
        "f1": (tf.cast(batch[1] > 0.5, tf.float32), output),
        "mean": loss,
    }


HOOKS = small.hooks(create_train_metrics=metrics, train_metric_pre=arguments)


def by_hand() -> list[dict[str, float]]:
    """Returns the lines that a plain loop would log, computed with the metrics of Keras."""
    metric_values, lines, model = metrics(), [], small.create_model()
    for step, batch in enumerate(small.create_dataset(16).repeat().take(STEPS), 1):
        output = model(batch[0])
        small.plain(1, model=model, batches=tf.data.Dataset.from_tensors(batch))
        loss = small.squared_error((output, batch[1]))
        for name, values in arguments(loss, output, batch).items():
            metric_values[name].update_state(*(values if isinstance(values, tuple) else (values,)))
        if step % EVERY == 0 or step == STEPS:
            lines.append({"step": step, **{n: float(m.result()) for n, m in metric_values.items()}})
            for metric in metric_values.values():
                metric.reset_state()
    return lines


@pytest.mark.parametrize(
    ("ends", "settings"),
    [
        ((9, STEPS), {"virtual_devices": 2, "accumulate_steps": 2}),
        ((STEPS,), {"jit_compile": True}),
    ],
)
def test_training_metrics_are_those_of_a_plain_loop(
    train: Train, ends: tuple[int, ...], settings: dict[str, Any]
) -> None:
    """The metrics of a training are correct even if the run is resumed between two lines."""
    settings |= {"log_every": EVERY, "learning_rate": small.RATE}
    for steps in ends:
        state = train(HOOKS, steps=steps, **settings)
    lines = {line["step"]: line for line in state.history if line["split"] == "train"}
    for line in by_hand():
        reported = {name: lines[line["step"]][name] for name in line}
        assert reported == pytest.approx(line, rel=1e-5)


# ---- Decisions after an evaluation: hooks, the best checkpoint, early stopping -------------------

OFTEN = {"eval_every": 5, "ckpt_every": 10, "learning_rate": 0.3}


def evaluated_hooks(**more: Any) -> Any:
    inputs, target = regression_data()
    evaluation = {
        # The targets are negated, so that evaluations get worse while the model learns.
        "create_eval_dataset": sliced((inputs[:64], -target[:64])),
        "create_metrics": lambda: {"error": keras.metrics.MeanAbsoluteError()},
    }
    return small.hooks(**{**evaluation, **more})


def plateau(seen: list[Any]) -> Any:
    """Returns a hook that works like ``keras.callbacks.ReduceLROnPlateau`` with patience 2."""

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
    settings = {**OFTEN, "keep_best": "loss", "early_stop": "error:min:9"}
    state = train(
        evaluated_hooks(after_eval=plateau(whole)), steps=40, run_name="whole", **settings
    )
    resumed_lines: list[Any] = []
    for steps in (15, 40):
        resumed = train(
            evaluated_hooks(after_eval=plateau(resumed_lines)),
            steps=steps,
            run_name="parts",
            **settings,
        )
    assert resumed_lines == whole
    assert resumed.progress == state.progress
    assert_weights(resumed, state, rtol=0)


def test_hooks_may_be_several_save_and_end_training(train: Train) -> None:
    """If a hook ends training, a later start with more steps continues as if it had not ended.

    This also holds if the last checkpoint is lost.
    """
    whole = train(evaluated_hooks(), steps=21, run_name="whole", eval_every=5, ckpt_every=0)
    order: list[Any] = []

    def end(metrics: dict[str, float], step: int, manager: Any) -> None:
        order.append(("end", step, sorted(metrics)))
        manager.save()
        if step == 10:
            raise ctl_core.StopTraining("Enough.")

    hooks = evaluated_hooks(after_eval=[lambda step: order.append(step), end])
    state = train(hooks, steps=20, eval_every=5, ckpt_every=0)
    assert order == [5, ("end", 5, ["error", "loss"]), 10, ("end", 10, ["error", "loss"])]
    (state.run_dir / "ckpt/engine/ckpt-10.json").unlink()
    state = train(hooks, steps=20, eval_every=5, ckpt_every=0)
    assert (state.step, state.ended) == (10, True)
    assert {p.stem for p in (state.run_dir / "ckpt").rglob("*.json")} == {"ckpt-5", "ckpt-10"}
    state = train(evaluated_hooks(), steps=21, eval_every=5, ckpt_every=0)
    assert (state.step, state.ended) == (21, False)
    assert_weights(state, whole, rtol=0)


def test_early_stop_stops_where_keras_does(
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
    hooks = evaluated_hooks(create_dataset=sliced((inputs[:80], target[:80])))
    settings = {**OFTEN, "early_stop": f"error:{patience}"}
    state = train(hooks, steps=200, **settings)
    assert state.ended
    assert state.step == 5 * len(stopped.epoch)
    printed = capsys.readouterr().out
    assert "early_stop: error was not better than" in printed
    assert "ended early: step" in printed
    assert train(hooks, steps=200, **settings).step == state.step  # The run stays ended.
    more = train(hooks, steps=400, **settings)
    assert more.step == state.step + 5 * patience  # With more steps, the run resumes.


def test_keep_best_without_metric_or_direction_is_refused(train: Train) -> None:
    metrics = {"error": keras.metrics.MeanAbsoluteError(), "own": keras.metrics.Mean()}
    metrics["val/accuracy"] = keras.metrics.Mean()
    hooks = evaluated_hooks(create_metrics=lambda: metrics, metric_pre=lambda output, batch: {
        "error": (batch[1], output), "own": (output,), "val/accuracy": (output,)})  # fmt: skip
    words_of = {"eror": "mean 'error'", "acc": "mean 'val/accuracy'", "own": "own:max"}
    for keep_best, words in words_of.items():
        with pytest.raises(ctl_core.SetupError, match=words):
            train(hooks, keep_best=keep_best)


def test_criterion_ends_training_after_its_patience() -> None:
    """Neither NaN nor an equal value is an improvement. The criterion's state is in ``best``."""
    (criterion,) = read_criteria(Config(early_stop="error:2"), ["loss", "error"])
    best: dict[str, list[float]] = {}
    values = [math.nan, 3.0, 2.0, 2.0, 1.0, math.nan]
    for step, value in enumerate(values):
        assert criterion.judge(step, {"error": value}, best) is None
    assert best == {"early_stop=error:min": [1.0, 4, 1]}
    reason = criterion.judge(6, {"error": 1.5}, best)
    assert reason == "early_stop: error was not better than 1 (step 4) in 2 evaluations."


@pytest.mark.parametrize(
    ("setting", "is_highest"), [("val/accuracy", True), ("total_loss", False), ("speed:max", True)]
)
def test_direction_of_criterion(setting: str, is_highest: bool) -> None:
    names = ["val/accuracy", "total_loss", "speed"]
    (criterion,) = read_criteria(Config(keep_best=setting), names)
    assert criterion.highest is is_highest
    assert criterion.judge(1, {setting.split(":")[0]: 1.0}, {}) is None


# ---- Evaluations without a meaningful result -----------------------------------------------------


@pytest.mark.parametrize(
    "create_eval_dataset",
    [
        lambda: tf.data.Dataset.range(100),
        lambda: tf.data.Dataset.from_tensors((tf.zeros([8, 8]), tf.zeros([4, 1]))),
    ],
)
def test_evaluation_data_without_rows_are_refused(train: Train, create_eval_dataset: Any) -> None:
    """Evaluation data without rows are reported in the same words as such training data."""
    hooks = make_hooks(create_eval_dataset=create_eval_dataset)
    with pytest.raises(
        ctl_core.SetupError, match=r"create_eval_dataset .*tensors with one row per"
    ):
        train(hooks, steps=1)


@pytest.mark.parametrize("name", ["step", "split", "", "a\nb"])
def test_metric_with_an_impossible_name_is_refused(name: str) -> None:
    assert find_wrong_name({"fine": keras.metrics.Mean(), name: keras.metrics.Mean()})
    assert find_wrong_name({"fine": keras.metrics.Mean()}) is None


def test_metric_with_two_names_is_refused(train: Train) -> None:
    hooks = eval_hooks(8)
    hooks.create_metrics = lambda: dict.fromkeys(["error", "seen"], keras.metrics.Mean())
    with pytest.raises(ctl_core.SetupError, match="one metric as 'error' and as 'seen'"):
        train(hooks, steps=1)


@pytest.mark.parametrize("kind", ["no examples", "no weight"])
def test_evaluation_that_counts_nothing_is_never_the_best(
    train: Train, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The mean error over no examples is 0, which would otherwise be the best value."""
    extra: dict[str, Any] = {}
    if kind == "no weight":
        extra["batch_weight"] = lambda: 0.0
    hooks = eval_hooks(8 if kind == "no weight" else 0, **extra)
    state = train(hooks, steps=2, eval_every=1, keep_best="error")
    printed = capsys.readouterr().out
    name = "batch_weight" if kind == "no weight" else "create_eval_dataset"
    assert len(re.findall(rf"warning: {name} .*an(d| evaluation).*", printed)) == 1
    assert not (state.run_dir / "ckpt" / "best").exists()


@pytest.mark.parametrize("weights", [[0.0] * 8, [float("nan")] * 8, [0.0] * 7 + [0.5]])
@pytest.mark.parametrize("devices", [1, 2])
def test_sample_weights_that_count_nothing_are_reported(
    train: Train, capsys: pytest.CaptureFixture[str], weights: list[float], devices: int
) -> None:
    """If all sample weights are 0 or NaN, the mean loss is 0 or NaN, and a warning is printed."""
    data = (*small.data(8), np.array(weights, np.float32))
    hooks = make_hooks(create_eval_dataset=small.slices(data))
    hooks.create_dataset = small.slices((*small.data(8), np.ones(8, np.float32)))
    state = train(hooks, steps=1, batch_size=8, keep_best="loss", virtual_devices=devices)
    printed = capsys.readouterr().out
    counts = weights[-1] == 0.5
    reported = re.findall(r"warning: create_eval_dataset .*weights .*are 0 or NaN", printed)
    assert len(reported) == int(not counts)
    assert (state.run_dir / "ckpt" / "best").exists() == counts


def test_weights_that_eval_pre_does_not_use_are_no_weights(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (*small.data(8), np.zeros(8, np.float32))
    hooks = make_hooks(create_eval_dataset=small.slices(data), create_dataset=small.slices(data))
    hooks.eval_pre = lambda loss: (loss, 0.0)
    train(hooks, steps=1, batch_size=8)
    assert "0 or NaN" not in capsys.readouterr().out


def test_report_of_a_reserved_name_is_refused(train: Train) -> None:
    hooks = make_hooks(every_steps={1: lambda step: ctl_core.report(step, split=1.0)})
    with pytest.raises(ctl_core.RunError, match="'split' is a key of each line"):
        train(hooks, steps=1)
