"""``detect_anomaly``: the first NaN or infinity is named, with layer, hook, line and examples."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl_core.errors import RunError
from ctl_core.numerics import precision
from tests.helpers.cases import (
    assert_weights,
    dropout_model,
    exact_hooks,
    kept_hooks,
    make_hooks,
    regression_data,
    sequence_hooks,
    sgd,
    sliced,
)
from tests.helpers.fixtures import Train
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import FLAGS, PIECES, Cli, failed, mistakes, source_of, where

BATCH = 16
# Of 40 examples in batches of 8, the one of index 5 in the second batch is 0.
DATA = PIECES["imports"].replace("y = x.sum", "x[13] = 0.0\ny = x.sum")
PROGRAMS = mistakes(
    """
== a custom normalisation
class Norm(keras.layers.Layer):
    def call(self, inputs):
        size = tf.reduce_sum(inputs, 1, keepdims=True)
        return inputs / size  # here
def create_model():
    return keras.Sequential([keras.Input((2,)), Norm(name="norm"), keras.layers.Dense(1)])
-> step 2: NaN first arises in RealDiv of the layer sequential/norm, create_model ( | example 5 of
== a subclassed model
class Norm(keras.layers.Layer):
    def call(self, inputs):
        return inputs * tf.math.rsqrt(tf.reduce_sum(inputs**2, 1, keepdims=True))  # here
class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [Norm(name="norm"), keras.layers.Dense(1)]
    def call(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs
create_model = Net
-> step 2: infinity first arises in Rsqrt of the layer net/norm, create_model ( | example 5 of
== a nested functional model
class Norm(keras.layers.Layer):
    def call(self, inputs):
        return inputs / tf.reduce_max(tf.abs(inputs), 1, keepdims=True)  # here
def create_model():
    inputs = keras.Input((2,))
    layers = [keras.layers.Dense(3, use_bias=False), Norm(name="norm")]
    hidden = keras.Sequential(layers, name="encoder")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))
-> step 2: NaN first arises in RealDiv of the layer encoder/norm, create_model ( | example 5 of
== a tf.Module
class Net(tf.Module):
    def __init__(self):
        self.kernel = tf.Variable([[0.5], [0.5]])
    def __call__(self, inputs):
        direction = inputs / tf.norm(inputs, axis=1, keepdims=True)  # here
        return direction @ self.kernel
create_model = Net
-> step 2: NaN first arises in RealDiv, create_model ( | example 5 of
== a layer that is a tf.function
class Logarithm(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones")
    @tf.function
    def call(self, inputs):
        return tf.math.log(self.factor * inputs)  # here
def create_model():
    return keras.Sequential([keras.Input((2,)), Logarithm(name="log"), keras.layers.Dense(1)])
x[:] += 0.1
x[13] = 0.0
data = tf.data.Dataset.from_tensor_slices((x, y))
-> step 2: infinity first arises in Log of the layer sequential/log, create_model ( | example 5 of
== a tf.function that needs AutoGraph
@tf.function
def scaled(inputs):
    if tf.reduce_any(inputs > 0.0):
        inputs = inputs * 2.0
    return tf.math.log(inputs)
class Logarithm(keras.layers.Layer):
    def call(self, inputs):
        return scaled(inputs)  # here
def create_model():
    return keras.Sequential([keras.Input((2,)), Logarithm(name="log"), keras.layers.Dense(1)])
x[:] += 0.1
x[13] = 0.0
data = tf.data.Dataset.from_tensor_slices((x, y))
-> step 2: infinity first arises in | PartitionedCall of the layer sequential/log | example 5 of
== the root of zero
class Root(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones")
    def call(self, inputs):
        return tf.sqrt(self.factor * inputs)  # here
def create_model():
    return keras.Sequential([keras.Input((2,)), Root(name="root"), keras.layers.Dense(1)])
x[:] += 0.1
x[13] = 0.0
data = tf.data.Dataset.from_tensor_slices((x, y))
-> infinity first arises in the gradient of Sqrt of the layer sequential/root | example 5 of
-> tf.sqrt(tf.maximum(x, 1e-12))
== a value that tf.where masks
class Safe(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones")
    def call(self, inputs):
        logarithm = tf.math.log(self.factor * inputs)  # here
        return tf.where(inputs > 0.0, logarithm, 0.0)
def create_model():
    return keras.Sequential([keras.Input((2,)), Safe(name="safe"), keras.layers.Dense(1)])
x[:] += 0.1
x[13] = 0.0
data = tf.data.Dataset.from_tensor_slices((x, y))
-> NaN first arises in the gradient of Log of the layer sequential/safe | example 5 of
-> tf.where masks its value, but not its gradient
== attention to nothing
class Attention(keras.layers.Layer):
    def call(self, inputs):
        scores = tf.where(inputs > 0.0, inputs, -np.inf)
        return inputs * tf.nn.softmax(scores)  # here
def create_model():
    return keras.Sequential([keras.Input((2,)), Attention(name="attend"), keras.layers.Dense(1)])
x[:] += 0.1
x[13] = 0.0
data = tf.data.Dataset.from_tensor_slices((x, y))
-> step 2: NaN first arises in Softmax of the layer sequential/attend | example 5 of | mask with
== a cross-entropy by hand
def create_loss():
    def loss(pair):
        chance = tf.nn.sigmoid(1000.0 * pair[0][:, 0])
        truth = tf.cast(pair[1][:, 0] > 1.0, tf.float32)
        return -truth * tf.math.log(chance) - (1 - truth) * tf.math.log(1 - chance)  # here
    return loss
-> infinity first arises in Log, create_loss ( | with_logits
== a mean over nothing
def create_loss():
    def loss(pair):
        chosen = tf.boolean_mask(pair[0], pair[1] > 1e6)
        return tf.reduce_mean(chosen)  # here
    return loss
-> step 1: NaN first arises in Mean, create_loss ( | the mean of nothing
== input_pre
def input_pre(batch):
    inputs = batch[0]
    return inputs / tf.reduce_max(inputs, 1, keepdims=True)  # here
-> step 2: NaN first arises in RealDiv, input_pre ( | example 5 of
== what a pooling hides
class Norm(keras.layers.Layer):
    def call(self, inputs):
        return inputs / tf.reduce_sum(inputs, 1, keepdims=True)  # here
def create_model():
    layers = [Norm(name="norm"), keras.layers.Reshape((2, 1)), keras.layers.MaxPooling1D(2)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(1, kernel_initializer="ones")]
    return keras.Sequential([keras.Input((2,)), *layers, keras.layers.Rescaling(2.0)])
-> step 2: NaN first arises in RealDiv of the layer sequential/norm, create_model ( | example 5 of
== loss_pre
def loss_pre(output, batch):
    return output, tf.math.log(batch[1])  # here
-> step 2: infinity first arises in Log, loss_pre ( | example 5 of
== grad_pre
def grad_pre(loss, train_model):
    kernel, bias = train_model.trainable_variables
    return loss, tf.norm(bias), [kernel, bias]  # here
-> step 1: infinity first arises in the gradient of Sqrt, grad_pre ( | (the batch is in
== update_pre
def update_pre(gradients):
    size = tf.linalg.global_norm(gradients)
    return [g / (size - size) for g in gradients], gradients  # here
-> step 1: | first arises in RealDiv, update_pre ( | (the batch is in
== missing values
x[13, 1] = np.nan
data = tf.data.Dataset.from_tensor_slices((x, y))
def create_dataset(per_replica_batch_size):  # here
    return data.batch(per_replica_batch_size, drop_remainder=True)
-> step 2: create_dataset ( | batch_0 of the batch has NaN, for example 5 of | missing values
== missing values that a pooling takes no notice of
x[13, 1] = np.nan
data = tf.data.Dataset.from_tensor_slices((x, y))
def create_dataset(per_replica_batch_size):  # here
    return data.batch(per_replica_batch_size, drop_remainder=True)
def create_model():
    layers = [keras.layers.Reshape((2, 1)), keras.layers.Conv1D(2, 1, activation="gelu")]
    layers += [keras.layers.Conv1D(2, 1, activation="gelu"), keras.layers.MaxPooling1D(2)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((2,)), *layers])
-> step 2: create_dataset ( | batch_0 of the batch has NaN, for example 5 of | missing values
== a rate that explodes
def create_opt():  # here
    return keras.optimizers.SGD(1e38)
def update_pre(gradients):
    return [1e6 * g for g in gradients], gradients
-> step 1: the update, by create_opt ( | gives sequential/dense/ | of finite gradients (global norm
== a host hook
def spoil(train_model):
    train_model.layers[0].kernel.assign([[np.nan], [0.0]])
every_steps = {3: spoil}
-> step 4: sequential/dense/kernel has NaN before the step, by a hook that assigns it
"""
)


def mostly_slow(programs: Iterable[str]) -> list[Any]:
    """A third of the programs is for every day."""
    slow = [pytest.mark.slow]
    return [pytest.param(name, marks=slow * (n % 3 > 0)) for n, name in enumerate(programs)]


@pytest.mark.parametrize("name", mostly_slow(PROGRAMS))
def test_hook_layer_line_and_examples_of(cli: Cli, name: str) -> None:
    code, words = PROGRAMS[name]
    source = source_of(imports=DATA, program=code)
    outcome = cli(source, "--detect-anomaly")
    failed(outcome, *words, where(source))
    assert len([file for file in outcome.written if file.startswith("runs/a/anomaly-")]) == 1


class Inverse(keras.layers.Layer):
    """Divides by what the first two features differ in."""

    def call(self, inputs: Any) -> Any:
        return inputs / (inputs[:, :1] - inputs[:, 1:2])


def inverse_model() -> keras.Model:
    return keras.Sequential(
        [keras.Input((5,)), Inverse(name="inverse"), keras.layers.Dense(1, name="out")]
    )


def bad_data(*examples: int) -> Any:
    """Data of which these examples have no inverse."""
    inputs, target = (part.copy() for part in regression_data())
    inputs[list(examples), 0] = inputs[list(examples), 1]
    return sliced((inputs, target))


@pytest.mark.parametrize(("replicas", "accumulate"), [(2, 2), (4, 1)])
@pytest.mark.slow
def test_examples_of_replicas_and_micro_batches(
    train: Train, tmp_path: Path, replicas: int, accumulate: int
) -> None:
    hooks = make_hooks(create_dataset=bad_data(33, 46), create_model=inverse_model)
    settings = {"virtual_devices": replicas, "accumulate_steps": accumulate}
    found = "step 3: infinity first arises in RealDiv of the layer sequential/inverse, .*"
    with pytest.raises(RunError, match=f"{found} for examples 1, 14 of the global batch"):
        train(hooks, detect_anomaly=True, **settings)
    kept = np.load(tmp_path / "runs/run/anomaly-3.npz")
    np.testing.assert_array_equal(kept["anomaly.found"], [1, 14])
    np.testing.assert_array_equal(kept["anomaly.examples"], np.arange(BATCH))
    inputs = kept["batch_0"]
    assert inputs.shape == (BATCH, 5)
    np.testing.assert_array_equal(inputs[[1, 14], 0], inputs[[1, 14], 1])
    np.testing.assert_array_equal(kept["batch_1"], regression_data()[1][32:48])


def noisy_hooks() -> Any:
    return make_hooks(create_model=dropout_model, create_opt=sgd)


def several_hooks() -> Any:
    """Two objectives, with turns, of which one freezes a layer on the way."""

    def grad_pre(loss: Any, train_model: Any, objective: Any) -> Any:
        layer = train_model.layers[0 if objective == "first" else 1]
        return loss, 0.0, layer.trainable_variables

    def freeze(train_model: Any) -> None:
        train_model.layers[0].trainable = False

    return make_hooks(
        turns=["first", "second", "first"],
        grad_pre=grad_pre,
        create_opt=lambda lr: {n: keras.optimizers.Adam(lr) for n in ("first", "second")},
        at_step={12: freeze},
    )


HEALTHY: dict[str, tuple[Any, dict[str, Any]]] = {
    "nadam": (lambda: exact_hooks("nadam"), {}),
    "two replicas": (lambda: exact_hooks("nadam"), {"virtual_devices": 2}),
    "micro-batches": (lambda: exact_hooks("sgd"), {"accumulate_steps": 2, "virtual_devices": 2}),
    "noise": (noisy_hooks, {"virtual_devices": 2}),
    "sparse gradients": (sequence_hooks, {"batch_size": 4}),
    "last batch": (lambda: kept_hooks("plain"), {"last_batch": "keep", "virtual_devices": 2}),
    "turns": (several_hooks, {"lr_schedule": "cosine"}),
    "float16": (lambda: make_hooks(create_opt=sgd), {"precision": "float16"}),
}


@pytest.mark.parametrize("name", mostly_slow(HEALTHY))
def test_a_run_without_any_has_the_same_weights(
    train: Train, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(precision, "INITIAL", 2.0**40)  # float16 skips some updates
    make, settings = HEALTHY[name]
    settings = {"deterministic": True, **settings}
    hooks = make()
    if settings.get("accumulate_steps"):  # the last step of a graph call may round otherwise
        hooks.every_steps = {1: lambda loss: None}
    plain = train(hooks, run_name="plain", **settings)
    looked_at = train(make(), run_name="looked-at", detect_anomaly=True, **settings)
    assert_weights(looked_at, plain, rtol=0)
    if scale := plain.context.loss_scale:
        assert float(scale.scale.numpy()) < 2.0**40
    assert not list(Path(looked_at.run_dir).glob("anomaly*"))


def test_what_is_infinite_and_masked_is_none(train: Train) -> None:
    class Attention(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            best = tf.reduce_max(inputs, 1, keepdims=True)
            logarithm = tf.where(inputs > 0.0, tf.math.log(tf.nn.relu(inputs)), 0.0)
            return logarithm + tf.nn.softmax(tf.where(inputs >= best, inputs, -np.inf))

    def create_model() -> keras.Model:
        return keras.Sequential([keras.Input((5,)), Attention(), keras.layers.Dense(1)])

    assert train(make_hooks(create_model=create_model), detect_anomaly=True).step == 20


def test_an_objective_among_several_in_its_second_turn(train: Train) -> None:
    """Each turn has the weights that the one before has left."""

    def grad_pre(loss: Any, train_model: Any, turn: Any) -> Any:
        bias = train_model.trainable_variables[-1]
        if turn == 1:  # the first turn has made it 1
            loss = loss / (1.0 - bias[0])
        return loss, 0.0, [bias]

    def update_pre(gradients: Any, train_model: Any, turn: Any) -> Any:
        bias = train_model.trainable_variables[-1]
        gradients = [bias - 1.0] if turn == 0 else gradients
        return gradients, gradients

    hooks = make_hooks(
        turns=["one", "two"],
        grad_pre=grad_pre,
        update_pre=update_pre,
        create_opt=lambda lr: {n: keras.optimizers.SGD(1.0) for n in ("one", "two")},
    )
    with pytest.raises(RunError, match=r"step 1: infinity first arises in RealDiv, grad_pre \("):
        train(hooks, detect_anomaly=True)


def test_the_first_step_of_a_resumed_run(train: Train) -> None:
    hooks = make_hooks(create_dataset=bad_data(33), create_model=inverse_model)
    train(hooks, steps=2)
    with pytest.raises(RunError, match=r"step 3: infinity .* for example 1 of the global batch"):
        train(hooks, detect_anomaly=True)


@pytest.mark.slow
def test_a_share_without_examples_is_none(train: Train) -> None:
    """The last batch has one example, so that the second replica has a stand-in."""
    inputs, target = (part[:25].copy() for part in regression_data())
    inputs[24, 0] = inputs[24, 1]

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((inputs, target)).batch(per_replica_batch_size)

    hooks = make_hooks(create_dataset=create_dataset, create_model=inverse_model)
    settings = {"last_batch": "keep", "virtual_devices": 2, "batch_size": 24}
    found = "step 2: infinity first arises in RealDiv .* for example 0 of the global batch"
    with pytest.raises(RunError, match=found):
        train(hooks, detect_anomaly=True, **settings)


class Large(keras.layers.Layer):
    """Is beyond what float16 holds: itself, or its gradient only."""

    def __init__(self, forward: bool) -> None:
        super().__init__(name="large")
        self.forward = forward

    def call(self, inputs: Any) -> Any:
        if self.forward:
            return 2.0 * (60000.0 * (inputs / inputs)) * inputs

        @tf.custom_gradient
        def steep(value: Any) -> Any:
            return value, lambda upstream: upstream / upstream * 60000.0 * 2.0

        return steep(inputs)


@pytest.mark.slow
def test_what_a_replica_has_got_from_another(train: Train) -> None:
    """The one of the second replica reaches the first by statistics over both."""

    def create_model() -> keras.Model:
        norm = keras.layers.BatchNormalization(synchronized=True)
        layers = [keras.Input((5,)), Inverse(name="inverse"), norm, keras.layers.Dense(1)]
        return keras.Sequential(layers)

    hooks = make_hooks(create_dataset=bad_data(45), create_model=create_model)
    found = "step 3: infinity first arises in RealDiv of the layer sequential/inverse, .*"
    with pytest.raises(RunError, match=f"{found} for example 13 of the global batch"):
        train(hooks, detect_anomaly=True, virtual_devices=2)


@pytest.mark.cluster
def test_two_processes_end_and_say_the_same(tmp_path: Path) -> None:
    """The second has the example; the first gets its NaN by statistics over both."""
    program = """
class Norm(keras.layers.Layer):
    def call(self, inputs):
        return inputs / tf.reduce_sum(inputs, 1, keepdims=True)  # here
def create_model():
    norm = keras.layers.BatchNormalization(synchronized=True)
    return keras.Sequential([keras.Input((2,)), Norm(name="norm"), norm, keras.layers.Dense(1)])
"""
    source = source_of(imports=DATA, program=program)
    (tmp_path / "callbacks.py").write_text(source)
    flags = ["--workers", "2", "--detect-anomaly", "--deterministic"]
    command = [sys.executable, "-m", "ctl_core", "train", *FLAGS, *flags]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    said = (
        "step 2: NaN first arises in RealDiv of the layer sequential/norm, create_model "
        f"({where(source)}), for example 5 of the global batch, which is in "
        "runs/a/anomaly-2-worker-1.npz"
    )
    logs = [tmp_path / "runs/a" / name for name in ("train.log", "worker-1.log")]
    assert all(said in text for text in (done.stderr, *(log.read_text() for log in logs)))
    kept = np.load(tmp_path / "runs/a/anomaly-2-worker-1.npz")
    assert kept["anomaly.found"].tolist() == [5] and not kept["batch_0"][1].any()


@pytest.mark.parametrize("forward", [True, False])
def test_float16(train: Train, forward: bool) -> None:
    def create_model() -> keras.Model:
        first = keras.layers.Dense(5, name="first")
        return keras.Sequential([keras.Input((5,)), first, Large(forward), keras.layers.Dense(1)])

    hooks = make_hooks(create_model=create_model)
    what = "" if forward else "the gradient of "
    found = (
        f"step 1: infinity first arises in {what}\\w+ of the layer sequential/large, create_model"
    )
    with pytest.raises(RunError, match=f"{found}.* float16 holds no number above 65504"):
        train(hooks, detect_anomaly=True, precision="float16")


def test_what_is_not_so_a_second_time(train: Train) -> None:
    called: list[int] = []

    def unlucky(value: Any) -> Any:
        called.append(1)
        return value * (np.nan if len(called) == 3 else 1.0)

    def input_pre(batch: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(unlucky, [batch[0]], tf.float32), [None, 5])

    with pytest.raises(RunError, match="step 3: the loss is not finite, but all is when the step"):
        train(make_hooks(input_pre=input_pre), detect_anomaly=True)


def test_it_is_refused_with_jit_compile(cli: Cli) -> None:
    for jit in ("--jit-compile", "--jit-compile=auto"):
        outcome = cli(source_of(), "--detect-anomaly", jit)
        assert outcome.code == 2 and not outcome.written
        assert "error: detect_anomaly: looks at each op, of which jit_compile" in outcome.err
