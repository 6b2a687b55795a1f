"""Fine-tuning with a base that is frozen at first, after Keras' guide to transfer learning.

The base has batch normalisation and is called with ``training=False``, so that it looks at no
batch and keeps its statistics also when it is trained. (In ``call``: a functional model of Keras 3
forgets a ``training`` that it was made with once it is called with another.) A new head is trained
on it; then the base is unfrozen, the learning rate lowered, and the optimizer starts anew, as
compiling again makes it. The guide's Dropout, of which each device draws its own, is left out of
the comparison; resumed runs have it.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program, Trained, whole_batches
from tests.golden.reference import RATE, Reference

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(40, 4, 4, 1)).astype("float32")
LABELS = RANDOM.integers(0, 2, size=(40, 1)).astype("float32")
UNFREEZE = 9
LOWERED = 0.1
create_dataset = small.slices((IMAGES, LABELS))


def create_base() -> keras.Model:
    """Stands for a network that somebody has trained."""
    base = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("tanh"),
            keras.layers.Conv2D(4, 2, activation="tanh"),
        ]
    )
    random = np.random.default_rng(1)
    base.set_weights([random.uniform(0.1, 0.9, w.shape) for w in base.get_weights()])
    return base


class Classifier(keras.Model):
    """A new head on the base."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        keras.utils.set_random_seed(2)
        self.base = create_base()
        self.base.trainable = False
        self.pool = keras.layers.GlobalAveragePooling2D()
        self.dropout = keras.layers.Dropout(dropout, seed=3)
        self.head = keras.layers.Dense(1)

    def call(self, images: Any) -> Any:
        return self.head(self.dropout(self.pool(self.base(images, training=False))))


def crossentropy(loss_input: Any) -> Any:
    output, label = loss_input
    return keras.losses.binary_crossentropy(label, output, from_logits=True)


def unfreeze(train_model: Any, lr: Any) -> None:
    train_model.base.trainable = True
    lr.assign(lr * LOWERED)


def forget(optimizer: Any) -> None:
    for variable in optimizer.variables:
        variable.assign(tf.zeros_like(variable))


def sgd(lr: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(lr, momentum=0.9)


def adam(lr: Any) -> keras.Optimizer:
    return keras.optimizers.Adam(lr)


def hooks(
    create_opt: Callable[[Any], keras.Optimizer] = sgd, dropout: float = 0.0, at: int = UNFREEZE
) -> SimpleNamespace:
    return small.hooks(
        create_dataset=create_dataset,
        create_model=lambda: Classifier(dropout),
        create_loss=lambda: crossentropy,
        create_opt=create_opt,
        at_step={at: [unfreeze, forget]},
    )


def train_plainly(
    create_opt: Callable[[Any], keras.Optimizer] = sgd, rate: float = RATE
) -> Trained:
    """Has a new optimizer after the base is unfrozen."""
    trained = Reference(hooks(create_opt), rate)
    batches = [*whole_batches(create_dataset)]
    model = trained.train(batches[:UNFREEZE]).parts.train_model
    model.base.trainable = True
    trained.parts.optimizer = create_opt(rate * LOWERED)
    trained.train(batches[UNFREEZE:])
    return model.weights, {}


PROGRAM = Program(hooks, train_plainly, frozen="moving")
