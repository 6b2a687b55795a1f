"""``logical_replicas``: the same bits on any number of devices, compared in all that is saved."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small

LOGICAL_REPLICAS = 6
STEPS = 9
layers = keras.layers


def images() -> tuple[np.ndarray, np.ndarray]:
    """Returns 100 images of 12 x 12 pixels and a class each; 16 rows do not divide by 6."""
    random = np.random.default_rng(0)
    return random.normal(size=(100, 12, 12, 3)).astype("float32"), random.integers(0, 10, 100)


def create_cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            layers.Conv2D(8, 3),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.GaussianNoise(0.1),
            layers.Dense(10),
        ]
    )


def create_transformer() -> keras.Model:
    """A Transformer over nine patches of an image."""
    inputs = keras.Input((12, 12, 3))
    tokens = layers.Reshape((9, 16))(layers.Conv2D(16, 4, strides=4)(inputs))
    attention = layers.MultiHeadAttention(2, 8, dropout=0.2)
    tokens += attention(tokens, tokens)
    tokens = layers.LayerNormalization()(tokens)
    tokens += layers.Dropout(0.2)(layers.Dense(16)(layers.Dense(32, "gelu")(tokens)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(tokens)))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "cnn": create_cnn,
    "transformer": create_transformer,
}


def make_hooks(model: str) -> SimpleNamespace:
    """Returns hooks with Adam and the default ``update_pre``, which clips."""
    hooks = small.hooks(
        create_dataset=small.slices(images()),
        create_model=MODELS[model],
        create_loss=lambda: small.crossentropy,
        create_opt=keras.optimizers.Adam,
        # The last batch has 3 rows, fewer than there are logical replicas.
        create_eval_dataset=small.slices(tuple(array[:35] for array in images())),
        create_metrics=lambda: {
            "accuracy": keras.metrics.SparseCategoricalAccuracy(),
            "mean": keras.metrics.Mean(),
        },
        metric_pre=lambda output, batch: {"accuracy": (batch[1], output), "mean": output},
    )
    del hooks.update_pre
    return hooks


def train(model: str, runs: Path, name: str, **settings: Any) -> ctl_core.State:
    """Trains a run."""
    return engine.train(
        make_hooks(model),
        runs,
        **{
            "run_name": name,
            "steps": STEPS,
            "ckpt_every": 3,
            "eval_every": 3,
            "seed": 7,
            **settings,
        },
    )


def list_evaluations(state: ctl_core.State) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "accuracy", "mean")
    lines = [line for line in state.history if line["split"] == "eval"]
    return [tuple(line[name] for name in names) for line in lines]


@pytest.mark.parametrize(
    ("model", "devices"),
    [
        ("cnn", 3),
        *(pytest.param("cnn", devices, marks=pytest.mark.slow) for devices in (2, 5)),
        *(pytest.param("transformer", devices, marks=pytest.mark.slow) for devices in (2, 3, 5)),
    ],
)
def test_any_number_of_devices_ends_with_the_same_bits(
    model: str, devices: int, tmp_path: Path
) -> None:
    """Weights, moving statistics, the optimizer and random generators; resumed on one device."""
    expected = train(model, tmp_path, "one", logical_replicas=LOGICAL_REPLICAS)
    train(
        model, tmp_path, "many", logical_replicas=LOGICAL_REPLICAS, virtual_devices=devices, steps=6
    )
    resumed = train(model, tmp_path, "many", virtual_devices=devices - 1)
    assert list_evaluations(resumed) == list_evaluations(expected)
    for subfolder in ("", "engine"):
        saved = compare.read_checkpoint(resumed.run_dir, STEPS, subfolder)
        others = compare.read_checkpoint(expected.run_dir, STEPS, subfolder)
        assert saved.keys() == others.keys() and saved
        for key, value in others.items():
            assert saved[key].tobytes() == value.tobytes(), key


def test_a_run_without_noise_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """Weights and evaluations; clipping clips the sum, and has the same bits on each device."""

    def clip(gradients: Any) -> Any:
        return tf.clip_by_global_norm(gradients, 0.5)[0], gradients

    hooks = small.hooks(
        update_pre=clip,
        create_eval_dataset=small.create_eval_dataset,
        create_metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
    )
    state, single = (
        engine.train(
            hooks,
            tmp_path / str(devices),
            **small.settings(7, logical_replicas=LOGICAL_REPLICAS, virtual_devices=devices),
        )
        for devices in (3, 1)
    )
    compare.assert_same(state.train_model.weights, single.train_model.weights)
    assert state.metrics == single.metrics
    expected = small.plain(7, optimizer=keras.optimizers.SGD(small.RATE, global_clipnorm=0.5))
    unclipped = small.plain(7)
    compare.assert_close(state.train_model.weights, expected.weights)
    assert not np.allclose(expected.weights[0], unclipped.weights[0], atol=1e-4)
    errors = small.errors(expected)
    assert state.metrics == pytest.approx(errors, rel=1e-5)


def test_logical_replicas_see_their_index_and_host_hooks_get_all_rows(tmp_path: Path) -> None:
    """The rows are in the order of the batch, and outputs depend on the index."""
    seen: list[Any] = []

    def look(output: Any, batch: Any) -> None:
        seen.append((output.numpy(), batch[0].numpy()))

    def input_pre(batch: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) is None:  # not while it is built
            assert context.num_replicas_in_sync == LOGICAL_REPLICAS
        index = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return tf.concat([batch[0][:, :4], tf.fill([tf.shape(batch[0])[0], 1], index)], axis=1)

    for devices in (1, 4):
        hooks = small.hooks(input_pre=input_pre, every_steps={1: look})
        hooks.create_dataset = small.slices(small.data(), drop_remainder=True)
        engine.train(
            hooks, tmp_path / str(devices), steps=2, logical_replicas=LOGICAL_REPLICAS,
            virtual_devices=devices,
        )  # fmt: skip
    for (output, rows), (other, other_rows) in zip(seen[:2], seen[2:], strict=True):
        np.testing.assert_array_equal(output, other)
        np.testing.assert_array_equal(rows, other_rows)
    np.testing.assert_array_equal(seen[0][1], small.data()[0][:16])
