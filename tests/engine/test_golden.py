"""Checkpoints of an earlier engine stay readable.

``golden/run`` is a run of 10 steps, made before records named the variables that ``create_ckpt``
leaves out; ``weights-10.npz`` and ``weights-20.npz`` are what that engine had after 10 steps and,
resumed, after 20: the variables of the model, then those of the optimizer.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import FEATURES, make_hooks, regression_data
from tests.helpers.fixtures import Train

GOLDEN = Path(__file__).parent / "golden"


def program() -> SimpleNamespace:
    """Batch normalisation, Dropout, a shuffle, and a layer that is frozen after step 5."""

    def create_model() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(8, activation="tanh", name="hidden"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dropout(0.3, seed=7, name="drop"),
                keras.layers.Dense(1, name="out"),
            ]
        )
        random = np.random.default_rng(1)
        for layer in (model.layers[0], model.layers[3]):
            layer.set_weights([random.normal(scale=0.3, size=w.shape) for w in layer.get_weights()])
        return model

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(regression_data())
        return data.shuffle(40, seed=3).batch(per_replica_batch_size, drop_remainder=True)

    def freeze(train_model: Any) -> None:
        train_model.layers[0].trainable = False

    return make_hooks(create_model=create_model, create_dataset=create_dataset, at_step={5: freeze})


@pytest.mark.parametrize(("steps", "tolerance"), [(10, 0.0), (20, 1e-6)])
def test_a_run_of_an_earlier_engine_goes_on(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, tolerance: float
) -> None:
    shutil.copytree(GOLDEN / "run", tmp_path / "runs" / "run")
    state = train(program(), steps=steps)
    assert "warning" not in capsys.readouterr().out
    assert state.train_model.layers[0].trainable is False
    variables = [*state.train_model.variables, *state.optimizer.variables]
    expected = np.load(GOLDEN / f"weights-{steps}.npz").values()
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(
            variable.numpy(), value, rtol=tolerance, atol=tolerance, err_msg=variable.path
        )
