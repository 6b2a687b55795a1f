"""A resumed run has all that the run had, wherever a program keeps it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.commands import use
from ctl_core.hooks.callbacks_file import Source, load_callbacks
from tests.golden import small
from tests.helpers.cases import assert_weights, make_hooks, regression_data, small_model
from tests.helpers.fixtures import Train
from tests.helpers.resume import StatefulRnn, assert_resumes, counting_model, dense, seeded, values


def adversary_program() -> SimpleNamespace:
    """A second network with an optimizer of its own, which no hook returns."""
    critic: Any = None
    critic_opt: Any = None

    def create_model() -> Any:
        nonlocal critic, critic_opt
        critic, critic_opt = dense(1, 1), keras.optimizers.Adam(0.01)
        return small_model()

    def grad_pre(loss: Any, output: Any, train_model: Any) -> Any:
        with tf.GradientTape() as tape:
            score = tf.reduce_mean(critic(tf.stop_gradient(output)) ** 2)
        variables = critic.trainable_variables
        critic_opt.apply_gradients(zip(tape.gradient(score, variables), variables, strict=True))
        return loss + 0.1 * critic(output)[:, 0], 0.0, train_model.trainable_variables

    return make_hooks(create_model=create_model, grad_pre=grad_pre)


def test_a_program_resumes_wherever_its_state_is(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_resumes(train, adversary_program)
    assert "warning" not in capsys.readouterr().out


def test_what_each_replica_sums_up_resumes(train: Train) -> None:
    """Each goes on with its own moving statistics, not with their mean."""
    numbers = assert_resumes(train, lambda: make_hooks(create_model=seeded(counting_model)), 2)
    own = [v for path, v in numbers.items() if path.startswith("create_model/")]
    assert 12 * 16 in {float(v) for v in own if not v.ndim}


def test_an_evaluation_changes_no_bit_of_training(train: Train) -> None:
    """Of a model that writes while it is called."""
    hooks = make_hooks(create_model=seeded(StatefulRnn))
    rarely = values(train(hooks, run_name="never", steps=9))
    hooks.create_eval_dataset = small.create_dataset
    often = values(train(hooks, run_name="often", steps=9, eval_every=2))
    for path, value in rarely.items():
        np.testing.assert_array_equal(value, often[path], err_msg=path)
    assert any(path.endswith("seen/total") for path in rarely)


def test_a_changed_learning_rate_replaces_the_one_in_the_checkpoint(train: Train) -> None:
    for steps, rate in ((2, 0.01), (4, 0.5)):
        state = train(make_hooks(), steps=steps, learning_rate=rate)
        assert float(state.lr) == pytest.approx(rate)


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
    assert "it runs RandomGamma, which has a state of its own" in output


# ---- What preprocessing layers learn from data ---------------------------------------------------


WORDS = np.array(["red", "green", "blue", "green", "red", "green", "grey", "red"])
NUMBERS = np.arange(8, dtype="float32")[:, None]
TARGET = (NUMBERS > 3).astype("float32")


def program(words: Any, numbers: Any) -> SimpleNamespace:
    """A small recommender: words by their number in a vocabulary of the data that there are."""

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
        parts = [
            keras.layers.Embedding(16, 3)(lookup(word)),
            keras.layers.Flatten()(keras.layers.Embedding(3, 2)(bins(number))),
            normal(number),
        ]
        output = keras.layers.Dense(1)(keras.layers.Concatenate()(parts))
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
    said = capsys.readouterr().out
    assert "had 5 entries in the checkpoint, 7 as create_model made it" in said, said
    resumed = train(later, steps=14, batch_size=8)
    assert_weights(resumed, whole, rtol=0)
    use.evaluate(program(WORDS, NUMBERS), state.config)
    assert "as create_model made it" not in capsys.readouterr().out.splitlines()[-2]


def enclosing_hooks(words: list[str], folder: Path, enclosed: bool = True) -> Any:
    layer = keras.layers.StringLookup(vocabulary=words)

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        used = layer if enclosed else keras.layers.StringLookup(vocabulary=words)

        def number(x: Any, y: Any) -> Any:
            return x + tf.cast(used(tf.where(x[0] > 0, "a", "b")), tf.float32), y

        examples = tf.data.Dataset.from_tensor_slices(small.data()).map(number)
        return examples.batch(per_replica_batch_size)

    return small.hooks(create_dataset=create_dataset)


def making_hooks(words: list[str], folder: Path) -> Any:
    return enclosing_hooks(words, folder, enclosed=False)


IMPORTING = """
import words_of_test

def number(x, y):
    return x + tf.cast(words_of_test.layers[0](tf.where(x[0] > 0, "a", "b")), tf.float32), y

def create_dataset(per_replica_batch_size):
    examples = tf.data.Dataset.from_tensor_slices(small.data()).map(number)
    return examples.batch(per_replica_batch_size)
"""


def importing_hooks(words: list[str], folder: Path) -> Any:
    """Of a callbacks.py that imports a module with a list of layers."""
    sys.modules.pop("words_of_test", None)
    text = f"import keras\nlayers = [keras.layers.StringLookup(vocabulary={words})]\n"
    (folder / "words_of_test.py").write_text(text)
    (file := folder / "callbacks.py").write_text(small.CALLBACKS + IMPORTING)
    return load_callbacks(Source(file, file), folder)


@pytest.mark.parametrize(
    "make", [enclosing_hooks, importing_hooks, pytest.param(making_hooks, marks=pytest.mark.slow)]
)
def test_a_vocabulary_that_data_are_read_with_must_be_the_same(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for steps in (2, 4):
        train(make(["a", "b"], tmp_path), steps=steps)
    said = r"the data are read, has learnt something else .*\(3 entries then, 4"
    with pytest.raises(ctl_core.SetupError, match=said):
        train(make(["b", "a", "c"], tmp_path), steps=6)
