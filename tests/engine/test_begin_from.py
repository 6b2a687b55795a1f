"""Runs that begin from another: as it goes on (fork), or with weights of something (init_from)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.commands import use
from ctl_core.run.errors import SetupError
from tests.helpers.cases import FEATURES, eval_hooks, make_hooks, nadam, regression_data
from tests.helpers.fixtures import Train
from tests.helpers.resume import values


def shuffled(batch_size: int) -> tf.data.Dataset:
    """One pass, reshuffled each time; what is left over at its end is no whole batch."""
    examples = tf.data.Dataset.from_tensor_slices(regression_data())
    return examples.shuffle(40, seed=3).batch(batch_size, drop_remainder=True)


SHORT = {"batch_size": 10, "learning_rate": 0.05, "ckpt_every": 2}


def model(units: int = 8, classes: int = 1, head: str = "head") -> keras.Model:
    """Random numbers, a statistic and a head of its own name."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(units, activation="tanh", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.3, name="drop"),
            keras.layers.Dense(classes, name=head),
        ]
    )


def hooks(**more: Any) -> Any:
    own = {
        "create_model": model,
        "create_opt": nadam,
        "create_dataset": lambda per_replica_batch_size: shuffled(per_replica_batch_size),
    }
    return make_hooks(**{**own, **more})


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_a_fork_goes_on_as_the_other_run_does(train: Train, tmp_path: Path) -> None:
    """Optimizer, position in the data and random numbers; killed and started again, too."""
    whole = train(hooks(), run_name="a", steps=8, **SHORT)
    settings = {"run_name": "b", "fork": "a@4", **SHORT}
    train(hooks(), steps=6, **settings)
    forked = train(hooks(), steps=8, **settings)
    assert_equal(values(forked), values(whole))
    assert forked.progress.examples == whole.progress.examples
    away = str(shutil.move(whole.run_dir, tmp_path / "elsewhere"))
    by_path = train(hooks(), run_name="c", steps=8, fork=f"{away}@6", **SHORT)
    assert_equal(values(by_path), values(whole))


def test_a_fork_has_other_settings_and_the_best_of_the_other(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluated = eval_hooks(40)
    short = {**SHORT, "eval_every": 2, "keep_best": "loss"}
    whole = train(evaluated, run_name="a", steps=6, **short)
    best = (whole.run_dir / "ckpt" / "best" / "engine").glob("ckpt-*.json")
    short["learning_rate"] = 0.5
    forked = train(evaluated, run_name="b", fork="a@best", steps=8, **short)
    assert int(next(best).stem.removeprefix("ckpt-")) == 6
    assert forked.step == 8
    at_once = train(evaluated, run_name="c", fork="a", steps=6, **short).run_dir / "ckpt"
    for folder in (at_once, at_once / "best"):
        assert [path.name for path in folder.glob("engine/*.json")] == ["ckpt-6.json"]
    said = "".join(capfd.readouterr())
    assert "goes on from" in said and "learning_rate is 0.5 from here on" in said


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no run": ({"fork": "nobody"}, r"^fork: 'nobody' is neither a run in .*runs nor"),
    "no step": ({"fork": "a@3"}, r"^fork: no checkpoint .*a@3 is there, only \[4, 2\]\.$"),
    "both": (
        {"fork": "a", "init_from": "a"},
        r"^fork and init_from: give one of the two, got a and a\.$",
    ),
    "no file": (
        {"init_from": "/none/m.keras"},
        r"^init_from: '/none/m\.keras' is neither a run in .*runs nor a path that is there\.$",
    ),
}


def test_what_cannot_be_begun_from_is_refused(train: Train, tmp_path: Path) -> None:
    """Nothing of a new run is there then, and a run that is there is as it was."""
    train(hooks(), run_name="a", steps=4, **SHORT)
    for settings, message in REFUSED.values():
        with pytest.raises(SetupError, match=message):
            train(hooks(), run_name="b", steps=8, **SHORT, **settings)
        assert not (tmp_path / "runs/b").exists(), settings
    train(hooks(), run_name="b", steps=2, **SHORT)
    with pytest.raises(SetupError, match="has checkpoints, and did not begin from a; choose"):
        train(hooks(), run_name="b", steps=8, **SHORT, fork="a")
    assert (tmp_path / "runs/b/ckpt/engine/ckpt-2.json").exists()


@pytest.mark.parametrize("source", ["a", "m.keras", "m.weights.h5", "SavedModel"])
def test_weights_are_those_of_what_is_named(train: Train, tmp_path: Path, source: str) -> None:
    """All of them, on both replicas; what has another shape is refused."""
    state = train(hooks(), run_name="a", steps=4, **SHORT)
    trained, named = state.train_model, str(tmp_path / source)
    if source == "a":
        named = "a"
    elif source == "SavedModel":
        named = str(use.export(hooks(), state.config))
    elif source.endswith(".keras"):
        trained.save(named)
    else:
        trained.save_weights(named)
    settings: dict[str, Any] = {"steps": 0, "virtual_devices": 2, "init_from": named, **SHORT}
    state = train(hooks(), run_name="b", **settings)
    assert int(state.optimizer.iterations.numpy()) == 0
    for ours, theirs in zip(state.train_model.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    other = {"create_model": lambda: model(classes=3), "create_loss": lambda: _sums}
    with pytest.raises(SetupError, match=r"does not fit .*\(8, 1\).*\(8, 3\)|\(8, 3\).*\(8, 1\)"):
        train(hooks(**other), run_name="c", **settings)


def test_weights_that_a_saved_model_lacks_are_named(train: Train) -> None:
    path = use.export(hooks(), train(hooks(), run_name="a", steps=4, **SHORT).config)
    other = hooks(create_model=lambda: model(head="other"))
    with pytest.raises(SetupError, match=r"fits 6 of the 8 weights .*: \S*other/kernel, "):
        train(other, run_name="b", steps=1, init_from=str(path), **SHORT)


def _sums(pair: Any) -> tf.Tensor:
    return tf.reduce_sum((pair[0] - pair[1]) ** 2, 1)


def test_weights_that_are_averaged_begin_with_those(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = train(hooks(), run_name="a", steps=4, **SHORT)
    state = train(hooks(), run_name="b", steps=0, init_from="a", ema=0.9, **SHORT)
    assert state.average is not None
    state.average.swap()
    kernel = state.train_model.get_layer("hidden").kernel
    np.testing.assert_array_equal(kernel, trained.train_model.get_layer("hidden").kernel)
    assert "b: at step 0 of 0, nothing left to train" in capfd.readouterr().out


class Plain:
    """A model that is none of Keras', nor anything that TensorFlow knows."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [tf.Variable(tf.ones([FEATURES, 1])), tf.Variable(tf.zeros([1]))]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs @ self.parts[0] + self.parts[1]


class Module(Plain, tf.Module):
    """A model all of whose variables have one name."""


@pytest.mark.parametrize("create", [Plain, Module])
def test_a_model_of_ones_own_takes_the_weights_of_a_run(
    train: Train, tmp_path: Path, create: type
) -> None:
    own = hooks(create_model=create)
    trained = train(own, run_name="a", steps=4, **SHORT)
    state = train(own, run_name="b", steps=0, init_from="a", **SHORT)
    for ours, theirs in zip(state.train_model.parts, trained.train_model.parts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model().save(tmp_path / "m.keras")
    with pytest.raises(SetupError, match="is for a Keras model, and create_model"):
        train(own, run_name="c", steps=0, init_from=str(tmp_path / "m.keras"), **SHORT)
