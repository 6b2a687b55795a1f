"""A recommender with vocabularies, as people write them with TensorFlow Recommenders.

Users and items go by their names: a StringLookup and an Embedding each, whose dot product is to
be the rating. The layers are kept in a dict, of a ``tf.Module``, of a plain class or of a Keras
model. The gradients of the embeddings are sparse, and a batch names most items more than once. The
other task of such models, to find a user's item among those of the whole batch, needs the items
of all devices, which ``all_gather`` gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.tools import commands
from tests.helpers.fixtures import Train
from tests.helpers.resume import assert_resumes
from tests.ported.compare import BATCH, RATE, STEPS, assert_close, assert_moved, numbers

RANDOM = np.random.default_rng(0)
USERS = np.array([f"user {number}" for number in RANDOM.integers(0, 12, size=40)])
ITEMS = np.array([f"item {number}" for number in RANDOM.integers(0, 5, size=40)])
RATINGS = RANDOM.integers(1, 6, size=(40, 1)).astype("float32")
SIZE = 4

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    columns = {"user": USERS, "item": ITEMS, "rating": RATINGS}
    return tf.data.Dataset.from_tensor_slices(columns).batch(per_replica_batch_size)


def create_layers() -> dict[str, keras.layers.Layer]:
    keras.utils.set_random_seed(1)
    items = keras.layers.StringLookup(mask_token=None)
    items.adapt(create_dataset(8).map(lambda row: row["item"]))
    users = keras.layers.StringLookup(mask_token=None, vocabulary=np.unique(USERS))
    near = keras.initializers.RandomNormal(stddev=0.5)
    return {
        "user_id": users,
        "item_id": items,
        "user": keras.layers.Embedding(users.vocabulary_size(), SIZE, near),
        "item": keras.layers.Embedding(items.vocabulary_size(), SIZE, near),
        "item_bias": keras.layers.Embedding(items.vocabulary_size(), 1, near),
        "rating": keras.layers.Dense(1),
    }


def rate(layers: dict[str, keras.layers.Layer], inputs: dict[str, Any]) -> Any:
    user, item = layers["user_id"](inputs["user"]), layers["item_id"](inputs["item"])
    product = layers["user"](user) * layers["item"](item)
    return layers["rating"](product) + layers["item_bias"](item)


class Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = create_layers()

    def __call__(self, inputs: dict[str, Any]) -> Any:
        return rate(self.parts, inputs)


class Plain:
    def __init__(self) -> None:
        self.parts = create_layers()

    def __call__(self, inputs: dict[str, Any]) -> Any:
        return rate(self.parts, inputs)


class Model(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.parts = create_layers()

    def call(self, inputs: dict[str, Any]) -> Any:
        return rate(self.parts, inputs)


def squared_error(loss_input: Any) -> Any:
    output, rating = loss_input
    return tf.reduce_sum((output - rating) ** 2, axis=1)


def create_loss() -> Any:
    return squared_error


def input_pre(batch: dict[str, Any]) -> Any:
    return {"user": batch["user"], "item": batch["item"]}


def loss_pre(output: Any, batch: dict[str, Any]) -> Any:
    return output, batch["rating"]


def create_metrics() -> dict[str, keras.Metric]:
    return {"rmse": keras.metrics.RootMeanSquaredError()}


def metric_pre(output: Any, batch: dict[str, Any]) -> Any:
    return batch["rating"], output


class TwoTowers(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        layers = create_layers()
        self.parts = {name: layers[name] for name in ("user_id", "item_id", "user", "item")}

    def call(self, inputs: dict[str, Any]) -> Any:
        users = self.parts["user"](self.parts["user_id"](inputs["user"]))
        return users, self.parts["item"](self.parts["item_id"](inputs["item"]))


def with_all_items(output: Any) -> Any:
    users, items = output
    own = ctl_core.replica_id() * len(items) + tf.range(len(items))
    return users, ctl_core.all_gather(items), own


def retrieval_loss(loss_input: Any) -> Any:
    users, items, own = loss_input
    scores = tf.matmul(users, items, transpose_b=True)
    return keras.losses.sparse_categorical_crossentropy(own, scores, from_logits=True)


# ---- The same as a plain loop -----------------------------------------------------------------


def sgd(lr: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(lr)


def adagrad(lr: Any) -> keras.Optimizer:
    return keras.optimizers.Adagrad(lr)


def hooks(
    create_model: Callable[[], Any], create_opt: Callable[[Any], keras.Optimizer] = sgd
) -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_eval_dataset=create_dataset,
        create_model=create_model,
        create_loss=create_loss,
        create_opt=create_opt,
        input_pre=input_pre,
        loss_pre=loss_pre,
        create_metrics=create_metrics,
        metric_pre=metric_pre,
        every_steps={},
    )


def weights(model: Any) -> list[Any]:
    return [weight for layer in model.parts.values() for weight in layer.weights]


@functools.cache
def plain(create_opt: Callable[[Any], keras.Optimizer], lr: float) -> Any:
    model, optimizer = Plain(), create_opt(lr)
    model(input_pre(next(iter(create_dataset(BATCH)))))
    before = numbers(weights(model))
    for batch in create_dataset(BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch) - batch["rating"]) ** 2)
        gradients = tape.gradient(loss, weights(model))
        assert sum(isinstance(gradient, tf.IndexedSlices) for gradient in gradients) == 3
        # Keras 3 lets Adagrad square what each example gives to a row; Keras 2 added it up before,
        # as a gradient does, and so does the engine.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, weights(model), strict=True))
    assert_moved(before, numbers(weights(model)))
    return model


@pytest.mark.parametrize(
    ("create_model", "create_opt", "lr", "devices"),
    [
        (Module, sgd, RATE, 1),
        (Plain, sgd, RATE, 2),
        (Model, sgd, RATE, 2),
        (Module, adagrad, 0.1, 2),
    ],
)
def test_weights_are_those_of_the_plain_loop(
    train: Train, create_model: Any, create_opt: Any, lr: float, devices: int
) -> None:
    expected = plain(create_opt, lr)
    state = train(hooks(create_model, create_opt), steps=STEPS, batch_size=BATCH,
                  learning_rate=lr, virtual_devices=devices)  # fmt: skip
    assert_close(weights(state.train_model), weights(expected))
    error = expected({"user": USERS, "item": ITEMS}).numpy() - RATINGS
    np.testing.assert_allclose(state.metrics["rmse"], np.sqrt((error**2).mean()), rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_retrieval_among_the_items_of_the_whole_batch(train: Train, devices: int) -> None:
    retrieval = SimpleNamespace(
        create_dataset=create_dataset,
        create_model=TwoTowers,
        create_loss=lambda: retrieval_loss,
        create_opt=sgd,
        input_pre=input_pre,
        loss_pre=with_all_items,
        every_steps={},
    )
    state = train(retrieval, steps=STEPS, batch_size=BATCH, learning_rate=RATE,
                  virtual_devices=devices)  # fmt: skip
    model, optimizer = TwoTowers(), keras.optimizers.SGD(RATE)
    batches = create_dataset(BATCH).repeat().take(STEPS)
    model(next(iter(batches)))
    before = numbers(model.weights)
    for batch in batches:
        with tf.GradientTape() as tape:
            users, items = model(batch)
            loss = tf.reduce_mean(retrieval_loss((users, items, tf.range(BATCH))))
        gradients = tape.gradient(loss, model.weights)
        optimizer.apply_gradients(zip(gradients, model.weights, strict=True))
    assert_moved(before, numbers(model.weights))
    assert_close(state.train_model.weights, model.weights)


def test_a_resumed_run_is_the_whole_run(train: Train) -> None:
    assert_resumes(train, lambda: hooks(Module, adagrad), batch_size=BATCH)


def test_an_export_knows_the_names(train: Train) -> None:
    state = train(hooks(Plain), steps=2, batch_size=BATCH)
    options = {"checkpoint": None, "input": None, "output": None}
    path = commands.export(hooks(Plain), state.config, options)
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    some = {"user": tf.constant(["user 3", "nobody"]), "item": tf.constant(["item 1", "item 2"])}
    found = next(iter(served(**some).values()))
    np.testing.assert_allclose(found, state.train_model(some), rtol=1e-5, atol=1e-6)
