"""Two optimizers for one loss, each with its own variables, and averaged weights.

The metric AUC, which keeps a histogram of the outputs, is computed twice: with the averaged weights
in an evaluation, and as a training metric.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program, Trained, whole_batches
from tests.golden.reference import RATE

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


def train_plainly() -> Trained:
    """Trains without the engine, and evaluates the averaged weights."""
    model = create_model()
    average = create_model()
    groups = create_opt(RATE, model)
    for inputs, label in whole_batches(create_dataset):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(crossentropy((model(inputs), label)))
        gradients_of_groups = [tape.gradient(loss, variables) for _, variables in groups]
        for (optimizer, variables), gradients in zip(groups, gradients_of_groups, strict=True):
            optimizer.apply(gradients, variables)
        for mean, weight in zip(average.weights, model.weights, strict=True):
            mean.assign(DECAY * mean + (1.0 - DECAY) * weight)
    output = average(INPUTS)
    auc = create_metrics()["auc"](LABELS, output)
    loss = tf.reduce_mean(crossentropy((output, LABELS)))
    return model.weights, {"loss": float(loss), "auc": float(auc)}


PROGRAM = Program(hooks, train_plainly, settings={"ema": DECAY, "log_every": 5})
