"""Tests of metrics that return several numbers, and of TensorBoard's data after a kill."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.evaluation.summaries import Summaries, remove_later_events
from ctl_core.model.metrics import name_scalars, read_results
from tests.golden import small
from tests.helpers.cases import eval_hooks, make_hooks
from tests.helpers.project import Train


class Confusion(keras.metrics.Metric):
    """Counts pairs of a true and a predicted sign in a matrix of shape [2, 2]."""

    def __init__(self, name: str = "confusion") -> None:
        super().__init__(name=name)
        self.counts = self.add_weight(shape=(2, 2), initializer="zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        signs = [tf.cast(values[:, 0] > 0, tf.int32) for values in (y_true, y_pred)]
        self.counts.assign_add(tf.math.confusion_matrix(*signs, 2, dtype=tf.float32))

    def result(self) -> Any:
        return self.counts.value


class Quantiles(Confusion):
    """Returns a dict with two entries, a vector of three values and a scalar."""

    def result(self) -> Any:
        total = tf.reduce_sum(self.counts)
        return {"counts": tf.stack([total, 2 * total, 3 * total]), "half": 0.5 * total}


@pytest.mark.parametrize("devices", small.slow_but(3, of=[1, 3]))
def test_vectors_are_reported_by_entry_and_matrices_to_after_eval(
    train: Train, devices: int
) -> None:
    seen: list[dict[str, Any]] = []
    metrics: dict[str, keras.Metric] = {}

    def create_metrics() -> dict[str, keras.Metric]:
        metrics.update(confusion=Confusion(), spread=Quantiles("spread"))
        return dict(metrics)

    def after_eval(metrics: dict[str, Any]) -> None:
        seen.append(metrics | {"read": read_confusion()})

    def read_confusion() -> np.ndarray:
        return np.array(metrics["confusion"].result())

    hooks = eval_hooks(37)
    hooks.create_metrics = create_metrics
    hooks.metric_pre = lambda output, batch: (batch[1], output)
    hooks.after_eval = after_eval
    settings = {"steps": 4, "eval_every": 2, "virtual_devices": devices}
    state = train(hooks, keep_best="spread/half:max", **settings)
    assert len(seen) == 2
    for values in seen:
        assert values["confusion"].shape == (2, 2)
        assert values["confusion"].sum() == 37
        np.testing.assert_array_equal(values["read"], values["confusion"])
        assert [values[f"spread/counts/{i}"] for i in range(3)] == [37.0, 74.0, 111.0]
        assert values["spread/half"] == 18.5
    lines = [line for line in state.history if line["split"] == "eval"]
    names = {"step", "split", "loss", "spread/half", *(f"spread/counts/{i}" for i in range(3))}
    assert [set(line) for line in lines] == [names, names]
    assert "confusion" not in state.metrics


def test_f1_score_of_each_class_can_be_kept_as_the_best(train: Train) -> None:
    hooks = eval_hooks(37)
    hooks.create_metrics = lambda: {"f1": keras.metrics.F1Score()}

    def metric_pre(output: Any, batch: Any) -> Any:
        labels = tf.cast(batch[1][:, 0] > 0, tf.int32)
        return tf.one_hot(labels, 2), tf.concat([-output, output], 1)

    hooks.metric_pre = metric_pre
    state = train(hooks, steps=4, eval_every=2, keep_best="f1/1", early_stop="f1/0:5")
    assert {"f1/0", "f1/1"} < state.metrics.keys()
    assert (state.run_dir / "ckpt" / "best").is_dir()


def test_names_of_results_follow_from_their_shapes() -> None:
    assert name_scalars("a", tf.constant(1.0)) == name_scalars("a", tf.constant([1.0])) == ["a"]
    assert name_scalars("a", tf.zeros(2)) == ["a/0", "a/1"]
    assert name_scalars("a", {"x": tf.zeros([]), "y": tf.zeros(2)}) == ["a/x", "a/y/0", "a/y/1"]
    assert name_scalars("a", tf.zeros([2, 2])) == []
    results = read_results({"c": Confusion(), "m": keras.metrics.Mean()})
    assert results.scalars == {"m": 0.0}
    assert results.arrays["c"].shape == (2, 2)


def read_tensorboard(folder: Path) -> list[int]:
    """Returns the steps of all values called ``loss``, in the order of the files' names."""
    steps = []
    for file in sorted(folder.glob("events.*")):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            steps += [event.step for value in event.summary.value if value.tag == "loss"]
    return steps


def test_resumed_run_has_each_step_once_in_tensorboard(train: Train) -> None:
    """The first process reaches step 9, but its last checkpoint is that of step 6."""
    hooks = make_hooks(every_steps={1: lambda step, loss: ctl_core.report(step, loss=loss)})
    state = train(hooks, steps=9, ckpt_every=3)
    run = state.run_dir
    for file in [*run.glob("ckpt/*-9.*"), *run.glob("ckpt/engine/*-9*")]:
        file.unlink()
    train(hooks, steps=12, ckpt_every=3)
    assert read_tensorboard(run / "tb" / "train") == [*range(1, 13)]


def test_later_events_are_removed_from_a_file_that_was_cut_short(tmp_path: Path) -> None:
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        for step in range(1, 6):
            tf.summary.scalar("loss", 0.0, step)
    writer.close()
    (file,) = tmp_path.glob("events.*")
    file.write_bytes(file.read_bytes()[:-10])
    remove_later_events(tmp_path, 3)
    assert read_tensorboard(tmp_path) == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 1


def read_memory() -> int:
    """Returns the memory of this process (KiB)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_memory_does_not_grow_with_the_number_of_reported_values(tmp_path: Path) -> None:
    """TensorFlow keeps about 1 KiB for each Python number that it has converted."""
    writer = Summaries(tmp_path / "tb", writes=True)
    rng = np.random.default_rng(0)

    def write(first: int) -> None:
        for step in range(first, first + 1000):
            writer.values(step, "train", {f"v{k}": float(rng.normal()) for k in range(20)})

    write(0)
    before = read_memory()
    write(1000)
    assert read_memory() - before < 8_000
    writer.close()
