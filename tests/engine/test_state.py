"""Tests that resumed and forked runs continue with the complete state, and of initial weights."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.checkpoint import position
from ctl_core.commands import use
from tests.golden import small
from tests.helpers.cases import (
    FEATURES,
    assert_equal,
    assert_weights,
    eval_hooks,
    make_hooks,
    regression_data,
    values,
)
from tests.helpers.project import Cli, Train, refused


class Counting(keras.layers.Layer):
    """Counts its calls with a variable, and the examples with a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, inputs: Any) -> Any:
        self.calls.assign(self.calls + 1)
        self.seen.update_state(tf.ones(tf.shape(inputs)[0]))
        return inputs


def counting_model() -> keras.Model:
    return small.model_with(Counting(), keras.layers.BatchNormalization())


@pytest.mark.parametrize("buffer", [4, 4000])
def test_a_position_that_outweighs_the_model_is_mentioned_once(
    train: Train, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, buffer: int
) -> None:
    """A message is printed once if the saved shuffle buffer is much larger than the model."""
    monkeypatch.setattr(position, "LARGE_POSITION", 1_000_000)

    def create_dataset(global_batch_size: int) -> tf.data.Dataset:
        inputs, target = (tf.constant(array) for array in regression_data())
        numbers = tf.data.Dataset.range(10_000).map(lambda index: tf.range(index, index + 1000))
        examples = tf.data.Dataset.from_tensor_slices((inputs, target)).repeat()
        examples = tf.data.Dataset.zip(examples, numbers).shuffle(buffer, seed=1)
        return examples.map(lambda pair, _: pair).batch(global_batch_size)

    train(make_hooks(create_dataset=create_dataset), steps=4, ckpt_every=2)
    text = capfd.readouterr().out
    mentioned = re.findall(r"each checkpoint contains \d+ MB for the position in the data", text)
    assert len(mentioned) == int(buffer > 100), text


def test_an_evaluation_changes_no_bit_of_training(train: Train) -> None:
    """An evaluation changes no bit, even if the model assigns variables when it is called."""
    hooks = make_hooks(create_model=counting_model)
    rarely = values(train(hooks, run_name="never", steps=9))
    hooks.create_eval_dataset = small.create_dataset
    often = values(train(hooks, run_name="often", steps=9, eval_every=2))
    assert_equal({path: often[path] for path in rarely}, rarely)
    assert any(path.endswith("seen/total") for path in rarely)


