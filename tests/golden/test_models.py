"""Models of all kinds have a training mode, late variables, frozen layers and averaged weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small


class Wrapped(tf.Module):
    """A model around Keras layers that has no ``training`` argument."""

    def __init__(self, net: keras.Model) -> None:
        super().__init__()
        self.net = net

    def __call__(self, inputs: Any) -> Any:
        return self.net(inputs)


class NoArgument(keras.Model):
    """A subclassed Keras model whose ``call`` has no ``training`` argument."""

    def __init__(self, net: keras.Model) -> None:
        super().__init__()
        self.net = net

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)


class Switch(keras.layers.Layer):
    """Scales its input in training only, which shows the mode without random numbers."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs * (1.5 if training else 1.0)


@pytest.mark.parametrize(
    ("kind", "devices"),
    [(Wrapped, 2), (NoArgument, 1), (lambda net: lambda inputs: net(inputs), 2)],
)
def test_layers_train_as_in_training_and_are_evaluated_without_it(
    train_small: engine.Train, kind: Any, devices: int
) -> None:
    nets: list[keras.Model] = []

    def create_model() -> Any:
        nets[:] = [small.model_with(Switch())]
        return kind(nets[0])

    hooks = small.hooks(
        create_model=create_model,
        create_eval_dataset=small.create_eval_dataset,
        create_metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        grad_pre=lambda loss: (loss, 0.0, nets[0].trainable_variables),
    )
    state = train_small(hooks, virtual_devices=devices)
    plain = small.plain(6, model=small.model_with(Switch()))
    compare.assert_close(nets[0].weights, plain.weights)
    assert state.metrics == pytest.approx(small.errors(plain), rel=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_dropout_drops_in_training_only(
    train_small: engine.Train, devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each replica draws its own mask, and a line on the console says so."""
    seen: list[np.ndarray] = []

    def create_model() -> Wrapped:
        dense = keras.layers.Dense(64, "relu", bias_initializer="ones")
        dropout = keras.layers.Dropout(0.5, seed=1)
        return Wrapped(keras.Sequential([keras.Input((5,)), dense, dropout]))

    hooks = small.hooks(
        create_model=create_model,
        create_loss=lambda: lambda pair: tf.reduce_sum(pair[0], 1),
        input_pre=lambda batch: 0.0 * batch[0],
        create_eval_dataset=small.create_eval_dataset,
        create_metrics=lambda: {"mean": keras.metrics.Mean()},
        metric_pre=lambda output: (output,),
        every_steps={1: lambda output: seen.append(output.numpy())},
    )
    state = train_small(hooks, steps=1, learning_rate=1e-9, virtual_devices=devices)
    assert 0.3 < (seen[0] == 0).mean() < 0.7
    assert set(np.unique(seen[0].round(5))) == {0.0, 2.0}
    assert not np.array_equal(seen[0][:8], seen[0][8:])
    assert state.metrics["mean"] == pytest.approx(1.0)
    printed = "each has its own random numbers (Dropout)" in capsys.readouterr().out
    assert printed == (devices > 1)


class Residuals(tf.Module):
    """A linear model that keeps its last outputs, also in evaluations, and subtracts their mean.

    The shapes of its variables are not fixed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.zeros([small.FEATURES, 1]), shape=[None, 1])
        self.last = tf.Variable(tf.zeros([1, 1]), shape=[None, 1], trainable=False)
        self.weights = [self.kernel, self.last]

    def __call__(self, inputs: Any) -> Any:
        outputs = tf.matmul(inputs, self.kernel) - tf.reduce_mean(self.last)
        self.last.assign(outputs)
        return outputs


def test_variables_may_have_shapes_that_are_not_fixed(train_small: engine.Train) -> None:
    """They are counted, saved, restored, and unchanged after an evaluation of smaller batches."""
    hooks = small.hooks(
        create_model=Residuals, create_eval_dataset=lambda: small.create_eval_dataset(7)
    )
    settings = {"eval_every": 2, "ckpt_every": 2}
    train_small(hooks, steps=4, **settings)
    state = train_small(hooks, steps=6, **settings)
    plain = small.plain(6, model=Residuals())
    compare.assert_close(state.train_model.weights, plain.weights)
    assert state.train_model.last.shape.as_list() == [None, 1]


class Lazy(keras.Model):
    """A model whose variables are created in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(8, "tanh", kernel_initializer="ones")
        self.out = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))


def test_variables_made_at_the_first_call_are_loaded(train_small: engine.Train) -> None:
    hooks = small.hooks(create_model=Lazy, create_eval_dataset=small.create_eval_dataset)
    state = train_small(hooks)
    inputs, _ = small.data()
    expected = state.train_model(inputs).numpy()
    loaded = ctl_core.load(state.run_dir, callbacks=hooks)
    np.testing.assert_allclose(loaded(inputs), expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(Lazy()(inputs), expected)
    assert train_small(hooks).metrics == state.metrics


def test_a_layer_of_a_module_is_frozen_from_the_next_step_on(train_small: engine.Train) -> None:
    def freeze(train_model: Wrapped) -> None:
        train_model.net.layers[0].trainable = False

    seen: dict[int, list[np.ndarray]] = {}

    def note(step: int, train_model: Wrapped) -> None:
        seen[step] = train_model.net.get_weights()

    hooks = small.hooks(
        create_model=lambda: Wrapped(small.create_model()),
        at_step={3: freeze},
        every_steps={1: note},
    )
    train_small(hooks, steps=4)
    state = train_small(hooks)  # the layer stays frozen in the resumed run
    for step in (2, 3):
        assert not np.array_equal(seen[step][0], seen[step - 1][0])
    for step in (4, 5, 6):
        np.testing.assert_array_equal(seen[step][0], seen[3][0])
        assert not np.array_equal(seen[step][2], seen[step - 1][2])
    assert state.train_model.net.layers[0].trainable is False


def test_the_average_is_evaluated_and_loaded_and_the_weights_are_trained(
    train_small: engine.Train,
) -> None:
    seen: list[Any] = []
    hooks = small.hooks(
        create_eval_dataset=small.create_eval_dataset,
        after_eval=lambda train_model: seen.append(train_model.get_weights()),
    )
    for steps in (4, 6):
        state = train_small(hooks, steps=steps, ema=0.8, virtual_devices=3)
    compare.assert_close(state.train_model.weights, small.plain(6).weights)
    average = small.create_model()
    for step in range(1, 7):
        pairs = zip(average.weights, small.plain(step).weights, strict=True)
        for mean, weight in pairs:
            mean.assign(0.8 * mean + 0.2 * weight)
    assert state.metrics["loss"] == pytest.approx(small.errors(average)["loss"], rel=1e-5)
    compare.assert_close(seen[-1], average.weights)  # after_eval sees the average
    inputs, _ = small.data()
    outputs = ctl_core.load(state.run_dir, callbacks=hooks)(inputs)
    np.testing.assert_allclose(outputs, average(inputs), rtol=1e-5, atol=1e-6)


CONSTANTS = {"hidden": None, "heads": 2, "scales": (0.5, None), "name": "small"}


class Annotated(Wrapped):
    """A model whose output contains values that are not tensors."""

    def __call__(self, inputs: Any) -> Any:
        return {"y": self.net(inputs), **CONSTANTS}


ANNOTATED_HOOKS = small.hooks(
    create_model=lambda: Annotated(small.create_model()),
    loss_pre=lambda output, batch: (output["y"], batch[1]),
    metric_pre=lambda output, batch: (batch[1], output["y"]),
    create_eval_dataset=small.create_eval_dataset,
)
HOW_ANNOTATED = [
    {"virtual_devices": 3, "accumulate_steps": 2},
    {"virtual_devices": 2, "logical_replicas": 3},
    {"jit_compile": True},
    {"jit_compile": True, "virtual_devices": 2},
]


@pytest.mark.parametrize("how", small.slow_but(HOW_ANNOTATED[0], of=HOW_ANNOTATED), ids=str)
def test_an_output_contains_constants(train_small: engine.Train, how: Any) -> None:
    seen: list[Any] = []

    def update_pre(gradients: Any, output: Any) -> Any:
        scale = output["heads"] * output["scales"][0]
        return [scale * tf.convert_to_tensor(gradient) for gradient in gradients], gradients

    hooks = SimpleNamespace(**vars(ANNOTATED_HOOKS))
    hooks.every_steps = {3: lambda output: seen.append(output)}
    if "logical_replicas" not in how:  # update_pre cannot take the output of logical replicas
        hooks.update_pre = update_pre
    state = train_small(hooks, **how)
    plain = small.plain(6)
    compare.assert_close(state.train_model.net.weights, plain.weights)
    assert [{**output, "y": None} for output in seen] == [{"y": None, **CONSTANTS}] * 2
    assert all(output["y"].shape == (small.BATCH, 1) for output in seen)
    loaded = ctl_core.load(state.run_dir, callbacks=hooks)
    inputs, _ = small.data()
    output = loaded(inputs)
    np.testing.assert_allclose(output.pop("y"), plain(inputs), 1e-5, 1e-6)
    assert output == CONSTANTS


@pytest.mark.slow
def test_the_check_tries_everything_with_an_output_that_contains_constants(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ctl_core.Config(**small.settings(6), run_name="run", runs_dir=str(runs))
    hooks = SimpleNamespace(**vars(ANNOTATED_HOOKS))
    hooks.every_steps = {3: lambda output: None}
    ctl_core.check(hooks, config)
    assert "evaluate, predict, export, load: " in capsys.readouterr().out
