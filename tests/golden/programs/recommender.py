"""A recommender with vocabularies, as people write them with TensorFlow Recommenders.

Users and items go by their names: a StringLookup and an Embedding each, whose dot product is to
be the rating. The layers are kept in a dict, of a ``tf.Module``, of a plain class or of a Keras
model. The gradients of the embeddings are sparse, and a batch names most items more than once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, RATE, STEPS, Program

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


# ---- The same as a plain loop -----------------------------------------------------------------


def sgd(lr: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(lr)


def adagrad(lr: Any) -> keras.Optimizer:
    return keras.optimizers.Adagrad(lr)


def hooks(
    create_model: Callable[[], Any] = Module, create_opt: Callable[[Any], keras.Optimizer] = sgd
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


def find_weights(model: Any) -> list[Any]:
    return [weight for layer in model.parts.values() for weight in layer.weights]


@functools.cache
def train_plainly(create_opt: Callable[[Any], keras.Optimizer], lr: float) -> Any:
    model, optimizer = Plain(), create_opt(lr)
    model(input_pre(next(iter(create_dataset(BATCH)))))
    for batch in create_dataset(BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch) - batch["rating"]) ** 2)
        gradients = tape.gradient(loss, find_weights(model))
        assert sum(isinstance(gradient, tf.IndexedSlices) for gradient in gradients) == 3
        # Keras 3 lets Adagrad square what each example gives to a row; Keras 2 added it up before,
        # as a gradient does, and so does the engine.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, find_weights(model), strict=True))
    return model


def evaluate_plainly() -> dict[str, float]:
    error = train_plainly(sgd, RATE)({"user": USERS, "item": ITEMS}).numpy() - RATINGS
    return {"rmse": float(np.sqrt((error**2).mean()))}


PROGRAM = Program(
    hooks,
    lambda: find_weights(train_plainly(sgd, RATE)),
    weights=lambda state: find_weights(state.train_model),
    metrics=evaluate_plainly,
    compiles=False,  # XLA has no strings
)
