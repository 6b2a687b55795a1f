"""The program of ``make prove`` trained by Keras ``fit``, and by the loop of TensorFlow's guides.

``python -m scripts.proof.peers fit 2 epoch`` makes one attempt on two devices. It resumes from the
checkpoints that it finds in the current folder.

Both peers follow the documentation of Keras and TensorFlow, with the model, data and seeds of
callbacks.py. On one device, they train the same weights as ctl_core, bit for bit. In other cases,
their weights differ, for these reasons:

- Keras clips the gradients of each replica before they are summed. Without clipping, the weights of
  the loop on two devices differ by 3e-6.
- On several devices, ``fit`` reads the data once to build the model, so that the next shuffle has
  another order. It cannot build the model if the devices do not divide the batch evenly.
- After a kill, ``fit`` reads the data from the start. If it was saved within an epoch, it also
  starts this epoch again. ``double_checkpoint`` is set, because a kill may damage the file that is
  being written.
- A loop on several devices cannot save its iterator, so it reads the data from the start, too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scripts.proof import callbacks as program
from scripts.proof.callbacks import BATCH, BATCHES, EXAMPLES, SAVE_EVERY, write_ids


class Counts(keras.metrics.Metric):
    """Counts how often each example was used since the beginning of the epoch."""

    def __init__(self) -> None:
        super().__init__(name="counts")
        self.counts = self.add_variable((EXAMPLES,), initializer="zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ids = tf.cast(y_true[:, 1], tf.int64)
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(ids, EXAMPLES), axis=0))

    def result(self) -> Any:
        return tf.reduce_sum(self.counts)


class WriteIds(keras.callbacks.Callback):
    """Writes the ids of the examples of each batch."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._before = np.zeros(EXAMPLES)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = self._counts.counts.numpy()
        step = int(self.model.optimizer.iterations.numpy())
        write_ids(step, self._epoch, [np.flatnonzero(now != self._before)])
        self._before = now


def fit(strategy: tf.distribute.Strategy, save: str, micro_batches: int) -> None:
    """Trains with ``fit``; ``BackupAndRestore`` saves after each epoch or every few steps."""
    counts = Counts()
    with strategy.scope():
        model = program.create_model()
        optimizer = keras.optimizers.Adam(
            program.RATE,
            global_clipnorm=program.CLIP,
            gradient_accumulation_steps=micro_batches if micro_batches > 1 else None,
        )
        model.compile(optimizer, loss=program.crossentropy, metrics=[counts])
    backup = keras.callbacks.BackupAndRestore(
        "backup", save_freq="epoch" if save == "epoch" else SAVE_EVERY, double_checkpoint=True
    )
    model.fit(
        program.create_dataset(BATCH // micro_batches),
        epochs=program.EPOCHS,
        steps_per_epoch=BATCHES * micro_batches,
        callbacks=[WriteIds(counts), backup],
        verbose=0,
    )
    program.write_weights(model)


def loop(strategy: tf.distribute.Strategy, save: str, micro_batches: int) -> None:
    """Trains with a loop; a ``CheckpointManager`` saves, with or without the iterator."""
    with strategy.scope():
        model = program.create_model()
        optimizer = keras.optimizers.Adam(program.RATE, global_clipnorm=program.CLIP)
        optimizer.build(model.trainable_variables)
    iterator = iter(strategy.experimental_distribute_dataset(program.create_dataset(BATCH)))
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(step=step, optimizer=optimizer, model=model)
    if save == "iterator":
        checkpoint = tf.train.Checkpoint(
            step=step, optimizer=optimizer, model=model, iterator=iterator
        )
    manager = tf.train.CheckpointManager(checkpoint, "ckpt", max_to_keep=3)
    checkpoint.restore(manager.latest_checkpoint)

    def on_replica(images: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            losses = program.crossentropy(targets, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def train_step(batch: Any) -> None:
        strategy.run(on_replica, batch)

    while int(step) < program.STEPS:
        batch = next(iterator)
        train_step(batch)
        targets = strategy.experimental_local_results(batch[1])
        epoch = int(step) // BATCHES
        step.assign_add(1)
        write_ids(int(step), epoch, [each[:, 1] for each in targets])
        if int(step) % SAVE_EVERY == 0 and save != "nothing":
            manager.save()
    program.write_weights(model)


def main(who: str, devices: int, save: str, micro_batches: int = 1) -> None:
    """Splits the CPU into devices, creates the strategy, and trains.

    Args:
        who: ``fit`` or ``loop``
        devices: the number of devices
        save: when ``fit`` saves, or the objects that the loop saves
        micro_batches: the number of micro-batches of ``fit``
    """
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * devices,
    )
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(program.SEED)
    strategy: tf.distribute.Strategy
    if "TF_CONFIG" in os.environ:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    elif devices > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(devices)])
    else:
        strategy = tf.distribute.get_strategy()
    {"fit": fit, "loop": loop}[who](strategy, save, micro_batches)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
