"""Several sets of evaluation data by name, the first batches of them, and what a batch weighs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.__main__ import main
from tests.helpers.cases import (
    SIZES,
    assert_weights,
    dropout_model,
    eval_hooks,
    evaluated_by_hand,
    exchange_evaluated_by_hand,
    exchange_hooks,
    make_hooks,
    regression_data,
    small_model,
)
from tests.helpers.fixtures import Train
from tests.helpers.project import EVALUATED

Make = Callable[[int], tf.data.Dataset]


def first(size: int, dtype: str = "float32") -> Make:
    """Returns a hook for the first examples."""
    inputs, target = (part[:size] for part in regression_data())
    data = inputs.astype(dtype), target

    def create(per_replica_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(data).batch(per_replica_batch_size)

    return create


def sets_hooks(sets: dict[Any, Any], **more: Any) -> Any:
    """Evaluates several sets, with the metrics of ``eval_hooks``."""
    hooks = eval_hooks(1, **more)
    hooks.create_eval_dataset = lambda per_replica_batch_size: {
        name: make(per_replica_batch_size) if callable(make) else make
        for name, make in sets.items()
    }
    return hooks


def expected(sizes: dict[str, int]) -> dict[str, float]:
    return {
        f"{name}/{value}": number
        for name, size in sizes.items()
        for value, number in evaluated_by_hand(size).items()
    }


def assert_values(found: dict[str, float], values: dict[str, float]) -> None:
    assert list(found) == list(values)
    for name, value in values.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_set_equals_numpy(train: Train, replicas: int, tmp_path: Path) -> None:
    """Each has metrics of its own, and elements of its own kind."""
    sizes = {f"n{size}": size for size in SIZES}
    kinds = dict(zip(sizes, ["float32", "float64", "float32", "float64", "float16"], strict=True))
    hooks = sets_hooks({name: first(size, kinds[name]) for name, size in sizes.items()})
    hooks.input_pre = lambda batch: tf.cast(batch[0], tf.float32)
    seen: list[Any] = []
    hooks.after_eval = lambda metrics: seen.append(metrics)
    state = train(hooks, steps=0, batch_size=24, virtual_devices=replicas)
    found, by_hand = state.metrics, expected(sizes)
    for name in [name for name in by_hand if name.startswith("n25/")]:  # of float16 inputs
        assert found.pop(name) == pytest.approx(by_hand.pop(name), rel=2e-3)
    assert_values(found, by_hand)
    (line,) = (json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").open())
    assert {name: line[name] for name in found} == found == {n: seen[0][n] for n in found}


def test_training_goes_on_as_without_and_graphs_are_traced_once(train: Train) -> None:
    hooks = sets_hooks({"a": first(23), "b": first(7)}, create_model=dropout_model)
    state = train(hooks, steps=10, eval_every=3, run_name="with", virtual_devices=2)
    assert state.evaluation is not None
    for one in state.evaluation.sets.values():
        assert one.run_steps.experimental_get_tracing_count() == 1  # type: ignore[attr-defined]
    plain = make_hooks(create_model=dropout_model)
    assert_weights(state, train(plain, steps=10, run_name="without", virtual_devices=2), rtol=0)
    assert [list(line)[2:4] for line in state.history] == [["a/loss", "a/error"]] * 4


def test_each_evaluation_reads_each_set_from_its_start(train: Train) -> None:
    """Of shuffled sets, too, whose first example is the one that counts."""

    def shuffled(seed: int) -> Make:
        def create(per_replica_batch_size: int) -> tf.data.Dataset:
            data = tf.data.Dataset.from_tensor_slices(regression_data())
            return data.shuffle(100, seed=seed).batch(per_replica_batch_size)

        return create

    hooks = sets_hooks({"a": shuffled(1), "b": shuffled(2)})
    state = train(hooks, steps=3, eval_every=1, learning_rate=1e-20, limit_eval=1)
    losses = np.array([[line["a/loss"], line["b/loss"]] for line in state.history])
    np.testing.assert_allclose(losses, losses[:1].repeat(3, 0), rtol=1e-6)
    assert losses[0, 0] != pytest.approx(losses[0, 1])


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_exchange_within_each_set(train: Train, replicas: int) -> None:
    hooks = exchange_hooks("gather", 25)
    make = {size: exchange_hooks("gather", size).create_eval_dataset for size in (25, 7)}
    hooks.create_eval_dataset = lambda per_replica_batch_size: {
        str(size): one(per_replica_batch_size) for size, one in make.items()
    }
    state = train(hooks, steps=0, batch_size=24, virtual_devices=replicas)
    for size in make:
        for name, value in exchange_evaluated_by_hand(small_model(), size, 24).items():
            assert state.metrics[f"{size}/{name}"] == pytest.approx(value, rel=1e-5)


class Most(keras.metrics.Metric):
    """The most examples that an evaluation has had, over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.add_weight(name="now", initializer="zeros")
        self.most = self.add_weight(name="most", initializer="zeros")

    def update_state(self, values: Any) -> None:
        self.now.assign_add(tf.reduce_sum(values))
        self.most.assign(tf.maximum(self.most, self.now))

    def result(self) -> Any:
        return self.most

    def reset_state(self) -> None:
        self.now.assign(0.0)


