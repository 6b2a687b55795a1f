"""A recommender with vocabularies, as users write it with TensorFlow Recommenders.

Users and items are given by name. For each, there are a StringLookup and an Embedding, and the dot
product of the embeddings predicts the rating. The layers are kept in a dict of a ``tf.Module``, a
plain class or a Keras model. The gradients of the embeddings are sparse, and most items occur more
than once in a batch.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program

RANDOM = np.random.default_rng(0)
USERS = np.array([f"user {number}" for number in RANDOM.integers(0, 12, size=40)])
ITEMS = np.array([f"item {number}" for number in RANDOM.integers(0, 5, size=40)])
RATINGS = RANDOM.integers(1, 6, size=(40, 1)).astype("float32")
SIZE = 4
create_dataset = small.slices({"user": USERS, "item": ITEMS, "rating": RATINGS})


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


def rate(model: Any, inputs: dict[str, Any]) -> Any:
    """Predicts ratings. The models below use this function as their method."""
    user = model.parts["user_id"](inputs["user"])
    item = model.parts["item_id"](inputs["item"])
    product = model.parts["user"](user) * model.parts["item"](item)
    return model.parts["rating"](product) + model.parts["item_bias"](item)


class Plain:
    def __init__(self) -> None:
        self.parts = create_layers()

    __call__ = rate


class Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = create_layers()

    __call__ = rate


class Model(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.parts = create_layers()

    call = rate


def adagrad(lr: Any) -> keras.Optimizer:
    return keras.optimizers.Adagrad(lr)


def hooks(
    create_model: Callable[[], Any] = Module,
    create_opt: Callable[[Any], keras.Optimizer] = small.create_opt,
) -> SimpleNamespace:
    return small.hooks(
        create_dataset=create_dataset,
        create_eval_dataset=create_dataset,
        create_model=create_model,
        create_opt=create_opt,
        input_pre=lambda batch: {"user": batch["user"], "item": batch["item"]},
        loss_pre=lambda output, batch: (output, batch["rating"]),
        create_metrics=lambda: {"rmse": keras.metrics.RootMeanSquaredError()},
        metric_pre=lambda output, batch: (batch["rating"], output),
    )


def find_weights(model: Any) -> list[Any]:
    return [weight for layer in model.parts.values() for weight in layer.weights]


PROGRAM = Program(
    hooks,
    weights=lambda state: find_weights(state.train_model),
    compiles=False,  # XLA does not support strings
)
