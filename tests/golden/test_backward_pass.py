"""Programs whose backward pass does more than TensorFlow's gradients: ``tf.custom_gradient``."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.reference import Reference

# ---- Variables that a backward pass writes ------------------------------------------------------


class Fading(keras.layers.Layer):
    """Returns its input, and weakens the gradient by the number of backward passes so far."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def fade(inputs: Any) -> Any:
            def backward(upstream: Any) -> Any:
                self.calls.assign_add(1.0)
                return upstream / (1.0 + 0.1 * self.calls)

            return tf.identity(inputs), backward

        return fade(inputs)


def test_a_counter_in_the_backward_pass_counts_the_steps(train: engine.Train) -> None:
    hooks = small.hooks(create_model=lambda: small.model_with(Fading()))
    settings = small.settings(5, logical_replicas=3)
    one = train(hooks, **settings, run_name="one")
    two = train(hooks, **settings, run_name="two", virtual_devices=2)
    plain = Reference(hooks).train(small.create_dataset(small.BATCH).take(5))
    assert float(one.train_model.layers[1].calls) == 5
    compare.assert_close(one.train_model.weights, plain.parts.train_model.weights)
    compare.assert_same(two.train_model.weights, one.train_model.weights)


# ---- Exchanges in a backward pass ---------------------------------------------------------------


@tf.custom_gradient  # type: ignore[untyped-decorator]
def normalize_gradient(values: Any) -> Any:
    """Returns the values; their gradient is divided by its norm over all rows."""

    def backward(upstream: Any) -> Any:
        return upstream / tf.sqrt(ctl_core.all_reduce(tf.reduce_sum(upstream**2)))  # here

    return tf.identity(values), backward


def normalized_loss(pair: Any) -> Any:
    return small.squared_error((normalize_gradient(pair[0]), pair[1]))


