"""The workloads of the benchmark: data, model and optimizer, which are the same for every peer.

The data are random numbers from fixed seeds, and are read in a fixed order. Initial weights depend
only on their shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

LEARNING_RATE = 1e-3
SEQUENCE = 20
WORDS = 5000


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training that is timed.

    Attributes:
        name: the name of the workload
        batch_size: the global batch size
        segment: the number of steps that are timed together; a multiple of 50
        dataset: returns one pass over the data, for a batch size
        create_model: creates a model whose outputs are logits, always with the same weights
        create_opt: creates the optimizer, for a learning rate
        clip: the global norm to which gradients are clipped; None: they are not clipped. On several
            replicas, no peer clips, because Keras clips the gradients of each replica, not their
            sum.
        tolerance: the largest accepted difference between the weights of two peers after 50 steps,
            relative to a weight or to the largest weight of the model. It is much smaller than the
            difference that a wrong update would cause.
        compiled_segment: the minimum length of a segment for peers that compile many steps into
            one. Shorter segments would end before processor and input pipeline run at full speed.
        policy: the dtype policy of Keras
    """

    name: str
    batch_size: int
    segment: int
    dataset: Callable[[int], tf.data.Dataset]
    create_model: Callable[[], keras.Model]
    create_opt: Callable[[Any], keras.optimizers.Optimizer]
    clip: float | None = 1.0
    tolerance: float = 1e-5
    compiled_segment: int = 0
    policy: str = "float32"

    def segment_of(self, compiled: bool) -> int:
        """Returns the number of steps that are timed together."""
        return max(self.segment, self.compiled_segment) if compiled else self.segment

    def on_gpu(self, policy: str) -> Workload:
        """Returns the workload for a GPU, with the tolerance that TF32 or float16 requires."""
        name = f"{self.name}, {policy}".removesuffix(", float32")
        return dataclasses.replace(self, name=name, policy=policy, tolerance=1e-2)

    def on(self, replicas: int) -> Workload:
        """Returns the workload for several replicas, with shorter segments and without clipping."""
        if replicas == 1:
            return self
        return dataclasses.replace(self, clip=None, segment=max(50, self.segment // 100 * 50))

    def endless(self) -> tf.data.Dataset:
        """Returns the pipeline that the peers read, an endless stream of global batches."""
        return self.dataset(self.batch_size).repeat().prefetch(tf.data.AUTOTUNE)


def losses(labels: Any, logits: Any) -> Any:
    """Returns the cross-entropy of each example."""
    logits = tf.cast(logits, tf.float32)
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def nadam(rate: Any) -> keras.optimizers.Optimizer:
    """Creates the engine's default optimizer."""
    return keras.optimizers.Nadam(learning_rate=rate, epsilon=0.001)


def with_weights(*layers: Any) -> keras.Model:
    """Creates a model, and initializes its kernels as in He et al. (2015) from a fixed seed."""
    model = keras.Sequential(layers)
    random = np.random.default_rng(1)

    def weight(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) < 2:
            return np.zeros(shape)
        return random.normal(scale=np.sqrt(2 / np.prod(shape[:-1])), size=shape)

    model.set_weights([weight(w.shape) for w in model.get_weights()])
    return model


def sliced(inputs: np.ndarray, classes: int) -> Callable[[int], tf.data.Dataset]:
    """Returns a function that creates a dataset of ``inputs``, in order, with random labels."""
    labels = np.random.default_rng(2).integers(0, classes, len(inputs)).astype("int32")

    def dataset(batch_size: int) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices((inputs, labels))
        return examples.batch(batch_size, drop_remainder=True)

    return dataset


def normal(*shape: int) -> np.ndarray:
    """Returns random inputs, which are normally distributed."""
    return np.random.default_rng(3).normal(size=shape).astype("float32")


def mlp() -> Workload:
    """Creates a dense network that is so small that the cost of the loop dominates."""
    layer = keras.layers.Dense

    def create_model() -> keras.Model:
        return with_weights(keras.Input((16,)), layer(32, activation="relu"), layer(10))

    data = sliced(normal(3200, 16), 10)
    return Workload("mlp", 32, 500, data, create_model, nadam, compiled_segment=4000)


class LookUp(keras.layers.Layer):
    """Adds a number from a lookup table, which exists once for all devices."""

    def __init__(self) -> None:
        super().__init__()
        signs = tf.lookup.KeyValueTensorInitializer([0, 1], [-0.1, 0.1], tf.int64, tf.float32)
        self._table = tf.lookup.StaticHashTable(signs, 0.0)

    def call(self, inputs: Any) -> Any:
        return inputs + self._table.lookup(tf.cast(inputs > 0, tf.int64))


class Summarize(keras.layers.Layer):
    """Writes a summary of its inputs, and returns them."""

    def call(self, inputs: Any) -> Any:
        tf.summary.scalar("mean", tf.reduce_mean(inputs))
        return inputs


def mlp_with(name: str, layer: Callable[[], keras.layers.Layer]) -> Workload:
    """Creates the MLP with a layer that is called first."""
    dense = keras.layers.Dense

    def create_model() -> keras.Model:
        return with_weights(keras.Input((16,)), layer(), dense(32, activation="relu"), dense(10))

    return dataclasses.replace(mlp(), name=name, create_model=create_model)


def cnn() -> Workload:
    """Creates a CNN for images of 28x28, in batches so small that the cost of the loop matters."""
    layer = keras.layers

    def create_model() -> keras.Model:
        return with_weights(
            keras.Input((28, 28, 1)),
            layer.Conv2D(16, 3, activation="relu"),
            layer.MaxPooling2D(),
            layer.Conv2D(32, 3, activation="relu"),
            layer.MaxPooling2D(),
            layer.Flatten(),
            layer.Dense(10),
        )

    return Workload("cnn", 16, 100, sliced(normal(320, 28, 28, 1), 10), create_model, nadam)


def noisy() -> Workload:
    """Creates a CNN with batch normalization and Dropout, whose shares are normalized apart."""
    layer = keras.layers

    def create_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layer.Conv2D(16, 3, use_bias=False),
                layer.BatchNormalization(momentum=0.9),
                layer.ReLU(),
                layer.MaxPooling2D(),
                layer.Flatten(),
                layer.Dropout(0.3),
                layer.Dense(10),
            ]
        )

    return Workload("noisy", 16, 100, sliced(normal(320, 28, 28, 1), 10), create_model, nadam)


