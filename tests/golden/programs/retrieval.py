"""The other task of recommenders: to find a user's item among those of the whole batch.

It needs the items of all devices, which ``all_gather`` gives.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

import ctl_core
from tests.golden.compare import BATCH, RATE, STEPS, Program
from tests.golden.programs.recommender import create_dataset, create_layers, input_pre, sgd

# ---- callbacks.py -----------------------------------------------------------------------------


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


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=TwoTowers,
        create_loss=lambda: retrieval_loss,
        create_opt=sgd,
        input_pre=input_pre,
        loss_pre=with_all_items,
        every_steps={},
    )


@functools.cache
def train_plainly() -> keras.Model:
    model, optimizer = TwoTowers(), keras.optimizers.SGD(RATE)
    batches = create_dataset(BATCH).repeat().take(STEPS)
    model(next(iter(batches)))
    for batch in batches:
        with tf.GradientTape() as tape:
            users, items = model(batch)
            loss = tf.reduce_mean(retrieval_loss((users, items, tf.range(BATCH))))
        gradients = tape.gradient(loss, model.weights)
        optimizer.apply_gradients(zip(gradients, model.weights, strict=True))
    return model


# A micro-batch has fewer items among which to find one; XLA has no strings.
PROGRAM = Program(hooks, lambda: train_plainly().weights, accumulates=False, compiles=False)
