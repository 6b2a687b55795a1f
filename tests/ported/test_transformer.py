"""A masked Transformer whose loss is divided by the words, beside a plain loop over all of them.

On two processes: tests/engine/test_cluster.py.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest

from tests.helpers.fixtures import Train
from tests.helpers.resume import assert_resumes
from tests.ported import transformer
from tests.ported.compare import BATCH, RATE, STEPS, assert_close


@functools.cache
def plain() -> keras.Model:
    model, before = transformer.by_hand(STEPS, BATCH, RATE)
    for variable, start in zip(model.weights, before, strict=True):
        if not variable.path.endswith("key/bias"):  # adds the same to all that attention compares
            assert np.abs(variable.numpy() - start).max() > 1e-4, variable.path
    return model


@pytest.mark.parametrize(("devices", "accumulate"), [(1, 1), (2, 1), (2, 2)])
def test_weights_and_metrics_are_those_of_the_plain_loop(
    train: Train, devices: int, accumulate: int
) -> None:
    settings: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE}
    state = train(
        transformer.hooks(), virtual_devices=devices, accumulate_steps=accumulate, **settings
    )
    model = plain()
    assert_close(state.train_model.weights, model.weights)
    whole = next(iter(transformer.create_eval_dataset(len(transformer.SENTENCES))))
    found = np.argmax(model(whole[:, :-1]), axis=-1)
    target = whole[:, 1:].numpy()
    accuracy = (found == target)[target > 0].mean()
    np.testing.assert_allclose(
        [state.metrics["loss"], state.metrics["accuracy"]],
        [transformer.mean_loss(model, whole), accuracy],
        rtol=1e-5,
    )


def test_a_resumed_run_is_the_whole_run(train: Train) -> None:
    assert_resumes(train, transformer.hooks, replicas=2, batch_size=BATCH, learning_rate=RATE)
