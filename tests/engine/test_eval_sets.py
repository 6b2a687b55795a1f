"""Several sets of evaluation data by name, the first batches of them, and what a batch weighs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ctl_core.__main__ import main
from tests.helpers.cases import (
    assert_weights,
    dropout_model,
    eval_hooks,
    evaluated_by_hand,
    l2_model,
    make_hooks,
    regression_data,
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


@pytest.mark.parametrize("replicas", [1, 3])
def test_each_set_equals_numpy(train: Train, replicas: int, tmp_path: Path) -> None:
    """Each has metrics of its own, and elements of its own kind."""
    hooks = sets_hooks({"a": first(7), "b": first(25, "float64")})
    hooks.input_pre = lambda batch: tf.cast(batch[0], tf.float32)
    seen: list[Any] = []
    hooks.after_eval = lambda metrics: seen.append(metrics)
    state = train(hooks, steps=0, batch_size=24, virtual_devices=replicas)
    found = state.metrics
    by_hand = {f"a/{name}": value for name, value in evaluated_by_hand(7).items()}
    by_hand |= {f"b/{name}": value for name, value in evaluated_by_hand(25).items()}
    assert list(found) == list(by_hand) and found == pytest.approx(by_hand, rel=1e-5)
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


def test_the_values_of_a_set_decide(train: Train) -> None:
    hooks = sets_hooks({"a": first(50), "b": first(9)})
    settings = {"eval_every": 5, "learning_rate": 0.3, "ckpt_every": 0}
    state = train(hooks, steps=40, keep_best="b/loss", early_stop="a/error:max:2", **settings)
    values = {line["step"]: line for line in state.history}
    best = min(values, key=lambda step: values[step]["b/loss"])
    assert state.ended and (state.run_dir / f"ckpt/best/engine/ckpt-{int(best)}.json").exists()


def test_eval_pre_and_regularisation(train: Train) -> None:
    model = l2_model()
    penalty = float(sum(model.losses))
    plain = evaluated_by_hand(23)["loss"]
    hooks = eval_hooks(23, create_model=l2_model)
    state = train(hooks, steps=0, virtual_devices=2)
    assert state.metrics["loss"] == pytest.approx(plain + penalty, rel=1e-5)
    hooks.eval_pre = lambda loss: (3 * loss, 0.0)
    state = train(hooks, steps=0, run_name="tripled")
    assert state.metrics["loss"] == pytest.approx(3 * plain, rel=1e-5)


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
    for flags in ([], ["--dataset", "tset"]):
        assert main(["predict", *flags]) == 2
        error = capsys.readouterr().err
        assert (
            error.startswith("error: dataset: expected one of val, test") and error.count("\n") == 1
        )
