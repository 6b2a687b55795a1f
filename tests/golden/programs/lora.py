"""LoRA, after Hu et al. 2021 as Keras has it: adapters on a pretrained base that is frozen.

The base is a file that somebody has written with ``save``, its optimizer in it. It is read in
``create_model``, or by ``init_from``.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden.compare import BATCH, RATE, STEPS, Program

WORDS, LENGTH, SIZE, CLASSES, RANK = 12, 6, 8, 3, 2
RANDOM = np.random.default_rng(0)
TEXTS = RANDOM.integers(0, WORDS, (40, LENGTH))
LABELS = RANDOM.integers(0, CLASSES, 40)

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(per_replica_batch_size)


def create_base() -> keras.Model:
    texts = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, SIZE)(texts)
    x = x + keras.layers.EinsumDense("btd,de->bte", (None, SIZE), bias_axes="e")(x)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(texts, keras.layers.Dense(CLASSES)(x))


def adapted(base: keras.Model) -> keras.Model:
    """Adds adapters; nothing else is trained."""
    keras.utils.set_random_seed(3)
    for layer in base.layers:
        for variable in layer.trainable_variables:
            variable.trainable = False
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(RANK)
    return base


def create_loss() -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    return lambda pair: loss(pair[1], pair[0])


def create_opt(lr: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(lr, momentum=0.9)


def hooks(create_model: Callable[[], keras.Model] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=create_model or create_adapted,
        create_loss=create_loss,
        create_opt=create_opt,
        update_pre=lambda gradients: (gradients, gradients),
        every_steps={},
    )


FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def write_base() -> str:
    """Returns the path of what somebody has trained."""
    keras.utils.set_random_seed(1)
    base = create_base()
    base.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    base.train_on_batch(TEXTS, LABELS)
    base.save(f"{FOLDER.name}/base.keras")
    return f"{FOLDER.name}/base.keras"


def create_adapted() -> keras.Model:
    return adapted(keras.models.load_model(write_base()))


# ---- The same as a plain loop -----------------------------------------------------------------


@functools.cache
def train_plainly() -> keras.Model:
    model, optimizer = create_adapted(), create_opt(RATE)
    for texts, labels in create_dataset(BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            logits = model(texts, training=True)
            each = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = tf.reduce_mean(each)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert len(model.trainable_variables) == 6
    return model


def find_base() -> frozenset[int]:
    weights = train_plainly().weights
    return frozenset(i for i, one in enumerate(weights) if not one.name.startswith("lora_"))


PROGRAM = Program(hooks, lambda: train_plainly().weights, frozen=find_base)
