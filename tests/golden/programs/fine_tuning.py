"""Fine-tuning of a base that is frozen at first, after Keras' guide to transfer learning.

The base has batch normalization and is called with ``training=False``. It therefore keeps its
statistics even while it is trained. (``call`` passes this argument, because a functional model of
Keras 3 forgets the ``training`` that it was built with once it is called with another value.)

First, a new head is trained on the base. Then the base is unfrozen, the learning rate is lowered,
and the optimizer is reset, as if the model had been compiled again. Only tests of resumed runs use
the guide's Dropout, because its random numbers differ on each device and could not be compared with
a plain loop.
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
    """Returns a network that represents a pretrained base."""
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
    """A new head on a base that is frozen at first."""

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
    """Trains without the engine, with a new optimizer after the base is unfrozen."""
    trained = Reference(hooks(create_opt), rate)
    batches = [*whole_batches(create_dataset)]
    model = trained.train(batches[:UNFREEZE]).parts.train_model
    model.base.trainable = True
    trained.parts.optimizer = create_opt(rate * LOWERED)
    trained.train(batches[UNFREEZE:])
    return model.weights, {}


PROGRAM = Program(hooks, train_plainly, frozen="moving")
