"""Two optimizers for one loss, each with variables of its own, and the average of all weights.

A metric that keeps a histogram of the answers sees the average; another follows the training.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.compare import RATE, Program, whole_batches

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(44, 5)).astype("float32")
LABELS = (INPUTS[:, :1] + RANDOM.normal(size=(44, 1)) > 0).astype("float32")
DECAY = 0.8
create_dataset = small.slices((INPUTS, LABELS))


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(1, "sigmoid")]
    return keras.Sequential([keras.Input((5,)), *layers])


def crossentropy(loss_input: Any) -> Any:
    output, label = loss_input
    return keras.losses.binary_crossentropy(label, output)


def create_opt(lr: Any, train_model: Any) -> Any:
    body, head = train_model.layers
    return [
        (keras.optimizers.SGD(0.5 * lr, momentum=0.9), body.trainable_variables),
        (keras.optimizers.Adam(lr, epsilon=0.01), head.trainable_variables),
    ]


def create_metrics() -> dict[str, keras.Metric]:
    return {"auc": keras.metrics.AUC(num_thresholds=20)}


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_eval_dataset=create_dataset,
    create_model=create_model,
    create_loss=lambda: crossentropy,
    create_opt=create_opt,
    create_metrics=create_metrics,
    metric_pre=lambda output, batch: (batch[1], output),
    create_train_metrics=create_metrics,
    train_metric_pre=lambda output, batch: (batch[1], output),
)


@functools.cache
def train_plainly() -> tuple[keras.Model, keras.Model]:
    """Returns the model and its average."""
    model, average = create_model(), create_model()
    groups = create_opt(RATE, model)
    for inputs, label in whole_batches(create_dataset):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(crossentropy((model(inputs), label)))
        found = [tape.gradient(loss, variables) for _, variables in groups]
        for (optimizer, variables), gradients in zip(groups, found, strict=True):
            optimizer.apply(gradients, variables)
        for mean, weight in zip(average.weights, model.weights, strict=True):
            mean.assign(DECAY * mean + (1.0 - DECAY) * weight)
    return model, average


def evaluate_plainly() -> dict[str, float]:
    output = train_plainly()[1](INPUTS)
    auc = create_metrics()["auc"](LABELS, output)
    return {"loss": float(tf.reduce_mean(crossentropy((output, LABELS)))), "auc": float(auc)}


PROGRAM = Program(
    hooks,
    lambda: train_plainly()[0],
    metrics=evaluate_plainly,
    settings={"ema": DECAY, "log_every": 5},
)
