"""What preprocessing layers learn from data is part of a checkpoint."""

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
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train

WORDS = np.array(["red", "green", "blue", "green", "red", "green", "grey", "red"])
NUMBERS = np.arange(8, dtype="float32")[:, None]
TARGET = (NUMBERS > 3).astype("float32")


def program(words: Any, numbers: Any, adapt: bool = True, size: int = 16) -> SimpleNamespace:
    """A small recommender: words by their number in a vocabulary of the data that there are."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices((({"word": WORDS, "number": NUMBERS}), TARGET))
        return data.batch(per_replica_batch_size)

    def create_model() -> keras.Model:
        keras.utils.set_random_seed(2)
        if adapt:
            lookup = keras.layers.StringLookup()
            lookup.adapt(words)
        else:
            lookup = keras.layers.StringLookup(vocabulary=sorted(set(words)))
        normal, bins = (
            keras.layers.Normalization(axis=None),
            keras.layers.Discretization(num_bins=3),
        )
        normal.adapt(numbers)
        bins.adapt(numbers)
        word, number = keras.Input((), dtype="string"), keras.Input((1,))
        parts = [
            keras.layers.Embedding(size, 3)(lookup(word)),
            keras.layers.Flatten()(keras.layers.Embedding(3, 2)(bins(number))),
            normal(number),
        ]
        output = keras.layers.Dense(1)(keras.layers.Concatenate()(parts))
        return keras.Model({"word": word, "number": number}, output)

    def squared(loss_input: Any) -> Any:
        return tf.reduce_sum((loss_input[0] - loss_input[1]) ** 2, axis=1)

    return make_hooks(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=lambda: squared,
        create_eval_dataset=create_dataset,
    )


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.slow
def test_more_data_since_change_no_number_of_a_checkpoint(
    train: Train, capsys: pytest.CaptureFixture[str], adapt: bool
) -> None:
    state = train(program(WORDS, NUMBERS, adapt), steps=9, batch_size=8)
    whole = train(program(WORDS, NUMBERS, adapt), steps=14, batch_size=8, run_name="whole")
    more = np.concatenate([WORDS, np.repeat(["yellow", "azure"], 9)])
    later = program(more, NUMBERS * 3 + 1, adapt)
    capsys.readouterr()
    assert use.evaluate(later, state.config) == state.metrics
    said = capsys.readouterr().out
    assert "had 5 entries in the checkpoint, 7 entries as create_model made it" in said, said
    resumed = train(later, steps=14, batch_size=8)
    for one, other in zip(resumed.train_model.get_weights(), whole.train_model.get_weights(),
                          strict=True):  # fmt: skip
        np.testing.assert_array_equal(one, other)
    use.evaluate(program(WORDS, NUMBERS, adapt), state.config)
    assert "as create_model made it" not in capsys.readouterr().out.splitlines()[-2]


VECTORIZE: Any = None


@pytest.mark.parametrize("place", ["enclosed", "global", "made by the hook"])
def test_a_vocabulary_that_data_are_read_with_must_be_the_same(
    train: Train, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def hooks(words: Any) -> SimpleNamespace:
        def make() -> keras.Layer:
            mode = "multi_hot" if place == "made by the hook" else "tf_idf"
            layer = keras.layers.TextVectorization(output_mode=mode)
            layer.adapt(words)
            return layer

        vectorize = None if place == "made by the hook" else make()
        monkeypatch.setitem(globals(), "VECTORIZE", vectorize if place == "global" else None)

        def read(layer: Any, batch_size: int) -> tf.data.Dataset:
            data = tf.data.Dataset.from_tensor_slices((WORDS, TARGET)).batch(batch_size)
            return data.map(lambda word, target: (layer(word)[:, :5], target))

        def read_enclosed(per_replica_batch_size: int) -> tf.data.Dataset:
            return read(vectorize or make(), per_replica_batch_size)

        def read_global(per_replica_batch_size: int) -> tf.data.Dataset:
            return read(VECTORIZE, per_replica_batch_size)

        return make_hooks(
            create_dataset=read_global if place == "global" else read_enclosed,
            create_model=lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)]),
        )

    train(hooks(WORDS), steps=2, batch_size=8)
    train(hooks(WORDS), steps=4, batch_size=8)
    with pytest.raises(ctl_core.SetupError, match=r"the data are read, .*\(5 entries then, 6"):
        train(hooks(np.append(WORDS, "yellow")), steps=6, batch_size=8)


def test_layers_of_data_are_found_wherever_the_import_of_callbacks_makes_them(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a list, and in a module that callbacks.py imports."""
    file = tmp_path / "callbacks.py"
    file.write_text(
        "import words_of_test\nimport tensorflow as tf\n"
        "from tests.golden.small import *\n"
        "def create_dataset(per_replica_batch_size):\n"
        "    x, y = data()\n"
        "    def number(x, y):\n"
        "        word = tf.where(x[0] > 0, 'a', 'b')\n"
        "        return x + tf.cast(words_of_test.layers[0](word), tf.float32), y\n"
        "    examples = tf.data.Dataset.from_tensor_slices((x, y)).map(number)\n"
        "    return examples.batch(per_replica_batch_size)\n"
    )

    def load(words: str) -> Any:
        text = f"import keras\nlayers = [keras.layers.StringLookup(vocabulary={words})]\n"
        (tmp_path / "words_of_test.py").write_text(text)
        monkeypatch.delitem(sys.modules, "words_of_test", raising=False)
        return load_callbacks(Source(file, file), tmp_path)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    train(load("['a', 'b']"), steps=2)
    train(load("['a', 'b']"), steps=4)
    with pytest.raises(ctl_core.SetupError, match=r"StringLookup.*has learnt something else"):
        train(load("['b', 'a']"), steps=6)
