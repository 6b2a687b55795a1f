"""Trains programs with logical replicas in one process of a cluster, one after the other.

``python -m tests.golden.logical_cluster RUNS START NEXT DEVICES KILLED STEPS NAME...`` trains each
program as RUNS/START-NAME for STEPS steps, on DEVICES devices per process. At step KILLED, it
copies the folder to RUNS/NEXT-NAME, as a kill would leave it.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden import engine, small
from tests.golden.logical_features import FEATURES, create_row_counter, make_feature

LOGICAL_REPLICAS = 5
layers = keras.layers


class NoiseAndCount(keras.Layer):
    """Adds noise from a TensorFlow generator, and counts its calls and the rows of all replicas."""

    def build(self, shape: Any) -> None:
        self.generator = tf.random.Generator.from_seed(5)
        self.calls = tf.Variable(0, trainable=False)
        self.rows = create_row_counter()

    def call(self, values: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return values
        self.calls.assign_add(1)
        self.rows.assign_add(tf.shape(values, tf.int64)[0])
        return values + 0.1 * self.generator.normal(tf.shape(values))


def create_cnn() -> keras.Model:
    """Returns a CNN that ends in attention over the pixels of the last feature map."""
    inputs = keras.Input((8, 8, 3))
    values = layers.BatchNormalization(momentum=0.9)(layers.Conv2D(8, 3)(inputs))
    values = layers.MaxPooling2D()(layers.Activation("relu")(values))
    values = layers.Reshape((9, 8))(layers.Dropout(0.3)(values))
    values += layers.MultiHeadAttention(2, 4, dropout=0.2)(values, values)
    values = layers.GaussianNoise(0.1)(layers.LayerNormalization()(values))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(values)))


def make_cnn() -> SimpleNamespace:
    """Returns the hooks of a CNN with Adam, and with clipping that reduces the gradients."""
    random = np.random.default_rng(0)
    arrays = random.normal(size=(100, 8, 8, 3)).astype("float32"), random.integers(0, 10, 100)

    def update_pre(gradients: Any) -> Any:
        return tf.clip_by_global_norm(gradients, 0.1)[0], gradients

    return small.hooks(
        create_dataset=small.slices(arrays),
        create_model=create_cnn,
        create_loss=lambda: small.crossentropy,
        create_opt=keras.optimizers.Adam,
        update_pre=update_pre,
        # The last batch has 3 rows, fewer than there are logical replicas.
        create_eval_dataset=small.slices(tuple(array[:35] for array in arrays)),
        create_metrics=lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )


def add_to_digest(state: dict[str, Any], step: int, output: Any, batch: Any) -> None:
    """Updates a checksum of all outputs and batches so far, which the checkpoint contains."""
    digest = hashlib.sha256(state.get("digest", "").encode())
    for tensor in tf.nest.flatten((output, batch), expand_composites=True):
        digest.update(f"{step} {tensor.shape}".encode() + tf.io.serialize_tensor(tensor).numpy())
    state["digest"] = digest.hexdigest()


def make_observed() -> SimpleNamespace:
    """Returns hooks in which a host hook receives strings and ragged tensors.

    The model updates a random generator and counters. Its gradients fill several buckets. In odd
    steps, no host hook is due.
    """
    arrays = small.data()
    texts = np.array([f"text {number}" * (number % 5) for number in range(small.EXAMPLES)])

    def create_model() -> keras.Model:
        inputs = keras.Input((small.FEATURES,))
        hidden = layers.BatchNormalization(momentum=0.9)(layers.Dense(1100)(inputs))
        hidden = layers.Dense(1100)(layers.Dropout(0.3)(NoiseAndCount()(hidden)))
        return keras.Model(inputs, [layers.Dense(1)(hidden), hidden])

    class WithRagged(keras.layers.Layer):
        """Adds a ragged output to the model's output, with one number per character of a string."""

        def __init__(self) -> None:
            super().__init__()
            self.model = create_model()

        def call(self, batch: Any, training: bool = False) -> Any:
            output, hidden = self.model(batch[0][0], training=training)
            lengths = tf.strings.length(batch[0][1])
            return output, tf.RaggedTensor.from_tensor(hidden, lengths=lengths), lengths > 10

    hooks = small.hooks(
        create_dataset=small.slices(((arrays[0], texts), arrays[1])),
        create_model=WithRagged,
        create_opt=keras.optimizers.Adam,
        every_steps={2: add_to_digest},
    )
    hooks.input_pre = lambda batch: batch
    hooks.loss_pre = lambda output, batch: (output[0], batch[1])
    return hooks


