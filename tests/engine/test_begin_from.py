"""Runs that begin from another: as it goes on (fork), or with weights of something (init_from)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.commands import use
from ctl_core.run.errors import SetupError
from tests.golden import small
from tests.helpers.cases import FEATURES, eval_hooks, make_hooks, nadam
from tests.helpers.fixtures import Train
from tests.helpers.resume import values

SHORT = {"batch_size": 10, "learning_rate": 0.05, "ckpt_every": 2}


def model(classes: int = 1, head: str = "head") -> keras.Model:
    """With random numbers and a statistic."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="tanh", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.3, name="drop"),
            keras.layers.Dense(classes, name=head),
        ]
    )


def hooks(**more: Any) -> Any:
    return make_hooks(**{"create_model": model, "create_opt": nadam, **more})


def test_a_fork_goes_on_as_the_other_run_does(train: Train) -> None:
    """Optimizer, position in the data and random numbers; killed and started again, too."""
    whole = train(hooks(), run_name="a", steps=8, **SHORT)
    for steps in (6, 8):
        forked = train(hooks(), run_name="b", steps=steps, fork=f"{whole.run_dir}@4", **SHORT)
    found, expected = values(forked), values(whole)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    assert forked.progress.examples == whole.progress.examples


def test_a_fork_has_other_settings_and_the_best_of_the_other(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluated = eval_hooks(40)
    short = {**SHORT, "eval_every": 2, "keep_best": "loss"}
    train(evaluated, run_name="a", steps=6, **short)
    short["learning_rate"] = 0.5
    assert train(evaluated, run_name="b", fork="a@best", steps=8, **short).step == 8
    at_once = train(evaluated, run_name="c", fork="a", steps=6, **short).run_dir / "ckpt"
    for folder in (at_once, at_once / "best"):
        assert [path.name for path in folder.glob("engine/*.json")] == ["ckpt-6.json"]
    said = "".join(capfd.readouterr())
    assert "goes on from" in said and "learning_rate is 0.5 from here on" in said


REFUSED: dict[str, dict[str, Any]] = {
    r"^fork: 'nobody' is neither a run in .*runs nor": {"fork": "nobody"},
    r"^fork: no checkpoint .*a@3 is there, only \[4, 2\]\.$": {"fork": "a@3"},
    r"^init_from: '/no/m' is neither a run in .*runs nor a path that is": {"init_from": "/no/m"},
}


def test_what_cannot_be_begun_from_is_refused(train: Train, tmp_path: Path) -> None:
    """Nothing of a new run is there then, and a run that is there is as it was."""
    train(hooks(), run_name="a", steps=4, **SHORT)
    for message, settings in REFUSED.items():
        with pytest.raises(SetupError, match=message):
            train(hooks(), run_name="b", steps=8, **SHORT, **settings)
        assert not (tmp_path / "runs/b").exists(), settings
    train(hooks(), run_name="b", steps=2, **SHORT)
    with pytest.raises(SetupError, match="has checkpoints, and did not begin from a; choose"):
        train(hooks(), run_name="b", steps=8, **SHORT, fork="a")
    assert (tmp_path / "runs/b/ckpt/engine/ckpt-2.json").exists()


def test_weights_are_those_of_what_is_named(train: Train, tmp_path: Path) -> None:
    """All of them, on both replicas; what has another shape, or is not there, is refused."""
    state = train(hooks(), run_name="a", steps=4, **SHORT)
    trained, path = state.train_model, str(use.export(hooks(), state.config))
    trained.save(tmp_path / "m.keras")
    trained.save_weights(tmp_path / "m.weights.h5")
    settings: dict[str, Any] = {"steps": 0, **SHORT}
    for source in ("a", str(tmp_path / "m.keras"), str(tmp_path / "m.weights.h5"), path):
        settings["virtual_devices"] = 1 + (source == "a")
        state = train(hooks(), run_name=f"of-{Path(source).name}", init_from=source, **settings)
        assert int(state.optimizer.iterations.numpy()) == 0
        for ours, theirs in zip(state.train_model.weights, trained.weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    other = hooks(create_model=lambda: model(classes=3), create_loss=lambda: small.squared_error)
    with pytest.raises(SetupError, match=r"does not fit .*\(8, [13]\).*\(8, [13]\)"):
        train(other, run_name="c", init_from="a", **settings)
    other = hooks(create_model=lambda: model(head="other"))
    with pytest.raises(SetupError, match=r"fits 6 of the 8 weights .*: \S*other/kernel, "):
        train(other, run_name="c", init_from=path, **settings)


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
        self.parts = [tf.Variable(tf.ones([FEATURES, 1])), tf.Variable(tf.zeros([1]))]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs @ self.parts[0] + self.parts[1]


def test_a_model_of_ones_own_takes_the_weights_of_a_run(train: Train, tmp_path: Path) -> None:
    own = hooks(create_model=Plain)
    trained = train(own, run_name="a", steps=4, **SHORT)
    state = train(own, run_name="b", steps=0, init_from="a", **SHORT)
    for ours, theirs in zip(state.train_model.parts, trained.train_model.parts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model().save(tmp_path / "m.keras")
    with pytest.raises(SetupError, match="is for a Keras model, and create_model"):
        train(own, run_name="c", steps=0, init_from=str(tmp_path / "m.keras"), **SHORT)
