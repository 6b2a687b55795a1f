"""What fails while it runs: the run ends with one line, and goes on once the mistake is mended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.errors import brief
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train
from tests.helpers.project import (
    Cli,
    failed,
    line_of,
    mistakes,
    source_of,
    where,
)

# Bugs, as in test_errors.py. Each fails after the checkpoint of step 5.
BUGS = mistakes(
    r"""
== a host hook
def watch(step, loss):
    if step == 7:
        raise ValueError("seven\nis too much")  # here
every_steps = {1: watch}
-> every_steps[1] | ValueError: seven is too much
== a helper of a host hook
def helper(step):
    return tf.linalg.inv(tf.zeros([2, step]))  # here
def watch(step):
    helper(step)
at_step = {7: watch}
-> at_step[7] | InvalidArgumentError: Input matrix must be square
== a graph hook that is traced again
broken = []
def input_pre(batch):
    if broken:
        raise KeyError("seventh")  # here
    return batch[0]
at_step = {6: lambda: broken.append(1)}
every_steps = {7: lambda loss: None}
-> input_pre | KeyError: 'seventh' | [batch: (float32[8, 2], float32[8, 1])]
== an op of a graph hook
def input_pre(batch, lr):
    tf.debugging.assert_less(lr.value, 1.0, message="too fast")  # here
    return batch[0]
at_step = {7: lambda lr: lr.assign(2.0)}
-> input_pre | InvalidArgumentError | too fast | after step 7
== Python in an op of a graph hook
def check(value):
    if value > 1:
        raise RuntimeError("too fast")  # here
    return value
def input_pre(batch, lr):
    tf.numpy_function(check, [lr.value], tf.float32)
    return batch[0]
at_step = {7: lambda lr: lr.assign(2.0)}
-> input_pre | RuntimeError: too fast | after step 7
== an op of the pipeline
def check(number, pair):
    tf.debugging.assert_less(number, tf.constant(6, tf.int64), message="torn")
    return pair
def create_dataset():  # here
    return data.repeat(3).batch(8, True).enumerate().map(check)
-> create_dataset | InvalidArgumentError | torn
== Python in the pipeline
def check(number):
    if number == 6:
        raise OSError("no such image")  # here
    return number
def read(number, pair):
    with tf.control_dependencies([tf.numpy_function(check, [number], tf.int64)]):
        return tf.nest.map_structure(tf.identity, pair)
def create_dataset():
    return data.repeat(3).batch(8, True).enumerate().map(read)
-> create_dataset | OSError: no such image
"""
)


@pytest.mark.parametrize("bug", BUGS)
def test_a_hook_that_fails_while_training(cli: Cli, tmp_path: Path, bug: str) -> None:
    code, words = BUGS[bug]
    source = source_of(own=code)
    flags = ("--ckpt-every", "5", "--seed", "3")
    outcome = cli(source, *flags)
    failed(outcome, where(source), *words)
    log = (tmp_path / "runs" / "a" / "train.log").read_text()
    assert "ERROR" in log and "Traceback (most recent call last)" in log
    assert outcome.err.removeprefix("error: ") in log

    outcome = cli(None, *flags, "--debug")
    assert outcome.code == 1
    assert "Traceback (most recent call last)" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("error: ")

    outcome = cli(source_of(), *flags)
    assert (outcome.code, outcome.err) == (0, "")
    assert "resuming at step 5" in outcome.out
    assert cli(None, *flags, "--run-name", "whole").code == 0
    resumed, whole = variables(tmp_path / "runs" / "a"), variables(tmp_path / "runs" / "whole")
    assert resumed.keys() == whole.keys() and len(resumed) > 4
    for name, value in whole.items():
        np.testing.assert_allclose(resumed[name], value, rtol=1e-6, err_msg=name)


def variables(run: Path) -> dict[str, np.ndarray]:
    """Reads what the checkpoint of step 10 holds: model, optimizer, step, lr."""
    reader = tf.train.load_checkpoint(str(run / "ckpt" / "ckpt-10"))
    names = {n for n in reader.get_variable_to_shape_map() if n.endswith("VARIABLE_VALUE")}
    return {name: reader.get_tensor(name) for name in names if "save_counter" not in name}


# Where only full batches fit; the loss is one number per example.
FACTORS = """
FACTORS = np.arange(8, dtype="float32")[:, None]
def create_loss():
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2, 1)
def create_eval_dataset():
    return data.take(19).batch(8)
"""
FULL_ONLY = mistakes(
    """