class Normalized(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return normalize_gradient(inputs)


def find_line(words: str) -> int:
    """Returns the number of the line in this file that contains ``words`` and ends with # here."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if words in line and line.endswith("# here")]
    return number


NORMALIZED: dict[str, dict[str, Any]] = {
    "create_loss": {"create_loss": lambda: normalized_loss},
    "loss_pre": {"loss_pre": lambda output, batch: (normalize_gradient(output), batch[1])},
    "create_model": {"create_model": lambda: small.model_with(Normalized())},
}


@pytest.mark.parametrize("hook", NORMALIZED)
@pytest.mark.parametrize("setting", ["accumulate_steps", "logical_replicas"])
def test_an_exchange_in_the_backward_pass_is_refused(
    train: engine.Train, hook: str, setting: str
) -> None:
    """A layer may exchange values in micro-batches, as in its forward pass."""
    hooks = small.hooks(**NORMALIZED[hook])
    settings = {**small.settings(1), setting: 2}
    if (setting, hook) == ("accumulate_steps", "create_model"):
        assert train(hooks, **settings).step == 1
        return
    line = rf"^{hook} \(test_backward_pass.py:{find_line('ctl_core.all_reduce')}\): all_reduce "
    with pytest.raises(ctl_core.SetupError, match=line):
        train(hooks, **settings)


def test_an_exchange_in_the_backward_pass_of_a_loss_trains(train: engine.Train) -> None:
    state = train(small.hooks(**NORMALIZED["create_loss"]), **small.settings(3), virtual_devices=3)
    plain = Reference(small.hooks(**NORMALIZED["create_loss"]))
    plain.train(small.create_dataset(small.BATCH).take(3))
    compare.assert_close(state.train_model.weights, plain.parts.train_model.weights)


# ---- A backward pass that is not linear, and batch_weight ---------------------------------------


def weighted_data() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns examples of which about a quarter have the weight 1, and the others the weight 0."""
    inputs, target = small.data(96)
    weight = np.random.default_rng(2).uniform(size=len(inputs)) < 0.25
    return inputs, {"target": target, "weight": weight.astype("float32")}


def weighted_loss(pair: Any) -> Any:
    output, labels = pair
    return small.squared_error((output, labels["target"])) * labels["weight"]


def batch_weight(batch: Any) -> Any:
    return tf.reduce_sum(batch[1]["weight"])


def weigh_output(batch: Any, output: Any) -> Any:
    return tf.reduce_sum(tf.where(tf.math.is_finite(output[:, 0]), batch[1]["weight"], 0.0))


class Changed(keras.layers.Layer):
    """Returns its input, and changes the gradient with a given function."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def pass_on(inputs: Any) -> Any:
            return tf.identity(inputs), self.change

        return pass_on(inputs)  # here


def clip(gradient: Any) -> Any:
    return tf.clip_by_value(gradient, -0.05, 0.05)


def weighted_hooks(change: Callable[[Any], Any], **more: Any) -> Any:
    hooks = {
        "create_dataset": small.slices(weighted_data()),
        "create_model": lambda: small.model_with(Changed(change)),
        "create_loss": lambda: weighted_loss,
        "batch_weight": batch_weight,
        **more,
    }
    return small.hooks(**hooks)


def train_plainly(change: Callable[[Any], Any], steps: int) -> Any:
    hooks = weighted_hooks(change)
    batches = small.slices(weighted_data())(small.BATCH).take(steps)
    return Reference(hooks).train(batches).parts.train_model.weights


SHARED: dict[str, dict[str, Any]] = {
    "one device": {},
    "three devices": {"virtual_devices": 3},
    "micro-batches on two devices": {"virtual_devices": 2, "accumulate_steps": 3},
    "logical replicas": {"logical_replicas": 3, "virtual_devices": 2},
    "compiled on two devices": {"jit_compile": True, "virtual_devices": 2},
}


@pytest.mark.parametrize("name", small.slow_but(*list(SHARED)[:4], of=SHARED))
def test_a_clipped_gradient_is_that_of_the_weighted_mean(train: engine.Train, name: str) -> None:
    state = train(weighted_hooks(clip), **small.settings(4, **SHARED[name]))
    expected = train_plainly(clip, 4)
    compare.assert_close(state.train_model.weights, expected)
    assert not np.allclose(expected[0], train_plainly(tf.identity, 4)[0], atol=1e-3)


def test_elements_that_are_shares_are_weighed_before_they_are_computed(train: engine.Train) -> None:
    """Each element of four rows, an example, is the share of a micro-batch or a device."""
    hooks = weighted_hooks(
        clip,
        create_dataset=lambda: small.slices(weighted_data())(4),
        count_examples=lambda batch: 1,
    )
    settings = {"batch_size": 4, "accumulate_steps": 2, "virtual_devices": 2}
    state = train(hooks, **small.settings(4, **settings))
    compare.assert_close(state.train_model.weights, train_plainly(clip, 4))


@pytest.mark.cluster
def test_two_processes_weigh_the_batch_first(tmp_path: Path) -> None:
    source = "from tests.golden import test_backward_pass as program\n"
    source += "globals().update(vars(program.weighted_hooks(program.clip)))\n"
    (tmp_path / "callbacks.py").write_text(source)
    words = ["--steps=4", f"--batch-size={small.BATCH}", f"--learning-rate={small.RATE}"]
    words += ["--workers=2", "--accumulate-steps=2", "--run-name=run"]
    outcome = engine.command(tmp_path, "train", *words)
    assert outcome.returncode == 0, outcome.stderr
    saved = tf.train.Checkpoint(train_model=small.model_with(Changed(clip)))
    saved.read(str(tmp_path / "runs/run/ckpt/ckpt-4")).expect_partial()
    compare.assert_close(saved.train_model.weights, train_plainly(clip, 4))


def test_bits_of_clipped_gradients_do_not_depend_on_devices(train: engine.Train) -> None:
    settings = small.settings(3, logical_replicas=3)
    one, three = (
        train(weighted_hooks(clip), **settings, virtual_devices=devices, run_name=str(devices))
        for devices in (1, 3)
    )
    compare.assert_same(three.train_model.weights, one.train_model.weights)


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_weight_that_is_not_positive_wins_over_the_gradient_function(
    train: engine.Train, weight: float
) -> None:
    """No weight gives no gradient, and a negative weight gives NaN."""
    hooks = weighted_hooks(
        lambda gradient: 1.0 + tf.where(tf.math.is_finite(gradient), gradient, 0.0),
        batch_weight=lambda batch: weight * tf.cast(tf.shape(batch[0])[0], tf.float32),
    )
    state = train(hooks, **small.settings(1), on_nan="ignore")
    expected = small.model_with(Changed(clip)).get_weights()
    if weight < 0:
        expected = [np.full_like(values, np.nan) for values in expected]
    compare.assert_same(state.train_model.weights, expected)


@pytest.mark.parametrize("name", small.slow_but("one device", of=("one device", "three devices")))
def test_a_weight_of_the_output_is_known_before_the_backward_pass(
    train: engine.Train, name: str
) -> None:
    hooks = weighted_hooks(clip, batch_weight=weigh_output)
    state = train(hooks, **small.settings(4, **SHARED[name]))
    compare.assert_close(state.train_model.weights, train_plainly(clip, 4))


@pytest.mark.parametrize("setting", ["accumulate_steps", "logical_replicas"])
def test_a_weight_of_the_output_is_refused_if_it_is_known_too_late(
    train: engine.Train, setting: str
) -> None:
    hooks = weighted_hooks(clip, batch_weight=weigh_output)
    line = rf"^create_model \(test_backward_pass.py:{find_line('pass_on(inputs)')}\): .*{setting}"
    with pytest.raises(ctl_core.SetupError, match=line):
        train(hooks, **{**small.settings(1), setting: 2})


def test_a_linear_gradient_function_trains_with_a_late_weight(train: engine.Train) -> None:
    def halve(gradient: Any) -> Any:
        return 0.5 * gradient

    hooks = weighted_hooks(halve, batch_weight=weigh_output)
    state = train(hooks, **small.settings(4, accumulate_steps=2))
    compare.assert_close(state.train_model.weights, train_plainly(halve, 4))


def test_a_gradient_function_with_noise_is_reported_if_the_weight_is_late(
    train: engine.Train, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_noise(gradient: Any) -> Any:
        return gradient + tf.random.stateless_normal(tf.shape(gradient), [1, 2])  # here

    hooks = weighted_hooks(add_noise, batch_weight=weigh_output)
    state = train(hooks, **small.settings(1, accumulate_steps=2))
    line = f"create_model (test_backward_pass.py:{find_line('stateless_normal')}): the backward"
    assert state.step == 1
    assert f"warning: {line}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_check_in_float16_says_that_gradients_are_scaled(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ctl_core.Config(**small.settings(4, precision="float16"), runs_dir=str(runs))
    with contextlib.suppress(ctl_core.SetupError):  # a gradient may overflow on one device only
        ctl_core.check(weighted_hooks(clip), config)
    line = f"test_backward_pass.py:{find_line('pass_on(inputs)')}): the backward pass is not linear"
    assert line in capsys.readouterr().out
