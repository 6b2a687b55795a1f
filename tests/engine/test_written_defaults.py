"""Tests that a default, a copy of it in callbacks.py, and a refactored copy give the same run.

The tests compare all weights bit for bit, the number of traces, and the console output. The program
clips gradients, regularizes, uses sample weights, and has NaN in one of its gradients.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.hooks.callbacks_file import HooksFile, load_callbacks
from ctl_core.hooks.load import load_hooks
from ctl_core.hooks.reference import read_default_source
from ctl_core.hooks.table import SPECS
from tests.golden import engine, small

PROGRAM = '''
import keras
import numpy as np
import tensorflow as tf

import ctl_core as ctl

TRACES = []


class Shifted(keras.Model):
    """Adds 0. In batches with a large input, the gradient of ``shift``, and no other, is NaN."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, "tanh", kernel_regularizer="l2")
        self.out = keras.layers.Dense(1)
        self.shift = self.add_weight(shape=(), initializer="zeros", name="shift")

    def call(self, inputs):
        TRACES.append("model")
        is_large = tf.reduce_any(inputs > 2.5)
        root = tf.sqrt(tf.where(is_large, 0.0 * self.shift, 1.0))
        return self.out(self.hidden(inputs)) + root - tf.where(is_large, 0.0, 1.0)


def _read(global_batch_size):
    random = np.random.default_rng(0)
    inputs = random.normal(size=(96, 5)).astype("float32")
    weights = random.uniform(size=96).astype("float32")
    targets = 30.0 * inputs[:, :1]  # far enough off that gradients are clipped
    return tf.data.Dataset.from_tensor_slices((inputs, targets, weights)).batch(global_batch_size)


create_dataset = _read
create_eval_dataset = _read


def create_model():
    model = Shifted()
    model(tf.zeros((1, 5)))
    return model


def create_loss():
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2, axis=1)


every_steps = {4: lambda step, loss: ctl.report(step, loss=loss)}
'''

# Without these, metric_pre and train_metric_pre would not be called.
METRICS = {
    "create_metrics": """
def create_metrics():
    return {"error": keras.metrics.MeanAbsoluteError()}
""",
    "create_train_metrics": """
def create_train_metrics():
    return {"train_error": keras.metrics.MeanAbsoluteError()}
""",
}

REFACTORED = {
    "create_opt": "create_opt = lambda lr: keras.optimizers.Nadam(lr, epsilon=0.001)",
    "create_ckpt": """
def create_ckpt(train_loss, train_model, optimizer, lr, step, ckpt_path):
    saved = {"step": step, "lr": lr, "optimizer": optimizer}
    checkpoint = tf.train.Checkpoint(**saved, train_model=train_model, train_loss=train_loss)
    manager = tf.train.CheckpointManager(checkpoint, ckpt_path, max_to_keep=50)
    return checkpoint, manager
""",
    "input_pre": "input_pre = lambda batch: ctl.unpack(batch)[0]",
    "loss_pre": "loss_pre = lambda output, batch: (output, ctl.unpack(batch)[1])",
    "grad_pre": '''
def grad_pre(train_model, batch, loss):
    """Weighs the loss."""
    loss_per_batch = ctl.weighted(loss, batch)
    extra_loss = ctl.regularization(train_model)
    return loss_per_batch, extra_loss, ctl.trainable_variables(train_model)
''',
    "update_pre": '''
def update_pre(gradients):
    """Removes NaN and clips."""
    without_nan = []
    for gradient in gradients:
        without_nan.append(ctl.nan_to_zero(gradient))
    update, norm = tf.clip_by_global_norm(without_nan, 10.0)
    return update, without_nan
''',
    "create_train_metrics": "create_train_metrics = lambda: dict()",
    "create_metrics": '''
def create_metrics():
    """Has no metrics."""
    metrics = {}
    return metrics
''',
    "metric_pre": '''
def metric_pre(batch, output):
    """Weighs the metrics."""
    inputs, target, sample_weight = ctl.unpack(batch)
    if sample_weight is None:
        return target, output
    return target, output, sample_weight
