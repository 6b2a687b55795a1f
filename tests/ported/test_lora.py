"""LoRA, after Hu et al. 2021 as Keras has it: adapters on a pretrained base that is frozen.

The base is a file that somebody has written with ``save``, its optimizer in it. It is read in
``create_model``, or by ``init_from``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.fixtures import Train
from tests.helpers.resume import assert_resumes
from tests.ported.compare import BATCH, RATE, STEPS, assert_close, assert_moved, numbers

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


def hooks(create_model: Callable[[], keras.Model]) -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=create_loss,
        create_opt=create_opt,
        update_pre=lambda gradients: (gradients, gradients),
        every_steps={},
    )


@pytest.fixture
def base_file(tmp_path: Path) -> str:
    """What somebody has trained."""
    keras.utils.set_random_seed(1)
    base = create_base()
    base.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    base.train_on_batch(TEXTS, LABELS)
    base.save(tmp_path / "base.keras")
    return str(tmp_path / "base.keras")


# ---- The same as a plain loop -----------------------------------------------------------------


def plain(model: keras.Model) -> keras.Model:
    optimizer, before = create_opt(RATE), numbers(model.trainable_variables)
    for texts, labels in create_dataset(BATCH).repeat().take(STEPS):
        with tf.GradientTape() as tape:
            logits = model(texts, training=True)
            each = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = tf.reduce_mean(each)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert len(before) == 6
    assert_moved(before, numbers(model.trainable_variables))
    return model


SETTINGS = {"batch_size": BATCH, "learning_rate": RATE}


@pytest.mark.parametrize("devices", [1, 2])
def test_weights_are_those_of_the_plain_loop_and_the_base_stays(
    train: Train, base_file: str, devices: int
) -> None:
    def create_model() -> keras.Model:
        return adapted(keras.models.load_model(base_file))

    model = train(hooks(create_model), steps=STEPS, virtual_devices=devices, **SETTINGS).train_model
    assert_close(model.weights, plain(create_model()).weights)
    there = [w for w in model.weights if not w.name.startswith("lora_")]
    for one, other in zip(there, keras.models.load_model(base_file).weights, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=one.path)


def test_a_resumed_run_is_the_whole_run(train: Train, base_file: str) -> None:
    def program() -> SimpleNamespace:
        return hooks(lambda: adapted(keras.models.load_model(base_file)))

    assert_resumes(train, program, replicas=2, **SETTINGS)


@pytest.mark.parametrize("suffix", ["keras", "weights.h5"])
def test_a_base_from_a_file_leaves_adapters_as_they_are_created(
    train: Train, base_file: str, tmp_path: Path, suffix: str
) -> None:
    """Keras' load_weights would make both matrices of each 0."""
    own, file = hooks(lambda: adapted(create_base())), tmp_path / f"base.{suffix}"
    if suffix != "keras":
        keras.models.load_model(base_file).save_weights(file)
    settings = {"init_from": str(file), "virtual_devices": 2, **SETTINGS}
    with pytest.raises(ctl_core.SetupError, match=r"fits 7 of the 13 weights .*lora_.* not there"):
        train(own, steps=1, **settings)
    begun = train(own, steps=0, init_partial=True, **settings)
    assert_close(begun.train_model.weights, adapted(keras.models.load_model(base_file)).weights)


def test_a_file_of_a_trained_model_is_taken_without_its_optimizer(
    train: Train, base_file: str
) -> None:
    begun = train(hooks(create_base), steps=0, init_from=base_file, **SETTINGS)
    assert_close(begun.train_model.weights, keras.models.load_model(base_file).weights)


@pytest.mark.parametrize("late", [False, True])
def test_adapters_that_nothing_will_move_are_pointed_out(
    train: Train, base_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], late: bool
) -> None:
    weights = tmp_path / "base.weights.h5"
    keras.models.load_model(base_file).save_weights(weights)

    def create_model() -> keras.Model:
        model = create_base() if late else adapted(create_base())
        model.load_weights(weights)
        return adapted(model) if late else model

    train(hooks(create_model), steps=1, **SETTINGS)
    said = " ".join(capsys.readouterr().out.split())
    assert ("are 0, so that no step will change them" in said) is not late
