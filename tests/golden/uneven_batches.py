"""Functions that train on batches of any size, with the engine and in a plain loop."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import compare, engine, small
from tests.golden.reference import RATE, Reference

SEED = 3
FEATURES = small.FEATURES


def data(examples: int) -> list[np.ndarray]:
    return [np.tile(array, (2, 1))[:examples] for array in small.data()]


def split(examples: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(tuple(data(examples)))


def shuffled(examples: int) -> tf.data.Dataset:
    return split(examples).shuffle(30, seed=5)


def batches_of(dataset: tf.data.Dataset, size: int, last_batch: str = "keep") -> Iterator[Any]:
    """Returns an endless iterator over global batches, as one device reads them."""
    keras.utils.set_random_seed(SEED)
    return iter(dataset.batch(size, drop_remainder=last_batch == "drop").repeat())


def train_plainly(hooks: Any, steps: int, batches: Iterable[Any], **how: Any) -> Reference:
    """Trains with the same hooks on one device, without the engine."""
    taken = (batch for _, batch in zip(range(steps), batches, strict=False))
    return Reference(hooks).train(taken, **how)


def train_on(train: engine.Train, hooks: Any, devices: int, batch: int, **more: Any) -> Any:
    settings = {"learning_rate": RATE, "seed": SEED, "log_every": 1000, **more}
    return train(hooks, batch_size=batch, virtual_devices=devices, **settings)


def assert_trained(state: Any, plain: Reference) -> None:
    compare.assert_close(state.train_model.weights, plain.parts.train_model.weights)
