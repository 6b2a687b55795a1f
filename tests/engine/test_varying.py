"""Batches and outputs whose sizes vary: what host hooks get, and what predict writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.commands import use
from tests.helpers.cases import sgd
from tests.helpers.fixtures import Train

WORDS = 11
LENGTHS = [3, 3, 5, 5, 4, 4, 4, 4, 2, 2, 6, 6]


def sentences(examples: int = 2) -> tf.data.Dataset:
    """Sequences of tokens with a label for each; each batch as wide as its longest."""
    tokens = tf.ragged.range(1, tf.constant(LENGTHS) + 1)
    made = tf.data.Dataset.from_tensor_slices((tokens, tokens % 2))
    dense = made.map(lambda x, y: (tf.convert_to_tensor(x), tf.convert_to_tensor(y)))
    return dense.padded_batch(examples, ([None], [None]), drop_remainder=True)


def tagger(seen: list[Any], **more: Any) -> SimpleNamespace:
    """A model with an output for each token, as Keras' sequence taggers have it."""

    def create_model() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(WORDS, 4), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((None,), dtype="int32"), *layers])

    def create_loss() -> Any:
        each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        return lambda pair: tf.reduce_sum(each(pair[1], pair[0]), -1)

    def look(step: int, output: Any, batch: Any) -> None:
        seen.append((step, output, batch))

    return SimpleNamespace(
        **{
            "create_dataset": lambda: sentences(),
            "create_model": create_model,
            "create_loss": create_loss,
            "create_opt": sgd,
            "every_steps": {1: look},
            **more,
        }
    )


def test_host_hooks_see_what_does_not_fit_as_ragged(train: Train) -> None:
    seen: list[Any] = []
    train(tagger(seen), steps=3, batch_size=4, virtual_devices=2)
    (_, first, (tokens, _)), (_, second, (dense, _)), (_, third, _) = seen
    assert isinstance(first, tf.RaggedTensor) and first.shape[0] == 4
    assert first.row_lengths().numpy().tolist() == [3, 3, 5, 5]
    assert tokens.to_list() == [[1, 2, 3]] * 2 + [[1, 2, 3, 4, 5]] * 2
    assert isinstance(second, tf.Tensor) and second.shape == (4, 4, 2) and dense.shape == (4, 4)
    assert third.row_lengths().numpy().tolist() == [2, 2, 6, 6]


def test_predictions_of_varying_width_are_written(train: Train) -> None:
    """Each evaluation batch is as wide as its longest sentence."""
    hooks = tagger([], create_eval_dataset=lambda: sentences())
    state = train(hooks, steps=2, batch_size=2)
    with np.load(use.predict(hooks, state.config)) as file:
        output, lengths = file["output"], file["output.lengths"]
    assert output.shape == (12, 6, 2) and lengths.tolist() == LENGTHS
    assert not output[0, 3:].any() and output[0, :3].all()
