"""Tests on a GPU: weights equal those of a plain loop, and checkpoints can move between devices.

The GPU is split into logical devices. Most tests train on one of them, and some on two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core import build
from tests.golden import small
from tests.golden.compare import assert_close
from tests.golden.reference import Reference
from tests.helpers import on_gpus
from tests.helpers.project import Train

GPUS = tf.config.list_physical_devices("GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="TensorFlow finds no GPU")]
SETTINGS = small.settings(20, strategy="one_device")


@pytest.fixture(autouse=True)
def whole_float32() -> Iterator[None]:
    """Multiplies matrices without rounding to TF32, so that weights can be compared."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(True)


def images(per_replica_batch_size: int) -> tf.data.Dataset:
    """Returns a dataset of examples that consist of a picture, six word indices and a class."""
    random = np.random.default_rng(2)
    pictures = random.normal(size=(96, 8, 8, 1)).astype("float32")
    words, classes = random.integers(0, 50, (96, 6)), random.integers(0, 3, 96)
    examples = tf.data.Dataset.from_tensor_slices(((pictures, words), classes))
    return examples.batch(per_replica_batch_size, drop_remainder=True)


def mixed_model() -> keras.Model:
    """Returns a model with convolution, batch normalization, an LSTM and a sparse embedding."""
    layer = keras.layers
    picture, words = keras.Input((8, 8, 1)), keras.Input((6,), dtype="int64")
    seen = layer.BatchNormalization(synchronized=True)(
        layer.Conv2D(4, 3, activation="relu")(picture)
    )
    read = layer.LSTM(5, use_cudnn=False)(layer.Embedding(50, 4)(words))
    logits = layer.Dense(3)(layer.Concatenate()([layer.Flatten()(seen), read]))
    model = keras.Model([picture, words], logits)
    random = np.random.default_rng(1)
    model.set_weights([random.normal(1, 0.1, w.shape) for w in model.get_weights()])
    return model


MIXED = small.hooks(
    create_dataset=images,
    create_model=mixed_model,
    create_loss=lambda: small.crossentropy,
    update_pre=lambda gradients: (tf.clip_by_global_norm(gradients, 0.1)[0], gradients),
)


def assert_plain(state: Any, hooks: Any) -> None:
    """Asserts that the trained weights are close to those of a plain loop."""
    batches = hooks.create_dataset(small.BATCH).repeat().take(SETTINGS["steps"])
    plain = Reference(hooks).train(batches).parts.train_model
    assert_close(state.train_model.weights, plain.weights, 1e-4, 1e-5)


@pytest.mark.parametrize("hooks", [small.hooks(), MIXED], ids=["dense", "mixed"])
@pytest.mark.parametrize("ways", [{"jit_compile": False}, {}], ids=["graph", "executable"])
def test_weights_on_a_gpu_are_those_of_a_plain_loop(train: Train, hooks: Any, ways: Any) -> None:
    """By default, training on a GPU is compiled."""
    state = train(hooks, **SETTINGS, **ways)
    assert state.compilation.is_compiled == (not ways), state.compilation
    assert {weight.value.device[-5:] for weight in state.train_model.weights} == {"GPU:0"}
    assert_plain(state, hooks)


@pytest.mark.parametrize("hooks", [small.hooks(), MIXED], ids=["dense", "mixed"])
def test_replicas_do_not_drift_apart(
    train: Train, hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas keep equal weights, which the engine checks whenever it saves a checkpoint."""
    monkeypatch.setattr(build, "create_strategy", on_gpus.create_strategy)
    assert_plain(train(hooks, **SETTINGS, virtual_devices=2, ckpt_every=5), hooks)


@pytest.mark.parametrize("ways", [{}, {"jit_compile": True}], ids=["graph", "executable"])
def test_half_precision_is_near_the_whole(train: Train, ways: Any) -> None:
    """Training in float16 reaches nearly the weights of training in float32.

    The loss is small, so that its gradients do not overflow with the initial loss scale of 32768.
    """
    hooks = small.hooks(create_loss=lambda: lambda pair: small.squared_error(pair) / 256)
    settings = {**SETTINGS, "learning_rate": 256 * small.RATE, "precision": "float16"}
    rounded = train(hooks, **settings, **ways)
    assert rounded.train_model.layers[0].compute_dtype == "float16"
    start, plain = small.create_model(), small.plain(SETTINGS["steps"])
    trained = zip(rounded.train_model.weights, plain.weights, start.weights, strict=True)
    for half, whole, before in trained:
        far = np.abs(whole.numpy() - before.numpy()).max()
        np.testing.assert_allclose(half.numpy(), whole.numpy(), rtol=0, atol=0.02 * far)


def test_layers_of_cudnn_are_not_compiled(train: Train) -> None:
    """The message names the op of cuDNN. Without cuDNN, the same layer is compiled."""

    def recurrent(use_cudnn: Any) -> keras.Model:
        layers = [
            keras.Input((small.FEATURES,)),
            keras.layers.Reshape((small.FEATURES, 1)),
            keras.layers.LSTM(4, use_cudnn=use_cudnn),
            keras.layers.Dense(1),
        ]
        return keras.Sequential(layers)

    settings = {**SETTINGS, "steps": 3}
    asked = train(small.hooks(create_model=lambda: recurrent("auto")), **settings)
    assert "CudnnRNN" in str(asked.compilation)
    assert "use_cudnn=False" in str(asked.compilation)
    other = small.hooks(create_model=lambda: recurrent(False))
    assert train(other, **settings, run_name="other").compilation.is_compiled


def test_a_checkpoint_goes_to_the_cpu_and_back(train: Train) -> None:
    """A run that moves between GPU and CPU stays compiled, although no setting says so."""
    hooks = small.hooks(create_eval_dataset=small.create_eval_dataset)
    on_cpu = {"virtual_devices": 2, "strategy": "auto"}
    for steps, settings in ((7, {}), (13, on_cpu), (20, {})):
        state = train(hooks, **{**SETTINGS, "steps": steps, **settings})
        assert state.compilation.is_compiled
        place = "CPU" if "virtual_devices" in settings else "GPU"
        assert place in state.strategy.extended.worker_devices[0]
    plain = small.plain(SETTINGS["steps"])
    assert_close(state.train_model.weights, plain.weights, 1e-4, 1e-5)
    assert state.evaluation.evaluate()["loss"] == pytest.approx(small.errors(plain)["loss"], 1e-4)
