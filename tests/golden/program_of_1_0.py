"""The callbacks.py of the runs in ``runs_of_1.0`` and ``runs_of_2.0``.

Engine 1.0.0 trained the runs in ``runs_of_1.0``.
They were made in an empty folder that contained this file as callbacks.py. PYTHONPATH named the
engine of commit 63fdcdc, and this repository for ``tests.golden.small``::

    train() { python -m ctl_core train --steps 8 --ckpt-every 8 --eval-every 0 --batch-size 16 \\
        --learning-rate 0.05 --last-batch keep --run-name "$@"; }
    train rows
    train widths --hparams.widths true
    train devices --virtual-devices 2 --hparams.normalize true

The files config.yaml and train.log and the folder ckpt/ of each run were kept. Step 8 is in the
middle of a shuffle, in the second pass over the data. A resumed run therefore needs the position in
the data, the state of the shuffle and the state of Dropout. In ``devices``, each replica had moving
statistics of its own.

Engine 2.0.0 (commit 01a89d8e) trained the run in ``runs_of_2.0`` in the same way::

    train both --virtual-devices 2 --accumulate-steps 2 --hparams.normalize true --hparams.rate 0.3
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tests.golden import small
from tests.golden.small import create_loss, update_pre  # noqa: F401

every_steps: dict[int, Any] = {}


def create_dataset(hparams: Any, per_replica_batch_size: int) -> tf.data.Dataset:
    """Returns shuffled examples.

    By default, the engine joins their batches into global batches. With the hyperparameter
    ``widths``, the rows differ in width, and the batches are already global.
    """
    examples = tf.data.Dataset.from_tensor_slices(small.data())
    if not hparams.get("widths"):
        return examples.shuffle(20, seed=3).batch(7)
    widened = examples.enumerate().map(
        lambda index, example: (tf.repeat(example[0], index % 3 + 1), example[1])
    )
    return widened.shuffle(20, seed=3).padded_batch(per_replica_batch_size)


def create_model(hparams: Any) -> Callable[[Any], Any]:
    """Returns a model with Dropout. With ``widths``, its input repeats the mean of a row.

    With ``normalize``, it has batch normalization, and no Dropout unless there is a ``rate``.
    """
    if hparams.get("normalize"):
        layers: list[keras.layers.Layer] = [keras.layers.BatchNormalization(momentum=0.8)]
        if "rate" in hparams:
            layers.append(keras.layers.Dropout(hparams["rate"]))
        return small.model_with(*layers)
    model = small.model_with(keras.layers.Dropout(0.3, seed=5))
    if not hparams.get("widths"):
        return model
    return lambda inputs: model(
        tf.tile(tf.reduce_mean(inputs, axis=1, keepdims=True), [1, small.FEATURES])
    )


def create_opt(lr: Any) -> keras.optimizers.Optimizer:
    """Returns SGD with momentum, because the slots must be restored, too."""
    return keras.optimizers.SGD(lr, momentum=0.5)


def halve(lr: Any) -> None:
    """Changes the learning rate. A resumed run must not do this again."""
    lr.assign(0.5 * lr)


at_step = {2: halve}