def test_random_operations_that_no_checkpoint_holds_are_pointed_out(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        def change(x: Any, y: Any) -> Any:
            return tf.cond(x[0, 0] > 9.0, lambda: x, lambda: tf.random.gamma([], 1.0) * x), y

        data = tf.data.Dataset.from_tensor_slices(regression_data())
        return data.batch(per_replica_batch_size, drop_remainder=True).map(change)

    def input_pre(batch: Any) -> Any:
        return batch[0] + tf.random.normal(tf.shape(batch[0]))

    train(make_hooks(create_dataset=create_dataset, input_pre=input_pre), steps=1)
    output = capsys.readouterr().out
    assert "draws random numbers with RandomStandardNormal" in output
    assert "it uses RandomGamma, which has its own state" in output


# ---- Preprocessing layers that learn from data ---------------------------------------------------

WORDS = np.array(["red", "green", "blue", "green", "red", "green", "grey", "red"])
NUMBERS = np.arange(8, dtype="float32")[:, None]
TARGET = (NUMBERS > 3).astype("float32")


def program(words: Any, numbers: Any) -> SimpleNamespace:
    """Returns hooks whose model has layers that are adapted to the given words and numbers."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((({"word": WORDS, "number": NUMBERS}), TARGET))
        return data.batch(per_replica_batch_size)

    def create_model() -> keras.Model:
        keras.utils.set_random_seed(2)
        lookup = keras.layers.StringLookup()
        lookup.adapt(words)
        normal = keras.layers.Normalization(axis=None)
        bins = keras.layers.Discretization(num_bins=3)
        normal.adapt(numbers)
        bins.adapt(numbers)
        word, number = keras.Input((), dtype="string"), keras.Input((1,))
        layers = [
            keras.layers.Embedding(16, 3)(lookup(word)),
            keras.layers.Flatten()(keras.layers.Embedding(3, 2)(bins(number))),
            normal(number),
        ]
        output = keras.layers.Dense(1)(keras.layers.Concatenate()(layers))
        return keras.Model({"word": word, "number": number}, output)

    return make_hooks(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=lambda: small.squared_error,
        create_eval_dataset=create_dataset,
    )


@pytest.mark.slow
def test_more_data_since_change_no_number_of_a_checkpoint(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    state = train(program(WORDS, NUMBERS), steps=9, batch_size=8)
    whole = train(program(WORDS, NUMBERS), steps=14, batch_size=8, run_name="whole")
    more = np.concatenate([WORDS, np.repeat(["yellow", "azure"], 9)])
    later = program(more, NUMBERS * 3 + 1)
    capsys.readouterr()
    assert use.evaluate(later, state.config) == state.metrics
    printed = capsys.readouterr().out
    assert "had 5 entries in the checkpoint, but 7 when create_model returned it" in printed, (
        printed
    )
    resumed = train(later, steps=14, batch_size=8)
    assert_weights(resumed, whole, rtol=0)
    use.evaluate(program(WORDS, NUMBERS), state.config)
    assert "when create_model returned it" not in capsys.readouterr().out.splitlines()[-2]


LISTED = """
layers = [keras.layers.StringLookup(vocabulary=WORDS)]


def number(x, y):
    return x + tf.cast(layers[0](tf.where(x[0] > 0, "a", "b")), tf.float32), y


def create_dataset(per_replica_batch_size):
    examples = tf.data.Dataset.from_tensor_slices(small.data()).map(number)
    return examples.batch(per_replica_batch_size)
"""


def test_a_vocabulary_that_data_are_read_with_must_be_the_same(cli: Cli) -> None:
    source = small.CALLBACKS + LISTED
    for steps in ("2", "4"):
        assert cli(source.replace("WORDS", "['a', 'b']"), "--steps", steps).code == 0
    outcome = cli(source.replace("WORDS", "['b', 'a', 'c']"), "--steps", "6")
    refused(outcome, "the input pipeline uses, has learned other values", "(3 entries then, 4 now)")


# ---- Runs that start from another run: fork and init_from ----------------------------------------

SHORT = {"batch_size": 10, "learning_rate": 0.05, "ckpt_every": 2}


def build_model(classes: int = 1) -> keras.Model:
    """Returns a model with batch normalization and dropout."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="tanh", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.3, name="drop"),
            keras.layers.Dense(classes, name="head"),
        ]
    )


def hooks_of(**more: Any) -> Any:
    return make_hooks(**{"create_model": build_model, **more})