def make_elements() -> SimpleNamespace:
    """Returns hooks whose datasets have one element per logical replica.

    An element contains two sets of points. The model has noise and batch statistics.
    """

    def create_dataset() -> tf.data.Dataset:
        inputs, target = small.data()

        def take(start: tf.Tensor) -> Any:
            sizes = tf.cast(tf.stack([2 + start % 3, 1 + start % 2]), tf.int32)
            points = tf.constant(inputs)[start : start + tf.cast(tf.reduce_sum(sizes), tf.int64)]
            return {"points": points, "sizes": sizes, "targets": target[:2]}

        return tf.data.Dataset.range(90).map(take)

    def add_up(batch: Any) -> tf.Tensor:
        return tf.reduce_sum(tf.RaggedTensor.from_row_lengths(batch["points"], batch["sizes"]), 1)

    return small.hooks(
        create_model=lambda: small.model_with(
            layers.BatchNormalization(momentum=0.9), layers.Dropout(0.3)
        ),
        create_dataset=create_dataset,
        # The last batch has 3 elements, fewer than there are logical replicas.
        create_eval_dataset=lambda: create_dataset().take(LOGICAL_REPLICAS + 3),
        create_metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        metric_pre=lambda output, batch: (batch["targets"], output),
        count_examples=lambda batch: tf.shape(batch["targets"])[0],
        input_pre=add_up,
        loss_pre=lambda output, batch: (output, batch["targets"]),
        every_steps={2: add_to_digest},
    )


class Program(NamedTuple):
    """A program.

    Attributes:
        make_hooks: returns the program's hooks
        settings: the settings that the program requires
    """

    make_hooks: Callable[[], SimpleNamespace]
    settings: Mapping[str, Any] = MappingProxyType({})


PROGRAMS = {
    "cnn": Program(make_cnn),
    "observed": Program(make_observed),
    "elements": Program(make_elements, {"batch_size": 2 * LOGICAL_REPLICAS}),
    # The program "all" combines turns, an embedding, batch_weight, float16, kept last batches,
    # averaged weights, training metrics and a reader.
    **{
        name: Program(partial(make_feature, name), FEATURES[name][1])
        for name in ("compiled", "all")
    },
}


def train_program(
    runs: Path, start: str, name: str, at_step: dict[int, Any] | None = None, **settings: Any
) -> ctl_core.State:
    """Trains a program as RUNS/START-NAME."""
    program = PROGRAMS[name]
    hooks = program.make_hooks()
    hooks.at_step = at_step or {}
    settings = {"ckpt_every": 2, "eval_every": 2, "seed": 7, **program.settings, **settings}
    return engine.train(
        hooks, runs, run_name=f"{start}-{name}", logical_replicas=LOGICAL_REPLICAS, **settings
    )


def leave_for(runs: Path, start: str, next_start: str, name: str) -> Callable[[bool], None]:
    """Returns a hook in which the chief copies the run's folder for the next start.

    The copy has the state that a kill would leave.
    """

    def kill(chief: bool) -> None:
        if chief:
            engine.leave_as_killed(runs / f"{start}-{name}", runs / f"{next_start}-{name}")

    return kill


def main(folder: Path, start: str, next_start: str, *words: str) -> None:
    """Trains programs. ``words`` are DEVICES, KILLED, STEPS and the names of programs.

    If a process has several devices, they divide the state of the optimizer.
    """
    devices, killed, steps = map(int, words[:3])
    settings = {"virtual_devices": devices, "shard_optimizer": devices > 1}
    for name in words[3:]:
        at_step = {killed: leave_for(folder, start, next_start, name)}
        train_program(folder, start, name, at_step, steps=steps, **settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
