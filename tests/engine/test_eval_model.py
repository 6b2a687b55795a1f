"""``create_eval_model``: what is evaluated, predicted and exported in place of train_model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.__main__ import main
from tests.helpers.cases import (
    make_hooks,
    regression_data,
    sgd,
    small_model,
)
from tests.helpers.fixtures import Train
from tests.helpers.project import EVALUATED


def test_shared_weights_and_elements_that_only_the_evaluation_has(train: Train) -> None:
    """A network of pairs, of which single examples are evaluated; built lazily."""

    class Pairs(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = keras.layers.Dense(3, kernel_initializer="ones")

        def call(self, pair: Any) -> Any:
            return tf.reduce_sum((self.encoder(pair[0]) - self.encoder(pair[1])) ** 2, 1)

    inputs, target = regression_data()

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(((inputs, inputs[::-1].copy()), target[:, 0]))
        return data.batch(per_replica_batch_size, drop_remainder=True)

    def create_eval_model(train_model: Any) -> Any:
        assert train_model.encoder.built
        return lambda one: tf.reduce_sum(train_model.encoder(one), 1)

    own = make_hooks(
        create_dataset=create_dataset,
        create_eval_dataset=lambda: tf.data.Dataset.from_tensor_slices(
            {"x": inputs[:50], "y": target[:50, 0]}
        ).batch(7),
        create_model=Pairs,
        create_eval_model=create_eval_model,
        create_loss=lambda: lambda pair: (pair[0] - pair[1]) ** 2,
        input_pre=lambda batch, training: batch[0] if training else batch["x"],
        loss_pre=lambda output, batch, training: (output, batch[1] if training else batch["y"]),
        grad_pre=lambda loss, train_model: (loss, 0.0, train_model.trainable_variables),
        eval_pre=lambda loss: (loss, 0.0),
        create_opt=sgd,
    )
    state = train(own, steps=5, learning_rate=1e-4, virtual_devices=2)
    kernel, bias = state.train_model.get_weights()
    by_hand = (((inputs[:50] @ kernel + bias).sum(1) - target[:50, 0]) ** 2).mean()
    assert state.metrics["loss"] == pytest.approx(by_hand, rel=1e-5)


AVERAGED = """

def create_eval_model(train_model):
    copy = keras.models.clone_model(train_model)
    copy.set_weights(train_model.get_weights())
    return copy


def update_post(train_model, eval_model):
    for average, weight in zip(eval_model.variables, train_model.variables):
        average.assign(0.9 * average + 0.1 * weight)
"""


def test_predict_and_export_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "callbacks.py").write_text(EVALUATED + AVERAGED)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--run-name", "a", "--steps", "6", "--batch-size", "16"]) == 0
    for command in (["evaluate"], ["predict"], ["export"]):
        assert main(command) == 0
    inputs = regression_data()[0]
    with np.load("runs/a/predictions.npz") as file:
        predicted = file["output"]
    exported = tf.saved_model.load("runs/a/export/1")
    np.testing.assert_allclose(exported.serve(inputs[:37]), predicted, rtol=1e-5, atol=1e-6)
    model = small_model()
    tf.train.Checkpoint(train_model=model).read("runs/a/ckpt/ckpt-6").expect_partial()
    plain = model(inputs[:37]).numpy()
    assert abs(predicted - plain).max() > 1e-3
