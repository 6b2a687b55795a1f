"""``stats_every`` and ``histograms_every``: against a plain loop, in all files that have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.metric_values import read_metrics
from ctl_core.numerics import precision
from tests.helpers.cases import (
    WORDS,
    assert_weights,
    make_hooks,
    regression_data,
    sequence_hooks,
    sgd,
    sliced,
    small_model,
    squared_error,
)
from tests.helpers.fixtures import Train
from tests.helpers.project import Cli, source_of

NORMS = ("grad_norm", "update_norm", "weight_norm")


def clipped(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, 0.5)[0], gradients


def norm(arrays: Any) -> float:
    return float(np.sqrt(sum((np.asarray(one, "float64") ** 2).sum() for one in arrays)))


def by_hand(steps: int, batch_size: int = 16) -> list[dict[str, Any]]:
    """What each step of a plain loop with SGD and clipping is, by variable and over all."""
    model, lines = small_model(), []
    stream = iter(sliced(regression_data())(batch_size).repeat())
    for step in range(1, steps + 1):
        inputs, target = next(stream)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(squared_error((model(inputs), target)))
        gradients = [one.numpy() for one in tape.gradient(loss, model.trainable_variables)]
        before = [one.numpy() for one in model.trainable_variables]
        updates, _ = tf.clip_by_global_norm(gradients, 0.5)
        for variable, update in zip(model.trainable_variables, updates, strict=True):
            variable.assign_sub(0.01 * update)
        after = [one.numpy() for one in model.trainable_variables]
        changes = [new - old for new, old in zip(after, before, strict=True)]
        rows = {}
        for i, variable in enumerate(model.trainable_variables):
            name = "/".join(["sequential", *variable.path.split("/")[1:]])
            rows[name] = {
                "weight_norm": norm([after[i]]),
                "weight_mean": after[i].mean(),
                "weight_std": after[i].std(),
                "grad_norm": norm([gradients[i]]),
                "update_ratio": norm([changes[i]]) / norm([before[i]]),
                "zero_grads": (gradients[i] == 0).mean(),
            }
        totals = dict(zip(NORMS, map(norm, (gradients, changes, after)), strict=True))
        lines.append({"step": step, **totals, "variables": rows})
    return lines


def stats(run: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "stats.jsonl").read_text().splitlines()]


def norms(run: str | Path) -> list[dict[str, Any]]:
    lines = read_metrics(Path(run))
    return [line for line in lines if any(name.startswith("weight_norm") for name in line)]


def summaries(run: str | Path) -> dict[tuple[str, int], tf.Tensor]:
    """The values in tb/train by tag and step."""
    found = {}
    for file in (Path(run) / "tb" / "train").iterdir():
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                found[value.tag, event.step] = tf.make_ndarray(value.tensor)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"virtual_devices": 2},
        {"accumulate_steps": 2},
        {"jit_compile": True},
        {"detect_anomaly": True},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_norms_and_variables_as_in_a_plain_loop(train: Train, settings: dict[str, Any]) -> None:
    def spoil(train_model: Any) -> None:  # what hooks change comes after
        train_model.trainable_variables[0].assign(train_model.trainable_variables[0] * 1.0)

    hooks = make_hooks(create_opt=sgd, update_pre=clipped, every_steps={3: spoil})
    state = train(hooks, steps=9, stats_every=3, **settings)
    expected = {line["step"]: line for line in by_hand(9)}
    measured = norms(state.run_dir)
    assert [line["step"] for line in measured] == [3, 6, 9]
    for line in measured:
        assert line["split"] == "train"
        for name in NORMS:
            assert line[name] == pytest.approx(expected[line["step"]][name], rel=1e-4)
    lines = stats(state.run_dir)
    assert len(lines) == 12
    written = summaries(state.run_dir)
    for line in lines:
        step, variable = line.pop("step"), line.pop("variable")
        values = expected[step]["variables"][variable]
        assert line == pytest.approx(values, rel=1e-3, abs=1e-6)
        for kind, value in line.items():
            assert written[f"{kind}/{variable}", step] == pytest.approx(value)


def test_weights_are_those_of_a_run_without(train: Train) -> None:
    settings = {"steps": 12, "deterministic": True, "virtual_devices": 2}
    plain = train(make_hooks(), run_name="plain", **settings)
    measured = train(
        make_hooks(), run_name="measured", stats_every=2, histograms_every=3, **settings
    )
    assert_weights(measured, plain, rtol=0)
    assert not (Path(plain.run_dir) / "stats.jsonl").exists() and not norms(plain.run_dir)


def test_lines_of_steps_taken_again_are_there_once(train: Train) -> None:
    """A run that lost steps after its last checkpoint has the files of one that did not."""
    whole = train(make_hooks(), run_name="whole", steps=12, stats_every=2)

    def stop(step: int) -> None:
        raise RuntimeError

    with pytest.raises(Exception, match="RuntimeError"):
        train(make_hooks(at_step={9: stop}), steps=12, stats_every=2, ckpt_every=5)
    assert [line["step"] for line in stats(Path(whole.run_dir).parent / "run")][-1] == 8
    resumed = train(make_hooks(), steps=12, stats_every=2)
    for name in ("stats.jsonl", "metrics.jsonl"):
        texts = [(Path(one.run_dir) / name).read_text() for one in (whole, resumed)]
        assert texts[0] == texts[1]


def test_several_objectives_in_turns_of_which_one_freezes(train: Train) -> None:
    def grad_pre(loss: Any, train_model: Any, objective: Any) -> Any:
        layer = train_model.layers[0 if objective == "first" else 1]
        return loss, 0.0, layer.trainable_variables

    def freeze(train_model: Any) -> None:
        train_model.layers[0].trainable = False

    hooks = make_hooks(
        turns=["first", "second", "first"],
        grad_pre=grad_pre,
        create_opt=lambda lr: {n: keras.optimizers.SGD(lr) for n in ("first", "second")},
        at_step={3: freeze},
    )
    state = train(hooks, steps=6, stats_every=2, histograms_every=2)
    first, _, last = norms(state.run_dir)
    assert first["grad_norm/first"] > 0 < first["update_norm/second"]
    assert last["grad_norm/first"] == last["weight_norm/first"] == 0 < last["grad_norm/second"]
    variables = {step: set() for step in (2, 4, 6)}  # type: ignore[var-annotated]
    for line in stats(state.run_dir):
        variables[line["step"]].add(line["variable"])
    assert len(variables[2]) == 4 and "first/sequential/hidden/kernel" in variables[2]
    assert variables[6] == {"second/sequential/out/bias", "second/sequential/out/kernel"}


def test_sparse_gradients(train: Train) -> None:
    """Of words that are not in a batch, the gradient is 0."""
    state = train(sequence_hooks(), steps=4, batch_size=4, stats_every=1, histograms_every=1)
    embedding = [line for line in stats(state.run_dir) if "embedding" in line["variable"]]
    assert len(embedding) == 4
    for line in embedding:
        batch = WORDS[4 * (line["step"] - 1) :][:4]
        there = {word for words in batch for word in words}
        there |= {0} if len({*map(len, batch)}) > 1 else set()  # padding
        assert line["zero_grads"] == pytest.approx(1 - len(there) / 10)
        assert line["grad_norm"] > 0 and line["update_ratio"] > 0
    names = [name for name, _ in summaries(state.run_dir)]
    assert any(name.startswith("gradients/") and "embedding" in name for name in names)


def test_gradients_of_float16_are_without_their_scale(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = norms(train(make_hooks(create_opt=sgd), steps=1, stats_every=1).run_dir)
    half = {"precision": "float16", "stats_every": 1}
    scaled = norms(train(make_hooks(create_opt=sgd), steps=1, run_name="half", **half).run_dir)
    assert scaled[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=1e-2)
    monkeypatch.setattr(precision, "INITIAL", 2.0**60)  # an update that is skipped
    settings = {**half, "histograms_every": 1}
    skipped = train(make_hooks(create_opt=sgd), steps=1, run_name="skipped", **settings)
    (line,) = norms(skipped.run_dir)
    assert line["grad_norm"] is None and line["update_norm"] == 0


def test_histograms(train: Train) -> None:
    state = train(make_hooks(), steps=6, histograms_every=3)
    found = {
        (name, step): value
        for (name, step), value in summaries(state.run_dir).items()
        if name.split("/")[0] in ("weights", "gradients")
    }
    assert len(found) == 2 * 4 * 2 and {step for _, step in found} == {3, 6}
    kernel = state.train_model.layers[0].kernel.numpy()
    buckets = found["weights/sequential/hidden/kernel", 6]
    assert buckets[:, 2].sum() == kernel.size
    assert buckets[0, 0] == pytest.approx(kernel.min())
    assert buckets[-1, 1] == pytest.approx(kernel.max())
    assert not (Path(state.run_dir) / "stats.jsonl").exists()


def test_a_number_that_is_none_is_refused(cli: Cli) -> None:
    for name in ("stats", "histograms"):
        outcome = cli(source_of(), f"--{name}-every", "-1")
        assert outcome.code == 2 and not outcome.written
        assert f"{name}_every: expected a whole number from 0 up, got -1" in outcome.err