== the loss
def create_loss():
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) * FACTORS, 1)  # here
-> the model or the loss (callbacks.py:
== a hook
def eval_pre(loss):
    return loss * FACTORS[:, 0], 0.0  # here
-> eval_pre (callbacks.py:
"""
)


@pytest.mark.parametrize("devices", ["1", "2"])
@pytest.mark.parametrize("name", FULL_ONLY)
def test_a_small_last_evaluation_batch_that_does_not_fit(cli: Cli, name: str, devices: str) -> None:
    code, (words,) = FULL_ONLY[name]
    source = source_of(own=FACTORS + code)
    flags = ("--virtual-devices", devices, "--batch-size", str(8 * int(devices)))
    outcome = cli(source, *flags)
    data = f"create_eval_dataset (callbacks.py:{line_of(source, 'def create_eval_dataset')})"
    few = f"{data}: the last evaluation batch has 3 examples, not 8, which do not fit: {words}"
    failed(outcome, few, "write tf.shape(batch[0])[0]")
    if devices == "1":  # TensorFlow tells the line of one device's ops only
        assert where(source) in outcome.err


def test_a_small_last_batch_of_a_reader_that_is_made_anew(cli: Cli) -> None:
    own = FACTORS.replace("return data.take(19).batch(8)", "return iter([*data.take(19).batch(8)])")
    outcome = cli(source_of(own=own + FULL_ONLY["the loss"][0]))
    failed(outcome, "the last evaluation batch has 3 examples, not 8, which do not fit")


def test_an_evaluation_that_fails_on_full_batches_does_not_blame_the_last_one(cli: Cli) -> None:
    code = FULL_ONLY["the loss"][0].replace("(pair[0] - pair[1])", "pair[0]")
    outcome = cli(source_of(own=FACTORS.replace("batch(8)", "batch(7)") + code))
    failed(outcome, "Incompatible shapes: ", "[7,1]")
    assert "last evaluation batch" not in outcome.err


def test_a_failing_op_of_the_evaluation(cli: Cli) -> None:
    pieces = {
        "own": "def check(a, b):\n"
        '    tf.debugging.assert_less(a, 0.5, message="too bright")\n'
        "    return a, b\n\n"
        "def create_eval_dataset():\n"
        "    return data.batch(8).map(check)\n"
    }
    source = source_of(**pieces)
    where = f"create_eval_dataset (callbacks.py:{line_of(source, 'def create_eval_dataset')})"
    failed(cli(source), where, "too bright")


EVAL = "create_eval_dataset = create_dataset\n"


def test_a_metric_that_is_no_number(cli: Cli) -> None:
    own = EVAL + (
        "def create_metrics():\n    return {'f1': keras.metrics.F1Score()}\n\n"
        "def metric_pre(batch):\n    return tf.one_hot([0, 1], 3), tf.one_hot([0, 1], 3)\n"
    )
    failed(cli(source_of(own=own)), "create_metrics", "'f1'", "shape [3]")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("loss=output", ("ValueError: loss must be a scalar, got shape [8, 1]",)),
        ("loss='much'", ("ValueError: loss must be a number, got 'much'",)),
        ("split=1.0", ("ValueError", "split")),
    ],
)
def test_a_report_of_something_else_than_numbers(
    cli: Cli, value: str, words: tuple[str, ...]
) -> None:
    watch = f"def watch(step, output):\n    ctl_core.report(step, {value})\n\n"
    source = source_of(every_steps=watch + "every_steps = {1: watch}\n")
    line = line_of(source, "ctl_core.report")
    failed(cli(source), f"every_steps[1] (callbacks.py:{line})", *words)


def test_from_python_the_same_errors_are_exceptions(train: Train) -> None:
    with pytest.raises(
        ctl_core.SetupError, match=r"grad_pre \(test_errors_running.py:\d+\): returned 2"
    ):
        train(make_hooks(grad_pre=lambda loss: (loss, 0.0)))

    def fail(step: int) -> None:
        raise LookupError(step)

    with pytest.raises(ctl_core.RunError, match=r"at_step\[2\] .*: LookupError: 2") as caught:
        train(make_hooks(at_step={2: fail}), run_name="other")
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_message_is_what_is_left_without_tensorflows_and_keras_wrapping() -> None:
    @tf.function
    def raising(value: tf.Tensor) -> Any:
        def refuse(_: Any) -> None:
            raise LookupError(f"{value.dtype.name} is [[too]] much")

        return [tf.numpy_function(refuse, [value + n], tf.float32) for n in (1.0, 2.0)]

    @tf.function
    def asserting(value: tf.Tensor) -> None:
        tf.debugging.assert_less(value, 0.0, message="too much")

    class Layer(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            raise ValueError("what a layer has to say")

    one = tf.constant([[1.0]])
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: Layer()(keras.Input((1,))),
            "ValueError: Exception encountered when calling Layer.call(). what a layer has to say",
        ),
        (lambda: raising(one), "LookupError: float32 is [[too]] much"),
        (lambda: asserting(one), "InvalidArgumentError: assertion failed: [too much] ["),
        (lambda: tf.linalg.inv(tf.zeros([2, 3])), "InvalidArgumentError: Input matrix must be sq"),
        (
            lambda: tf.data.Dataset.range(1).map(lambda n: n.nothing),
            "AttributeError: 'SymbolicTensor' object has no attribute 'nothing'",
        ),
        (lambda: os.environ["NO SUCH"], "KeyError: 'NO SUCH'"),
        (lambda: next(iter([])), "StopIteration"),
        (lambda: float("two\nlines"), "ValueError: could not convert string to float: 'two"),
    ]
    for call, expected in cases:
        with pytest.raises(BaseException) as caught:
            call()
        line = brief(caught.value)
        assert line.startswith(expected), line
        assert "\n" not in line and "{{" not in line and "Graph execution" not in line
