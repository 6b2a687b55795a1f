"""Lower precision: the weights it leads to, the loss scale of float16, and skipped updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.__main__ import main
from tests.golden.programs import embedding, l2
from tests.helpers.cases import (
    FEATURES,
    make_hooks,
    regression_data,
    set_weights,
    sliced,
)
from tests.helpers.fixtures import Train
from tests.helpers.project import EVALUATED

pytestmark = pytest.mark.slow

CASES = {
    "l2": l2.PROGRAM,
    "embedding": embedding.PROGRAM,
}
BATCH = 16


@pytest.fixture(autouse=True)
def policy_is_put_back() -> Any:
    before = keras.config.dtype_policy().name
    yield
    assert keras.config.dtype_policy().name == before


def dense_model() -> keras.Model:
    return set_weights(keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)]))


def with_policy(policy: str) -> Callable[[], keras.Model]:
    """Returns a create_model that sets a policy of Keras'."""

    def create_model() -> keras.Model:
        keras.config.set_dtype_policy(policy)
        return dense_model()

    return create_model


def test_update_pre_sees_the_gradients_that_float16_cannot_hold(train: Train) -> None:
    seen: list[Any] = []

    def update_pre(gradients: Any, loss: Any) -> Any:
        return gradients, [loss, *gradients]

    hooks = make_hooks(
        create_model=dense_model,
        create_loss=lambda: lambda loss_input: 1e-7 * loss_input[0][:, 0],
        update_pre=update_pre,
        every_steps={1: lambda display_gradients: seen.append(display_gradients)},
    )
    state = train(hooks, steps=1, precision="float16", accumulate_steps=2)
    loss, kernel, bias = seen[0]
    x = regression_data()[0][:BATCH]
    np.testing.assert_allclose(kernel, 1e-7 * x.mean(axis=0)[:, None], rtol=0.02, atol=1e-10)
    np.testing.assert_allclose(bias, [1e-7], rtol=0.02)
    output = state.train_model(x).numpy()
    np.testing.assert_allclose(loss, 1e-7 * output.astype("float64").mean(), rtol=0.02)


def test_a_run_is_used_in_its_own_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "callbacks.py").write_text(EVALUATED)
    (tmp_path / "config.yaml").write_text("steps: 2\nbatch_size: 16\nprecision: bfloat16\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--run-name", "first", "--accumulate-steps", "2"]) == 0
    opening = capsys.readouterr().out.splitlines()[0]
    assert opening.endswith("batch size 16 in 2 micro-batches, 1 replica on CPU, in bfloat16.")
    assert main(["evaluate"]) == 0 and main(["predict"]) == 0 and main(["export"]) == 0
    capsys.readouterr()
    with np.load(tmp_path / "runs/first/predictions.npz") as predictions:
        output = predictions["output"]
    assert output.dtype == np.float32 and output.shape == (37, 1)
    inputs = tf.constant(regression_data()[0][-37:])
    loaded = tf.saved_model.load(str(tmp_path / "runs/first/export/1"))
    served = loaded.serve(inputs)
    assert served.dtype == tf.float32
    np.testing.assert_array_equal(served, output)


# ---- A policy of the user's own ---------------------------------------------------------------


def test_variables_of_another_type_are_trained_in_it(train: Train) -> None:
    def loss_of(loss_input: Any) -> Any:
        output, target = loss_input
        return tf.reduce_sum((output - tf.cast(target, output.dtype)) ** 2, axis=1)

    data = sliced(regression_data())
    hooks = make_hooks(
        create_model=with_policy("float64"),
        create_loss=lambda: loss_of,
        create_opt=lambda lr: keras.optimizers.SGD(0.125),
    )
    state = train(hooks, steps=4, virtual_devices=2)
    before = keras.config.dtype_policy()
    model, update = with_policy("float64")(), hooks.create_opt(0)
    keras.config.set_dtype_policy(before)
    for batch in data(BATCH).take(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of((model(batch[0]), batch[1])))
        update.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    for variable, other in zip(state.train_model.variables, model.variables, strict=True):
        assert variable.dtype == "float64"
        np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-12)
