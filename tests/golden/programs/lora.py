"""LoRA, after Hu et al. 2021 and as in Keras: adapters on a frozen, pretrained base.

The base is a file that was written with ``save`` and contains its optimizer. It is read in
``create_model``, or through ``init_from``.
"""

import functools
import tempfile
from typing import Any

import keras
import numpy as np

from tests.golden import small
from tests.golden.catalogue import Program

WORDS = 12
LENGTH = 6
SIZE = 8
CLASSES = 3
RANK = 2
RANDOM = np.random.default_rng(0)
TEXTS = RANDOM.integers(0, WORDS, (40, LENGTH))
LABELS = RANDOM.integers(0, CLASSES, 40)
FOLDER = tempfile.TemporaryDirectory()
create_dataset = small.slices((TEXTS, LABELS))


def create_base() -> keras.Model:
    texts = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, SIZE)(texts)
    x = x + keras.layers.EinsumDense("btd,de->bte", (None, SIZE), bias_axes="e")(x)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(texts, keras.layers.Dense(CLASSES)(x))


@functools.cache
def write_base() -> str:
    """Trains a base, saves it, and returns the path of the file."""
    keras.utils.set_random_seed(1)
    base = create_base()
    base.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    base.train_on_batch(TEXTS, LABELS)
    base.save(f"{FOLDER.name}/base.keras")
    return f"{FOLDER.name}/base.keras"


def adapted(base: keras.Model) -> keras.Model:
    """Adds adapters to a base, and freezes all its other weights."""
    keras.utils.set_random_seed(3)
    for layer in base.layers:
        for variable in layer.trainable_variables:
            variable.trainable = False
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(RANK)
    return base


def create_adapted() -> keras.Model:
    return adapted(keras.models.load_model(write_base()))


def create_opt(lr: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(lr, momentum=0.9)


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_model=create_adapted,
    create_loss=lambda: small.crossentropy,
    create_opt=create_opt,
)


PROGRAM = Program(hooks, frozen="^(?!.*lora_)")