def embedding() -> Workload:
    """Creates a model with sparse gradients, and an optimizer that updates only their rows.

    No peer clips: Keras computes the norm before it adds up the rows of a word that occurs twice,
    so its result would differ.
    """
    layer = keras.layers
    words = np.random.default_rng(4).integers(0, WORDS, (3200, SEQUENCE)).astype("int32")

    def create_model() -> keras.Model:
        return with_weights(
            keras.Input((SEQUENCE,), dtype="int32"),
            layer.Embedding(WORDS, 32),
            layer.GlobalAveragePooling1D(),
            layer.Dense(2),
        )

    more: dict[str, Any] = {"clip": None, "compiled_segment": 4000}
    return Workload(
        "embedding", 32, 500, sliced(words, 2), create_model, keras.optimizers.SGD, **more
    )


def lstm() -> Workload:
    """Creates an LSTM: many small operations that depend on one another."""

    def create_model() -> keras.Model:
        return with_weights(keras.Input((20, 8)), keras.layers.LSTM(16), keras.layers.Dense(10))

    return Workload("lstm", 16, 200, sliced(normal(1600, 20, 8), 10), create_model, nadam)


def transformer(blocks: int = 2) -> Workload:
    """Creates a Transformer of some blocks, with width 64 and sequences of length 32."""
    layer = keras.layers
    width = 64

    def block(inputs: Any) -> Any:
        attended = layer.MultiHeadAttention(4, width // 4, use_bias=False)(inputs, inputs)
        inputs = layer.LayerNormalization()(inputs + attended)
        hidden = layer.Dense(width)(layer.Dense(2 * width, activation="relu")(inputs))
        return layer.LayerNormalization()(inputs + hidden)

    def create_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((32, 16))
        outputs = layer.Dense(width)(inputs)
        for _ in range(blocks):
            outputs = block(outputs)
        return keras.Model(inputs, layer.Dense(10)(layer.GlobalAveragePooling1D()(outputs)))

    data = sliced(normal(800, 32, 16), 10)
    # The tolerance is larger, because rounding errors grow: layer normalization divides small
    # gradients by small deviations, and Nadam turns small gradients into full steps.
    return Workload("transformer", 16, 50, data, create_model, nadam, tolerance=2e-3)


def deep_transformer() -> Workload:
    """Creates a Transformer of six blocks, whose graph is large; only its start is measured."""
    return transformer(blocks=6)


def images() -> Workload:
    """Creates a workload whose time is that of its input: decoding and augmenting photographs."""
    noise = np.random.default_rng(5).integers(0, 255, (64, 25, 30, 3)).astype("uint8")
    large = noise.repeat(15, axis=1).repeat(16, axis=2)
    files = np.array([tf.io.encode_jpeg(image).numpy() for image in large])
    labels = np.random.default_rng(2).integers(0, 10, len(files)).astype("int32")

    def decode(index: Any, example: Any) -> Any:
        file, label = example
        seed = tf.stack([index, tf.constant(7, tf.int64)])
        image = tf.image.stateless_random_crop(tf.io.decode_jpeg(file, 3), (320, 320, 3), seed)
        image = tf.image.resize(image, (224, 224)) / 255.0
        image = tf.image.stateless_random_flip_left_right(image, seed)
        return tf.image.stateless_random_brightness(image, 0.1, seed), label

    def dataset(batch_size: int) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices((files, labels)).enumerate()
        decoded = examples.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
        options = tf.data.Options()
        options.autotune.ram_budget = 2**26  # otherwise 100 batches are read while a peer is paused
        return decoded.batch(batch_size, drop_remainder=True).with_options(options)

    def create_model() -> keras.Model:
        return with_weights(
            keras.Input((224, 224, 3)),
            keras.layers.Lambda(lambda images: images[:, ::56, ::56]),  # costs next to nothing
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        )

    return Workload("images", 16, 100, dataset, create_model, nadam)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "cnn": cnn,
    "noisy": noisy,
    "embedding": embedding,
    "lstm": lstm,
    "transformer": transformer,
    "images": images,
    "table": lambda: mlp_with("table", LookUp),
    "summary": lambda: mlp_with("summary", Summarize),
}
