"""The callbacks.py of the runs in ``runs_of_1.0``, which engine 1.0.0 began.

They were made in an empty folder that held this file as callbacks.py, with the engine of commit
63fdcdc and this repository, which has ``tests.golden.small``, in PYTHONPATH::

    train() { python -m ctl_core train --steps 8 --ckpt-every 8 --eval-every 0 --batch-size 16 \\
        --learning-rate 0.05 --last-batch keep --run-name "$@"; }
    train rows --virtual-devices 2
    train widths --hparams.widths true

Of each run config.yaml, train.log and ckpt/ were kept. Step 8 is in the second pass over the data,
amid a shuffle, so that a resumed run needs the position, the state of the shuffle and that of
Dropout.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tests.golden import small
from tests.golden.small import create_loss, update_pre  # noqa: F401

every_steps: dict[int, Any] = {}


def create_dataset(hparams: Any, per_replica_batch_size: int) -> tf.data.Dataset:
    """Returns shuffled examples, in batches that are joined or, of ``widths``, global batches."""
    examples = tf.data.Dataset.from_tensor_slices(small.data())
    if not hparams.get("widths"):
        return examples.shuffle(20, seed=3).batch(7)
    widened = examples.enumerate().map(
        lambda index, example: (tf.repeat(example[0], index % 3 + 1), example[1])
    )
    return widened.shuffle(20, seed=3).padded_batch(per_replica_batch_size)


def create_model(hparams: Any) -> Callable[[Any], Any]:
    """Returns a model with Dropout; of ``widths`` it sees the mean of a row five times."""
    model = small.model_with(keras.layers.Dropout(0.3, seed=5))
    if not hparams.get("widths"):
        return model
    return lambda inputs: model(
        tf.tile(tf.reduce_mean(inputs, axis=1, keepdims=True), [1, small.FEATURES])
    )


def create_opt(lr: Any) -> keras.optimizers.Optimizer:
    """Returns SGD with slots."""
    return keras.optimizers.SGD(lr, momentum=0.5)


def halve(lr: Any) -> None:
    """Changes the learning rate, which a resumed run must not do again."""
    lr.assign(0.5 * lr)


at_step = {2: halve}
