"""Domain adaptation with reversed gradients, after Ganin et al. 2016 (DANN).

A batch of training has labeled examples of one domain and unlabeled ones of another, a batch of an
evaluation only labeled ones. A host hook increases the factor of the reversed gradient. See
https://github.com/keras-team/keras/issues/3119.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program, Trained, whole_batches
from tests.golden.reference import RATE

FEATURES = 5
PERIOD = 3
RANDOM = np.random.default_rng(0)
SOURCE = RANDOM.normal(size=(40, FEATURES)).astype("float32")
TARGET = (RANDOM.normal(size=(40, FEATURES)) + 1.0).astype("float32")
LABELS = (SOURCE[:, 0] > 0).astype("int64")
create_dataset = small.slices({"source": SOURCE, "label": LABELS, "target": TARGET})
create_eval_dataset = small.slices((SOURCE[:21], LABELS[:21]))


@tf.custom_gradient
def reverse_gradient(inputs: Any, factor: Any) -> Any:
    return tf.identity(inputs), lambda upstream: (-factor * upstream, None)


class Adapter(keras.Model):
    """Classifies examples; in training, also tells the two domains apart."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.features = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(6, "tanh")])
        self.label = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        self.domain = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        )
        self.factor = tf.Variable(0.0, trainable=False, name="factor")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return self.label(self.features(inputs))
        features = self.features(tf.concat(inputs, axis=0))
        source, _ = tf.split(features, 2)
        return self.label(source), self.domain(reverse_gradient(features, self.factor))


def input_pre(batch: Any, training: bool) -> Any:
    return (batch["source"], batch["target"]) if training else batch[0]


def loss_pre(output: Any, batch: Any, training: bool) -> Any:
    return output, batch["label"] if training else batch[1]


def loss_of_each(loss_input: Any) -> Any:
    output, label = loss_input
    if not isinstance(output, tuple):
        return small.crossentropy((output, label))
    scores, domain = output
    of_source, of_target = tf.split(domain[:, 0], 2)
    wrong_domain = tf.nn.softplus(-of_source) + tf.nn.softplus(of_target)
    return small.crossentropy((scores, label)) + 0.5 * wrong_domain


def find_factor(step: int) -> float:
    return float(2.0 / (1.0 + np.exp(-0.6 * step)) - 1.0)


def increase_factor(step: int, train_model: Any) -> None:
    train_model.factor.assign(find_factor(step))


def list_weights(model: Adapter) -> list[Any]:
    return [*model.weights, model.factor]


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_eval_dataset=create_eval_dataset,
    create_model=Adapter,
    create_loss=lambda: loss_of_each,
    input_pre=input_pre,
    loss_pre=loss_pre,
    every_steps={PERIOD: increase_factor},
)


def train_plainly() -> Trained:
    """Trains with three separate gradients, of which one is subtracted."""
    model = Adapter()
    features, label, domain = model.features, model.label, model.domain
    for step, batch in enumerate(whole_batches(create_dataset), 1):
        with tf.GradientTape(persistent=True) as tape:
            source, target = features(batch["source"]), features(batch["target"])
            wrong_label = tf.reduce_mean(small.crossentropy((label(source), batch["label"])))
            wrong_domain = 0.5 * tf.reduce_mean(
                tf.nn.softplus(-domain(source)) + tf.nn.softplus(domain(target))
            )
        gradients = [
            of_label - model.factor * of_domain
            for of_label, of_domain in zip(
                tape.gradient(wrong_label, features.weights),
                tape.gradient(wrong_domain, features.weights),
                strict=True,
            )
        ]
        gradients += tape.gradient(wrong_label, label.weights)
        gradients += tape.gradient(wrong_domain, domain.weights)
        variables = [*features.weights, *label.weights, *domain.weights]
        small.create_opt(RATE).apply(gradients, variables)
        if step % PERIOD == 0:
            model.factor.assign(find_factor(step))
    output = model(SOURCE[:21], training=False)
    return list_weights(model), {
        "loss": float(tf.reduce_mean(small.crossentropy((output, LABELS[:21]))))
    }


PROGRAM = Program(hooks, train_plainly, weights=lambda state: list_weights(state.train_model))
