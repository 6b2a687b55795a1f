"""Lower precision: the weights it leads to, the loss scale of float16, and skipped updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core import precision
from ctl_core.__main__ import main
from ctl_core.errors import SetupError
from tests.engine import test_commands
from tests.engine.conftest import (
    FEATURES,
    Train,
    make_hooks,
    regression_data,
    set_weights,
    sliced,
    squared_error,
)
from tests.engine.test_numbers import BATCH, CASES, CLIP, STEPS, by_hand, clipped, nadam

OVERFLOW = 3  # the step whose batch has an infinite target


@pytest.fixture(autouse=True)
def policy_is_put_back() -> Any:
    before = keras.config.dtype_policy().name
    yield
    assert keras.config.dtype_policy().name == before


def scale_of(state: Any) -> list[float]:
    one = state.parts.loss_scale
    return [float(v.numpy()) for v in (one.scale, one.finite, one.skipped)]


@pytest.mark.parametrize(
    ("kind", "case", "replicas", "accumulate"),
    [
        ("bfloat16", "l2", 1, 2),
        ("float16", "l2", 2, 2),
        ("float16", "embedding", 2, 1),
        ("float16", "two_inputs_two_outputs", 1, 1),
    ],
)
def test_weights_are_near_those_of_float32(
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    case: str,
    replicas: int,
    accumulate: int,
) -> None:
    monkeypatch.setattr(precision, "INITIAL", 2.0**8)  # so that no update of these is skipped
    create_model, data, loss = CASES[case]
    seen: list[Any] = []

    def checked(loss_input: Any) -> tf.Tensor:
        assert all(part.dtype == tf.float32 for part in tf.nest.flatten(loss_input))
        return loss(loss_input)

    hooks = make_hooks(
        create_dataset=sliced(data()),
        create_model=create_model,
        create_loss=lambda: checked,
        create_opt=nadam,
        update_pre=clipped,
        every_steps={10: lambda loss, output, gradients: seen.append((loss, output, gradients))},
    )
    state = train(
        hooks,
        steps=STEPS,
        precision=kind,
        virtual_devices=replicas,
        accumulate_steps=accumulate,
    )
    assert {layer.compute_dtype for layer in state.train_model.layers[-1:]} == {kind}
    assert state.functions.trace_counts() == [1, 1]
    assert (state.parts.loss_scale is None) == (kind != "float16")
    assert int(state.optimizer.iterations.numpy()) == STEPS
    for values in seen:
        assert all(part.dtype == tf.float32 for part in tf.nest.flatten(values))
    expected, _ = by_hand(case, nadam(0.01), CLIP)
    for weight, reference in zip(state.train_model.get_weights(), expected, strict=True):
        assert weight.dtype == np.float32
        np.testing.assert_allclose(weight, reference, atol=0.01)


@pytest.mark.parametrize("initial", [2.0**15, 1.0])
def test_update_pre_sees_the_gradients_that_float16_cannot_hold(
    train: Train, monkeypatch: pytest.MonkeyPatch, initial: float
) -> None:
    monkeypatch.setattr(precision, "INITIAL", initial)
    seen: list[Any] = []

    def update_pre(gradients: Any, loss: Any) -> Any:
        return gradients, [loss, *gradients]

    hooks = make_hooks(
        create_model=lambda: set_weights(
            keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        ),
        create_loss=lambda: lambda loss_input: 1e-7 * loss_input[0][:, 0],
        update_pre=update_pre,
        every_steps={1: lambda display_gradients: seen.append(display_gradients)},
    )
    state = train(hooks, steps=1, precision="float16", accumulate_steps=2)
    loss, kernel, bias = seen[0]
    x = regression_data()[0][:BATCH]
    if initial == 1.0:  # nothing is left: the case needs the scale
        np.testing.assert_array_equal(kernel, np.zeros([FEATURES, 1]))
        return
    np.testing.assert_allclose(kernel, 1e-7 * x.mean(axis=0)[:, None], rtol=0.02, atol=1e-10)
    np.testing.assert_allclose(bias, [1e-7], rtol=0.02)
    output = state.train_model(x).numpy()
    np.testing.assert_allclose(loss, 1e-7 * output.astype("float64").mean(), rtol=0.02)


def overflowing(**more: Any) -> Any:
    """Hooks whose third global batch has one infinite target, the last of its examples."""
    inputs, target = regression_data()
    target = target.copy()
    target[OVERFLOW * BATCH - 1] = np.inf
    return make_hooks(
        create_dataset=sliced((inputs, target)),
        create_loss=lambda: lambda loss_input: 0.01 * squared_error(loss_input),
        create_opt=lambda lr: keras.optimizers.SGD(lr, momentum=0.9),
        **more,
    )


@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 2), (2, 1)])
def test_an_update_that_is_not_finite_is_skipped(
    train: Train, monkeypatch: pytest.MonkeyPatch, replicas: int, accumulate: int
) -> None:
    monkeypatch.setattr(precision, "PATIENCE", 3)
    seen: list[Any] = []
    states: list[Any] = []
    original = precision.LossScale.__init__

    def note(self: Any) -> None:
        original(self)
        states.append(self)

    monkeypatch.setattr(precision.LossScale, "__init__", note)

    def look(step: int, loss: Any, train_model: Any, optimizer: Any, gradients: Any) -> None:
        variables = [v.numpy() for v in (*train_model.variables, *optimizer.variables)]
        scale = float(states[-1].scale.numpy())
        seen.append(
            (step, float(loss), variables, scale, int(optimizer.iterations.numpy()), gradients)
        )

    hooks = overflowing(every_steps={1: look})
    settings = {"virtual_devices": replicas, "accumulate_steps": accumulate}
    state = train(hooks, steps=6, precision="float16", **settings)
    assert [step for step, *_ in seen] == [1, 2, 3, 4, 5, 6] and state.step == 6
    assert [scale for _, _, _, scale, _, _ in seen] == [2.0**15] * 2 + [2.0**14] * 3 + [2.0**15]
    assert [count for _, _, _, _, count, _ in seen] == [1, 2, 2, 3, 4, 5]
    assert [bool(np.isfinite(loss)) for _, loss, *_ in seen] == [True, True, False] + [True] * 3
    assert not all(np.isfinite(gradient).all() for gradient in seen[OVERFLOW - 1][-1])
    for before, after in zip(seen[1][2], seen[2][2], strict=True):
        np.testing.assert_array_equal(before, after)
    assert any(
        (before != after).any() for before, after in zip(seen[2][2], seen[3][2], strict=True)
    )
    for variable in state.train_model.trainable_variables:
        copies = state.strategy.experimental_local_results(variable.value)
        for copy in copies[1:]:
            np.testing.assert_array_equal(copies[0], copy)


def test_the_loss_scale_is_resumed(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "PATIENCE", 3)
    hooks = overflowing()
    whole = train(hooks, steps=7, precision="float16", run_name="whole")
    assert scale_of(whole) == [2.0**15, 1, 0]
    first = train(hooks, steps=5, precision="float16", run_name="parts")
    assert scale_of(first) == [2.0**14, 2, 0]
    parts = train(hooks, steps=7, precision="float16", run_name="parts")
    assert scale_of(parts) == scale_of(whole)
    for weight, expected in zip(
        parts.train_model.get_weights(), whole.train_model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(weight, expected)
    plain = train(hooks, steps=8, run_name="parts")  # another precision, and back
    assert plain.step == 8 and plain.parts.loss_scale is None
    again = train(hooks, steps=9, precision="float16", run_name="parts")
    assert scale_of(again) == [2.0**14, 0, 1]  # from the start; step 9 has the batch of step 3


def test_a_run_that_only_skips_says_so_once(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = make_hooks(create_loss=lambda: lambda loss_input: loss_input[0][:, 0] / 0.0)
    state = train(hooks, steps=40, precision="float16", ckpt_every=10)
    assert scale_of(state) == [1.0, 0, 40]
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("the last 20 updates or more were skipped") == 1


def test_an_optimizer_that_scales_by_itself_is_refused(train: Train) -> None:
    def create_opt(lr: Any) -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(lr))

    with pytest.raises(SetupError, match="returned a LossScaleOptimizer") as error:
        train(make_hooks(create_opt=create_opt), precision="float16")
    message = str(error.value)
    assert message.startswith("create_opt (test_precision.py:") and "inner_optimizer" in message


def test_structures_are_cast_leaf_by_leaf() -> None:
    made = precision.to_float32(
        {
            "ragged": tf.ragged.constant([[1.0], []], dtype=tf.float16),
            "sparse": tf.sparse.from_dense(tf.constant([[0, 2]], tf.bfloat16)),
            "others": (tf.constant(1.0, tf.float64), tf.constant(1), None, "text"),
        }
    )
    assert made["ragged"].dtype == made["sparse"].dtype == tf.float32
    assert [getattr(part, "dtype", part) for part in made["others"]] == [
        tf.float64,
        tf.int32,
        None,
        "text",
    ]


def test_a_run_is_used_in_its_own_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "callbacks.py").write_text(test_commands.CALLBACKS)
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
    inputs = tf.constant(regression_data()[0][:37])
    loaded = tf.saved_model.load(str(tmp_path / "runs/first/export"))
    served = loaded.serve(inputs)
    assert served.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(served, tf.float32), output)