''',
    "train_metric_pre": """
def train_metric_pre(batch, output):
    arguments = ctl.unpack(batch)
    has_weights = arguments[2] is not None
    return (arguments[1], output, arguments[2]) if has_weights else (arguments[1], output)
""",
    "eval_pre": """
def eval_pre(train_model, batch, loss):
    extra_loss = ctl.regularization(train_model)
    return ctl.weighted(loss, batch), extra_loss
""",
}
WRITTEN = {
    name: read_default_source("metric_pre").replace("metric_pre", "train_metric_pre")
    if name == "train_metric_pre"
    else read_default_source(name)
    for name in REFACTORED
}


class Outcome(NamedTuple):
    """The results of a run that the tests compare."""

    weights: list[np.ndarray]
    traces: int
    lines: list[str]


def run(folder: Path, capsys: Any, devices: int, hooks: dict[str, str]) -> Outcome:
    """Trains the program with additional hooks, given as source code that is keyed by name."""
    folder.mkdir(exist_ok=True)
    file = folder / "callbacks.py"
    definitions = {**METRICS, **hooks}
    file.write_text("\n\n".join([PROGRAM, *filter(None, definitions.values())]) + "\n")
    callbacks = load_callbacks(HooksFile(file, file))
    settings: dict[str, Any] = {"steps": 8, "eval_every": 4, "log_every": 4}
    if devices > 1:
        settings["virtual_devices"] = devices
    capsys.readouterr()
    state = engine.train(callbacks, runs=folder / "runs", **settings)
    printed = capsys.readouterr()
    local = state.strategy.experimental_local_results
    variables = state.recording.variables.values()
    return Outcome(
        [value.numpy() for variable in variables for value in local(variable)],
        len(callbacks.TRACES),
        mask_times(printed.out + printed.err, folder),
    )


def mask_times(text: str, folder: Path) -> list[str]:
    """Splits console output into lines, and replaces speeds, times and the folder."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace("\r", "\n"))
    text = text.replace(str(folder), "FOLDER")
    number = r"[\d.,]+(e[+-]?\d+)?"
    text = re.sub(rf"{number} ?(µs|us|ms|s|min|h|steps/s|examples/s|ex/s)\b(/\w+)?", "TIME", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert len(outcome.weights) == len(expected.weights)
    for value, expected_value in zip(outcome.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(value, expected_value)
    assert outcome.traces == expected.traces
    assert outcome.lines == expected.lines


def without_metrics(names: Iterable[str]) -> dict[str, str]:
    """Returns empty definitions for the program's metric hooks that are compared."""
    return {name: "" for name in names if name in METRICS}


@pytest.mark.parametrize("devices", small.slow_but(1, of=[1, 2]))
def test_defaults_give_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], devices: int
) -> None:
    """The run is the same if all defaults are copied or refactored, in a program with metrics."""
    expected = run(tmp_path / "left_out", capsys, devices, {})
    text = "\n".join(expected.lines)
    assert "update_pre received NaN in gradients in" in text
    assert "error" in text
    for variant in (WRITTEN, REFACTORED):
        hooks = {name: source for name, source in variant.items() if name not in METRICS}
        folder = tmp_path / ("written" if variant is WRITTEN else "refactored")
        assert_same(run(folder, capsys, devices, hooks), expected)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Outcome]:
    """Returns a cache of outcomes without the default, keyed by the omitted metric hooks."""
    return {}


@pytest.mark.parametrize("name", small.slow_but(of=REFACTORED))
def test_a_default_gives_the_same_run(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    undisturbed: dict[str, Outcome],
) -> None:
    """The run is the same on one device if a single default is refactored.

    ``test_defaults_give_the_same_run`` copies and refactors all of them.
    """
    left_out = without_metrics([name])
    key = ", ".join(left_out)
    if key not in undisturbed:
        undisturbed[key] = run(tmp_path / "left_out", capsys, 1, left_out)
    outcome = run(tmp_path / "refactored", capsys, 1, {name: REFACTORED[name]})
    assert_same(outcome, undisturbed[key])


def test_every_default_is_compared() -> None:
    """All defaults are compared except plain values and data hooks, which have other tests."""
    with_default = {name for name in SPECS if read_default_source(name)} | {"train_metric_pre"}
    elsewhere = {"make_batches", "count_examples", "turns", "at_step", "every_steps"}
    assert set(REFACTORED) == with_default - elsewhere


@pytest.mark.parametrize("name", ["input_pre", "loss_pre", "grad_pre", "update_pre", "metric_pre"])
def test_defaults_trace_to_the_same_ops(name: str, tmp_path: Path) -> None:
    """AutoGraph converts copies of a default but not the default, which must not add ops."""
    file = tmp_path / "callbacks.py"
    ops: list[list[str]] = []
    for source in ("", WRITTEN[name], REFACTORED[name]):
        file.write_text(f"{PROGRAM}\n\n{source}\n")
        hooks, _ = load_hooks(load_callbacks(HooksFile(file, file)), ctl_core.Config())
        hook = getattr(hooks, name)
        assert hook.is_default == (not source)
        model = small.create_model()
        with tf.Graph().as_default() as graph:
            batch = tuple(tf.compat.v1.placeholder(tf.float32, [None, n]) for n in (5, 1))
            weights = tf.compat.v1.placeholder(tf.float32, [None])
            hook.trace(
                batch=(*batch, weights),
                output=batch[1],
                loss=weights,
                gradients=[*batch, weights],
                train_model=model,
            )
        ops.append([operation.type for operation in graph.get_operations()])
    assert ops[0] == ops[1]
    assert sorted(ops[0]) == sorted(ops[2])