def test_what_metrics_keep_is_of_their_set_and_resumed(train: Train) -> None:
    hooks = sets_hooks({"a": first(23), "b": first(7)})
    hooks.create_metrics = lambda: {"most": Most()}
    hooks.metric_pre = lambda output: tf.ones(tf.shape(output)[0])
    train(hooks, steps=2)
    hooks.create_eval_dataset = lambda per_replica_batch_size: {
        name: first(5)(per_replica_batch_size) for name in "ab"
    }
    state = train(hooks, steps=4)
    assert (state.metrics["a/most"], state.metrics["b/most"]) == (23, 7)


def test_the_values_of_a_set_decide(train: Train) -> None:
    hooks = sets_hooks({"a": first(50), "b": first(9)})
    settings = {"eval_every": 5, "learning_rate": 0.3, "ckpt_every": 0}
    state = train(hooks, steps=40, keep_best="b/loss", early_stop="a/error:max:2", **settings)
    values = {line["step"]: line for line in state.history}
    (kept,) = (step for key, (_, step, _) in state.progress.best.items() if "keep_best" in key)
    assert kept == min(values, key=lambda step: values[step]["b/loss"])
    assert state.ended and (state.run_dir / f"ckpt/best/engine/ckpt-{int(kept)}.json").exists()
    only = sets_hooks({"a": first(50)})
    state = train(only, steps=10, keep_best="loss", run_name="only")
    assert list(state.progress.best) == ["keep_best=a/loss:min"]


@pytest.mark.parametrize(("weight", "of"), [(-1.0, "-2"), (np.nan, "nan"), (np.inf, "inf")])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_that_weighs_less_than_nothing(
    train: Train, weight: float, of: str, replicas: int
) -> None:
    """Two of the last batches do; training has begun, and what was saved stays."""
    inputs, target = (part[:64].copy() for part in regression_data())
    target[40], target[50] = weight, weight
    data = inputs, target

    def create_eval_dataset(per_replica_batch_size: int) -> Any:
        batches = tf.data.Dataset.from_tensor_slices(data).batch(per_replica_batch_size)
        return {"a": first(5)(per_replica_batch_size), "odd": batches}

    def batch_weight(batch: Any) -> Any:
        strange = batch[1] == weight if not np.isnan(weight) else tf.math.is_nan(batch[1])
        found = tf.boolean_mask(batch[1], strange)
        return tf.reduce_sum(found) if tf.size(found) > 0 else 1.0

    hooks = make_hooks(create_eval_dataset=create_eval_dataset, batch_weight=batch_weight)
    hooks.loss_pre = lambda output, batch: (output, tf.zeros_like(output))
    with pytest.raises(ctl_core.RunError) as error:
        train(hooks, steps=4, eval_every=2, ckpt_every=1, virtual_devices=replicas)
    assert "batch_weight (test_eval_sets.py:" in str(error.value)
    assert f"['odd'], 2 batches together weigh {of}; expected a number" in str(error.value)


CHOOSING = EVALUATED.replace(
    """    return tf.data.Dataset.from_tensor_slices((inputs[:37], target[:37])).batch(
        per_replica_batch_size)
""",
    """    data = tf.data.Dataset.from_tensor_slices((inputs, target))
    return {"val": data.take(37).batch(8), "test": data.skip(37).batch(8)}
""",
)


def test_evaluate_and_predict_with_several_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert CHOOSING != EVALUATED
    (tmp_path / "callbacks.py").write_text(CHOOSING)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--run-name", "a", "--steps", "4", "--limit-eval", "1"]) == 0
    out = capsys.readouterr().out
    assert "eval: val/loss " in out and "  test/error " in out
    assert main(["evaluate"]) == 0
    assert "eval: val/loss " in capsys.readouterr().out
    assert main(["predict", "--dataset", "test"]) == 0
    with np.load("runs/a/predictions-test.npz") as file:
        assert file["output"].shape == (63, 1)  # whatever limit_eval says
    capsys.readouterr()
    for flags, said in (
        ([], "error: dataset: expected one of val, test, as create_eval_dataset has it, got None"),
        (["--dataset", "tset"], "error: dataset: expected one of val, test, as create_eval_dat"),
        (["--dataset", "val", "--input", "x.npy"], "error: input and dataset: give one of the"),
    ):
        assert main(["predict", *flags]) == 2
        error = capsys.readouterr().err
        assert error.startswith(said) and error.count("\n") == 1
    (tmp_path / "callbacks.py").write_text(EVALUATED)
    assert main(["predict", "--dataset", "val"]) == 2
    assert "dataset: expected none, as create_eval_dataset has it" in capsys.readouterr().err