def test_a_fork_has_other_settings_and_the_best_of_the_other(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluated = eval_hooks(40)
    short = {**SHORT, "eval_every": 2, "keep_best": "loss"}
    train(evaluated, run_name="a", steps=6, **short)
    short["learning_rate"] = 0.5
    assert train(evaluated, run_name="b", fork="a@best", steps=8, **short).step == 8
    at_once = train(evaluated, run_name="c", fork="a", steps=6, **short).run_dir / "ckpt"
    for folder, step in ((at_once, 6), (at_once / "best", 4)):
        assert [path.name for path in folder.glob("engine/*.json")] == [f"ckpt-{step}.json"]
    printed = "".join(capfd.readouterr())
    assert "continues from" in printed
    assert "learning_rate is 0.5 from now on" in printed


def test_a_fork_of_a_run_that_a_hook_ended_may_have_fewer_steps(train: Train) -> None:
    """The fork begins as a run that was ended, and trains if it has more steps than planned."""

    def stop() -> None:
        raise ctl_core.StopTraining

    train(hooks_of(at_step={4: stop}), run_name="a", steps=20, **SHORT)
    assert train(hooks_of(), run_name="b", fork="a", steps=8, **SHORT).step == 4
    assert train(hooks_of(), run_name="b", steps=21, **SHORT).step == 21


REFUSED: dict[str, dict[str, Any]] = {
    r"^fork: 'nobody' is neither a run in .*runs nor": {"fork": "nobody"},
    r"^fork: there is no checkpoint .*a@3, only \[4, 2\]\.$": {"fork": "a@3"},
    r"^init_from: '/no/m' is neither a run in .*runs nor an existing path": {"init_from": "/no/m"},
}


def test_init_from_refuses_what_is_no_run(train: Train, tmp_path: Path) -> None:
    """After an error, a new run has no folder, and an existing run is unchanged."""
    train(hooks_of(), run_name="a", steps=4, **SHORT)
    for message, settings in REFUSED.items():
        with pytest.raises(ctl_core.SetupError, match=message):
            train(hooks_of(), run_name="b", steps=8, **SHORT, **settings)
        assert not (tmp_path / "runs/b").exists(), settings
    train(hooks_of(), run_name="b", steps=2, **SHORT)
    with pytest.raises(
        ctl_core.SetupError, match="already has checkpoints and was not forked from a; choose"
    ):
        train(hooks_of(), run_name="b", steps=8, **SHORT, fork="a")
    assert (tmp_path / "runs/b/ckpt/engine/ckpt-2.json").exists()


@pytest.mark.slow
def test_init_from_loads_all_weights_on_all_replicas(train: Train, tmp_path: Path) -> None:
    """All weights are loaded on both replicas, and weights of another shape are an error."""
    state = train(hooks_of(), run_name="a", steps=4, **SHORT)
    trained, path = state.train_model, str(use.export(hooks_of(), state.config)[0])
    trained.save_weights(tmp_path / "m.weights.h5")
    settings: dict[str, Any] = {"steps": 0, **SHORT}
    for source in ("a", str(tmp_path / "m.weights.h5"), path):
        settings["virtual_devices"] = 1 + (source == "a")
        state = train(hooks_of(), run_name=f"of-{Path(source).name}", init_from=source, **settings)
        assert int(state.optimizer.iterations.numpy()) == 0
        for ours, theirs in zip(state.train_model.weights, trained.weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    other = hooks_of(
        create_model=lambda: build_model(classes=3), create_loss=lambda: small.squared_error
    )
    with pytest.raises(ctl_core.SetupError, match=r"does not fit .*\(8, [13]\).*\(8, [13]\)"):
        train(other, run_name="c", init_from="a", **settings)


def test_averaged_weights_begin_with_those_of_init_from(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = train(hooks_of(), run_name="a", steps=4, **SHORT)
    state = train(hooks_of(), run_name="b", steps=0, init_from="a", ema=0.9, **SHORT)
    assert state.average is not None
    state.average.swap()
    kernel = state.train_model.get_layer("hidden").kernel
    np.testing.assert_array_equal(kernel, trained.train_model.get_layer("hidden").kernel)
    assert "b: already at step 0 of 0, so there is nothing left to train" in capfd.readouterr().out


class Plain:
    """A model that is neither a Keras model nor a TensorFlow module."""

    def __init__(self) -> None:
        self.parts = [tf.Variable(tf.ones([FEATURES, 1])), tf.Variable(tf.zeros([1]))]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs @ self.parts[0] + self.parts[1]


def test_a_model_of_ones_own_takes_the_weights_of_a_run(train: Train, tmp_path: Path) -> None:
    hooks = hooks_of(create_model=Plain)
    trained = train(hooks, run_name="a", steps=4, **SHORT)
    state = train(hooks, run_name="b", steps=0, init_from="a", **SHORT)
    for ours, theirs in zip(state.train_model.parts, trained.train_model.parts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    build_model().save(tmp_path / "m.keras")
    with pytest.raises(ctl_core.SetupError, match="contains a Keras model, but create_model"):
        train(hooks, run_name="c", steps=0, init_from=str(tmp_path / "m.keras"), **SHORT)
