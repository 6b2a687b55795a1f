"""What bad input gets: one line that says what, where and what to do, and the right exit code.

Each test writes a small project, runs the real command line in this process, and looks for the
line number that it finds itself in the text it wrote.
"""

from __future__ import annotations

import functools
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
from tests.helpers.cases import make_hooks, sliced, small_model
from tests.helpers.fixtures import Train
from tests.helpers.project import PIECES, Cli, failed, files, line_of, refused, source_of


def test_the_project_trains(cli: Cli) -> None:
    """Otherwise the tests below would test nothing."""
    outcome = cli(source_of())
    assert (outcome.code, outcome.err) == (0, "")
    assert "runs/a/ckpt/ckpt-10.index" in outcome.written


EVAL = "create_eval_dataset = create_dataset\n"
METRIC = 'def create_metrics():\n    return {"mse": keras.metrics.MeanSquaredError()}\n'

# Replaced pieces, the line that must be named (if any), and words of the message.
HOOKS: dict[str, tuple[dict[str, str | None], str, tuple[str, ...]]] = {
    "a required hook is missing": (
        {"create_loss": None},
        "",
        ("callbacks.py: create_loss still to be written", "def create_loss()", "train_loss"),
    ),
    "a required hook is misspelt": (
        {"create_model": "def create_modell():\n    pass\n"},
        "",
        ("create_model still to be written", "create_modell"),
    ),
    "no function": ({"own": "create_opt = 3\n"}, "", ("create_opt must be a function, got 3",)),
    "None": ({"own": "input_pre = None\n"}, "", ("input_pre must be a function, got None",)),
    "unknown argument": (
        {"own": "def input_pre(bacth):\n    return bacth[0]\n"},
        "def input_pre",
        ("input_pre asks for 'bacth'; did you mean 'batch'?", "batch, lr, config, hparams"),
    ),
    "an argument of another hook": (
        {"own": "def input_pre(*, optimizer):\n    pass\n"},
        "def input_pre",
        ("input_pre asks for 'optimizer'; it may name batch, lr, config, hparams",),
    ),
    "two of three from grad_pre": (
        {"own": "def grad_pre(loss):\n    return loss, 0.0\n"},
        "def grad_pre",
        (
            "grad_pre",
            "returned 2 values, expected 3: loss_per_batch, extra_loss, trainable_vars",
        ),
    ),
    "nothing from grad_pre": (
        {"own": "def grad_pre(loss):\n    pass\n"},
        "def grad_pre",
        ("grad_pre", "expected 3"),
    ),
    "no list of variables from grad_pre": (
        {"own": "def grad_pre(loss):\n    return loss, 0.0, None\n"},
        "def grad_pre",
        ("grad_pre", "trainable_vars"),
    ),
    "a vector as extra_loss": (
        {"own": "def grad_pre(loss):\n    return loss, [1.0, 2.0], []\n"},
        "def grad_pre",
        ("grad_pre", "extra_loss must be a scalar"),
    ),
    "a loss for each example from add_loss": (
        {
            "create_model": "class Sparse(keras.layers.Layer):\n"
            "    def call(self, x):\n"
            "        self.add_loss(tf.abs(x))\n"
            "        return x\n"
            "def create_model():\n"
            "    inner = keras.Sequential([Sparse(name='sparse'), keras.layers.Dense(1)])\n"
            "    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), inner])\n"
        },
        "def create_model",
        (
            "create_model",
            "the layer ",
            "sparse adds a loss of shape (8, 1) by add_loss; expected "
            "one number, such as the mean over its batch: self.add_loss(tf.reduce_mean(loss)).",
        ),
    ),
    "one value from update_pre": (
        {"own": "def update_pre(gradients):\n    return (gradients,)\n"},
        "def update_pre",
        ("update_pre", "returned 1 values, expected 2: update_gradients, display_gradients"),
    ),
    "the bare gradients from update_pre": (
        {"own": "def update_pre(gradients):\n    return gradients\n"},
        "def update_pre",
        ("update_pre", "update_gradients"),
    ),
    "a gradient too few from update_pre": (
        {"own": "def update_pre(gradients):\n    return gradients[:1], gradients\n"},
        "def update_pre",
        ("update_pre", "returned 1 update_gradients for 2 gradients"),
    ),
    "gradients of another shape from update_pre": (
        {"own": "def update_pre(gradients):\n    return [gradients[0][0]] * 2, gradients\n"},
        "def update_pre",
        ("update_pre", "dense/kernel", "(2, 1)"),
    ),
    "an integer in trainable_vars": (
        {
            "own": "count = tf.Variable(0, name='count')\n"
            "def grad_pre(loss, train_model):\n"
            "    return loss, 0.0, [*train_model.trainable_variables, count]\n"
        },
        "def grad_pre",
        ("grad_pre", "trainable_vars has count of type int32", "leave it out"),
    ),
    "integer gradients from update_pre": (
        {
            "own": "def update_pre(gradients):\n"
            "    return [tf.cast(one, tf.int32) for one in gradients], gradients\n"
        },
        "def update_pre",
        ("update_pre", "the gradient of", "dense/kernel has type int32, expected"),
    ),
    "an integer loss": (
        {
            "create_loss": "def create_loss():\n"
            "    return lambda pair: tf.cast(pair[0][:, 0], tf.int64)\n"
        },
        "def create_loss",
        ("create_loss", "type int64", "expected floating-point numbers"),
    ),
    "one value from eval_pre": (
        {"own": EVAL + "def eval_pre(loss):\n    return loss\n"},
        "def eval_pre",
        ("eval_pre", "expected 2: loss_per_batch, extra_loss"),
    ),
    "eval_pre raises": (
        {"own": EVAL + "def eval_pre(loss):\n    return loss.nothing\n"},
        "return loss.nothing",
        ("eval_pre", "AttributeError", "'nothing'"),
    ),
    "too little for a metric": (
        {"own": EVAL + METRIC + "def metric_pre(batch):\n    return batch[0]\n"},
        "def metric_pre",
        ("metric_pre", "'mse'", "y_pred"),
    ),
    "metrics that are no dict": (
        {"own": EVAL + 'def create_metrics():\n    return ["accuracy"]\n'},
        "def create_metrics",
        ("create_metrics", "returned a list", "dict"),
    ),
    "metrics by another name than a text": (
        {"own": EVAL + "def create_metrics():\n    return {1: keras.metrics.Mean()}\n"},
        "def create_metrics",
        ("create_metrics", "1 is an int"),
    ),
    "an endless evaluation": (
        {"own": "def create_eval_dataset():\n    return data.batch(8).repeat()\n"},
        "def create_eval_dataset",
        ("create_eval_dataset", "endless", "repeat()"),
    ),
    "no pair from create_ckpt": (
        {"own": "def create_ckpt(step):\n    return tf.train.Checkpoint(step=step)\n"},
        "def create_ckpt",
        ("create_ckpt", "expected 2: ckpt, manager"),
    ),
    "ckpt and manager swapped": (
        {
            "own": "def create_ckpt(step, ckpt_path):\n"
            "    ckpt = tf.train.Checkpoint(step=step)\n"
            "    return tf.train.CheckpointManager(ckpt, ckpt_path, 3), ckpt\n"
        },
        "def create_ckpt",
        ("create_ckpt", "returned a CheckpointManager and a Checkpoint, expected"),
    ),
    "no dataset": (
        {"create_dataset": "def create_dataset():\n    return x\n"},
        "def create_dataset",
        ("create_dataset", "returned a ndarray, expected a tf.data.Dataset"),
    ),
    "nothing from create_dataset": (
        {"create_dataset": "def create_dataset():\n    pass\n"},
        "def create_dataset",
        ("create_dataset", "returned nothing, expected a tf.data.Dataset"),
    ),
    "batches of another size": (
        {"create_dataset": "def create_dataset():\n    return data.batch(5)\n"},
        "def create_dataset",
        ("create_dataset", "batches of 5", "expected batches of 8"),
    ),
    "batches of another fixed size": (
        {"create_dataset": "def create_dataset():\n    return data.batch(4, True)\n"},
        "def create_dataset",
        ("create_dataset", "batches of 4", "expected batches of 8"),
    ),
    "single examples": (
        {"create_dataset": "def create_dataset():\n    return tf.data.Dataset.range(99)\n"},
        "def create_dataset",
        ("create_dataset", "single examples", "dataset.batch(per_replica_batch_size)"),
    ),
    "make_batches with another size": (
        {"own": "def make_batches(dataset):\n    return dataset.unbatch().batch(3)\n"},
        "def make_batches",
        ("make_batches", "batches of 3", "expected batches of 8"),
    ),
    "make_batches that ends": (
        {"own": "def make_batches(dataset):\n    return dataset.take(4)\n"},
        "def make_batches",
        ("make_batches", "ends after 4 elements"),
    ),
    "an empty dataset": (
        {"create_dataset": "def create_dataset():\n    return data.take(0).batch(8)\n"},
        "def create_dataset",
        ("create_dataset", "empty dataset"),
    ),
    "fewer examples than a batch": (
        {"create_dataset": "def create_dataset():\n    return data.take(7).batch(8, True)\n"},
        "def create_dataset",
        ("create_dataset", "fewer examples than one global batch"),
    ),
    "a filter that leaves nothing": (
        {
            "create_dataset": "def create_dataset():\n"
            "    nothing = data.filter(lambda a, b: tf.reduce_sum(a) < 0)\n"
            "    return nothing.batch(8, drop_remainder=True)\n"
        },
        "def create_dataset",
        ("create_dataset", "empty dataset"),
    ),
    "an error in Dataset.map": (
        {
            "create_dataset": "def wrong(a, b):\n"
            "    return a.nothing, b\n"
            "def create_dataset():\n"
            "    return data.map(wrong).batch(8)\n"
        },
        "return a.nothing",
        ("create_dataset", "AttributeError", "'nothing'"),
    ),
    "a Keras loss that averages": (
        {"create_loss": "def create_loss():\n    return keras.losses.MeanSquaredError()\n"},
        "def create_loss",
        ("create_loss", "MeanSquaredError", 'reduction="sum" or reduction="none"'),
    ),
    "a Keras loss as it is": (
        {
            "create_loss": "def create_loss():\n"
            '    return keras.losses.MeanSquaredError(reduction="none")\n'
        },
        "def create_loss",
        ("create_loss", "MeanSquaredError", "y_true", "return lambda pair: loss(pair[1], pair[0])"),
    ),
    "a loss over two dimensions": (
        {"create_loss": "def create_loss():\n    return lambda p: (p[0] - p[1]) ** 2\n"},
        "def create_loss",
        ("create_loss", "shape (8, 1)", "one per example (shape [8])", "sum (shape [])"),
    ),
    "a loss of another length": (
        {"create_loss": "def create_loss():\n    return lambda p: p[0][:5, 0]\n"},
        "def create_loss",
        ("create_loss", "shape (5,)", "one per example (shape [8])"),
    ),
    "a loss of whole numbers": (
        {"create_loss": "def create_loss():\n    return lambda p: 3\n"},
        "def create_loss",
        ("create_loss", "type int32", "floating-point"),
    ),
    "a loss that is nothing": (
        {"create_loss": "def create_loss():\n    return lambda p: None\n"},
        "def create_loss",
        ("create_loss", "the loss is nothing"),
    ),
    "a loss that is a dict": (
        {"create_loss": 'def create_loss():\n    return lambda p: {"a": p[0]}\n'},
        "def create_loss",
        ("create_loss", "the loss is a dict"),
    ),
    "the class of a loss": (
        {"create_loss": "def create_loss():\n    return keras.losses.MeanSquaredError\n"},
        "def create_loss",
        ("create_loss", "returned the class MeanSquaredError"),
    ),
    "the name of a loss": (
        {"create_loss": 'def create_loss():\n    return "mse"\n'},
        "def create_loss",
        ("create_loss", "returned a str, expected train_loss, a callable"),
    ),
    "no model": (
        {"create_model": "def create_model():\n    keras.Sequential()\n"},
        "def create_model",
        ("create_model", "returned nothing, expected train_model, a callable"),
    ),
    "a model of other data": (
        {
            "create_model": "def create_model():\n"
            "    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        },
        "def create_model",
        ("train_model", "create_model", "expected axis -1 of input shape to have value 3"),
    ),
    "outputs in a dict and a loss that knows of none": (
        {
            "create_model": "def create_model():\n"
            "    inputs = keras.Input((2,))\n"
            '    return keras.Model(inputs, {"a": keras.layers.Dense(1)(inputs)})\n'
        },
        "return lambda pair",
        ("train_loss", "create_loss", "TypeError"),
    ),
    "the name of an optimizer": (
        {"own": 'def create_opt():\n    return "adam"\n'},
        "def create_opt",
        ("create_opt", "returned a str, expected an optimizer"),
    ),
    "the class of an optimizer": (
        {"own": "def create_opt():\n    return keras.optimizers.Adam\n"},
        "def create_opt",
        ("create_opt", "returned the class Adam", "expected an optimizer"),
    ),
    "an optimizer that refuses its arguments": (
        {"own": "def create_opt(lr):\n    return keras.optimizers.SGD(lr, momentum=3)\n"},
        "momentum=3",
        ("create_opt", "ValueError", "momentum"),
    ),
    "objectives of other names": (
        {"own": 'def create_opt():\n    return {"a": keras.optimizers.SGD()}\n'},
        "",
        ("grad_pre", "create_opt", "'a'", "the names must be the same"),
    ),
    "every_steps with the key 0": (
        {"every_steps": "every_steps = {0: lambda: None}\n"},
        "",
        ("every_steps has the key 0", "whole number from 1 up"),
    ),
    "every_steps with a negative key": (
        {"every_steps": "every_steps = {-5: lambda: None}\n"},
        "",
        ("every_steps has the key -5", "whole number from 1 up"),
    ),
    "every_steps with a text as key": (
        {"every_steps": 'every_steps = {"10": lambda: None}\n'},
        "",
        ("every_steps has the key '10'", "whole number from 1 up"),
    ),
    "every_steps with True as key": (
        {"every_steps": "every_steps = {True: lambda: None}\n"},
        "",
        ("every_steps has the key True", "whole number from 1 up"),
    ),
    "at_step with a fraction as key": (
        {"own": "at_step = {1.5: lambda: None}\n"},
        "",
        ("at_step has the key 1.5", "whole number from 1 up"),
    ),
    "every_steps that is no dict": (
        {"every_steps": "every_steps = [print]\n"},
        "",
        ("every_steps must be a dict {N: function}, got [<built-in function print>]",),
    ),
    "a call in place of a function": (
        {"every_steps": "every_steps = {7: ctl_core.nan_to_zero(1.0)}\n"},
        "",
        ("every_steps[7] must be a function, got ",),
    ),
    "an unknown argument in every_steps": (
        {"every_steps": "def show(los):\n    pass\n\nevery_steps = {7: [show]}\n"},
        "def show",
        ("every_steps[7] asks for 'los'; did you mean 'loss'?",),
    ),
    "a deferred function that needs a value": (
        {
            "every_steps": "@ctl_core.deferred\ndef show(loss):\n    pass\n\n"
            "every_steps = {7: show}\n"
        },
        "@ctl_core.deferred",
        ("every_steps[7]", "@deferred and asks for 'loss'"),
    ),
    "*args": (
        {"own": "def input_pre(*args):\n    return args[0]\n"},
        "def input_pre",
        ("input_pre takes *args", "by name", "batch, lr"),
    ),
    "**kwargs": (
        {"own": "def input_pre(**kwargs):\n    return kwargs\n"},
        "def input_pre",
        ("input_pre takes **kwargs", "by name", "batch, lr"),
    ),
    "positional only": (
        {"own": "def input_pre(batch, /):\n    return batch[0]\n"},
        "def input_pre",
        ("input_pre takes batch by position", "by name"),
    ),
    "a builtin": (
        {"every_steps": "every_steps = {7: print}\n"},
        "",
        ("callbacks.py: every_steps[7] takes *args", "by name"),
    ),
    "a builtin without a signature": (
        {"every_steps": "every_steps = {7: max}\n"},
        "",
        ("callbacks.py: every_steps[7] has no signature", "wrap it in a function"),
    ),
    "Python's if in a model": (
        {
            "create_model": "class Model(tf.Module):\n"
            "    def __call__(self, inputs):\n"
            "        return inputs if tf.reduce_sum(inputs) > 0 else -inputs\n\n"
            "create_model = Model\n"
        },
        "return inputs if",
        ("train_model", "create_model", "OperatorNotAllowedInGraphError", "Python `bool`"),
    ),
    "an error under AutoGraph": (
        {
            "own": "def input_pre(batch):\n"
            "    inputs = batch[0]\n"
            "    if tf.reduce_mean(inputs) > 0:\n"
            "        inputs = inputs.nothing\n"
            "    return inputs\n"
        },
        "inputs = inputs.nothing",
        ("input_pre", "'nothing'", "[batch: (float32[8, 2], float32[8, 1])]"),
    ),
    "an error in a helper under AutoGraph": (
        {
            "own": "def helper(inputs):\n"
            "    if tf.reduce_mean(inputs) > 0:\n"
            "        inputs = inputs.nothing\n"
            "    return inputs\n\n"
            "def input_pre(batch):\n"
            "    return helper(batch[0])\n"
        },
        "inputs = inputs.nothing",
        ("input_pre", "'nothing'"),
    ),
    "a batch that the default does not expect": (
        {
            "create_dataset": "def create_dataset():\n"
            "    return data.map(lambda a, b: a).batch(8, True)\n"
        },
        "",
        ("input_pre (the engine's default)", "[batch: float32[8, 2]]"),
    ),
}


@pytest.mark.parametrize("case", HOOKS)
def test_hooks(cli: Cli, case: str) -> None:
    pieces, fragment, words = HOOKS[case]
    source = source_of(**pieces)
    where = f"callbacks.py:{line_of(source, fragment)}" if fragment else ""
    outcome = cli(source)
    refused(outcome, where, *words)
    assert "\x1b" not in outcome.err


def test_a_batch_that_the_replicas_cannot_share(cli: Cli) -> None:
    refused(cli(source_of(), "--virtual-devices", "3"), "batch_size: 8", "3 replicas")


def test_too_few_examples_for_the_replicas(cli: Cli) -> None:
    pieces = {"create_dataset": PIECES["create_dataset"].replace("data.", "data.take(6).")}
    outcome = cli(source_of(**pieces), "--batch-size", "16", "--virtual-devices", "4")
    refused(outcome, "create_dataset", "fewer than one global batch of 16", "batch_size")


# A config file, then words of the message.
CONFIGS: dict[str, tuple[str, ...]] = {
    "bacth_size: 8": ("config.yaml", "unknown setting 'bacth_size'", "'batch_size'"),
    "batch-size: 8": ("config.yaml", "unknown setting 'batch-size'", "'batch_size'"),
    "3: 8": ("config.yaml", "unknown setting 3"),
    "seed: many": ("config.yaml: seed: expected a whole number from 0 up, got 'many'",),
    "seed: 3.5": ("config.yaml: seed: expected a whole number from 0 up, got 3.5",),
    "seed: true": ("config.yaml: seed: expected a whole number from 0 up, got True",),
    "seed: [1]": ("config.yaml: seed: expected a whole number from 0 up, got [1]",),
    "seed: -1": ("config.yaml: seed: expected a whole number from 0 up, got -1",),
    "seed: 4294967296": ("seed: ", "below 2**32, got 4294967296"),
    "learning_rate: fast": ("config.yaml: learning_rate: expected a number above 0, got 'fast'",),
    "learning_rate: 0": ("learning_rate: expected a number above 0, got 0",),
    "learning_rate: .nan": ("learning_rate: expected a number above 0, got nan",),
    "deterministic: maybe": ("config.yaml: deterministic: expected true or false, got 'maybe'",),
    "strategy: tpu": ("config.yaml: strategy: expected one of auto, one_device", "got 'tpu'"),
    "strategy: one_device\nvirtual_devices: 2": ("strategy: one_device", "virtual_devices is 2"),
    "runs_dir: ''": ("runs_dir: expected the name of a folder, got ''",),
    "runs_dir: 2024": (
        "config.yaml: runs_dir: expected the name of a folder, in quotes if",
        "got 2024",
    ),
    "hparams: 3": ("config.yaml: hparams: expected names with values, got 3",),
    "hparams: {1: 2}": ("hparams: 1 has the value 2", "expected a name"),
    "steps: [": ("config.yaml: line 1, column 9: no valid YAML",),
    "steps: 3: 4": ("config.yaml: line 1, column 9: no valid YAML",),
    "\tsteps: 3": ("config.yaml: line 1, column 1: no valid YAML", "'\\t'"),
    "steps: !!python/name:os.system": ("config.yaml: line 1, column 8: no valid YAML",),
    "steps: \x01": ("config.yaml: no valid YAML", "#x0001"),
    "just words": ("config.yaml: expected lines of the form 'name: value', got 'just words'",),
    "- steps": ("config.yaml: expected lines of the form 'name: value', got ['steps']",),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_config_files(cli: Cli, config: str) -> None:
    outcome = cli(source_of(), config=config)
    refused(outcome, *CONFIGS[config])
    assert not outcome.written


FLAG_CASES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--bacth-size", "8"): ("unknown setting --bacth-size; did you mean '--batch-size'?",),
    ("--batch_size", "8"): ("unknown setting --batch_size; did you mean '--batch-size'?",),
    ("--batch-size",): ("--batch-size: expected a value",),
    ("--batch-size", "x"): ("batch_size: expected a whole number from 1 up, got 'x'",),
    ("--batch-size", ""): ("batch_size: expected a whole number from 1 up, got ''",),
    ("--batch-size", "0"): ("batch_size: expected a whole number from 1 up, got 0",),
    ("--steps", "99999999999999999999"): ("steps: ", "below 2**63"),
    ("--learning-rate", "-1"): ("learning_rate: expected a number above 0, got -1",),
    ("--deterministic=yes",): ("--deterministic takes no value", "--no-deterministic"),
    ("--deterministic", "yes"): ("unexpected word 'yes'",),
    ("--strategy", "tpu"): ("strategy: expected one of auto, one_device", "got 'tpu'"),
    ("--epochs", "2"): ("steps and epochs: give one of the two, got steps=10 and epochs=2",),
    ("--run-name", " "): ("run_name: expected a folder name", "got ' '"),
    ("--run-name", ""): ("run_name: expected a folder name", "got ''"),
    ("--run-name", "../a"): ("run_name: expected a folder name", "got '../a'"),
    ("--run-name", "a" * 300): ("run_name: expected a folder name", "at most 200 of them"),
    ("--config", "missing.yaml"): ("missing.yaml: there is no such settings file",),
    ("--config", "."): (".: cannot be read as a settings file", "Is a directory"),
    ("--hparams", "3"): ("--hparams: expected names with values, got 3",),
    ("--hparams.width",): ("--hparams.width: expected a name and a value",),
    ("--hparams..width", "3"): ("--hparams..width: expected a name and a value",),
    ("--checkpoint", "3"): ("unknown setting --checkpoint",),
    ("words",): ("unexpected word 'words'", "--name value"),
}


@pytest.mark.parametrize("flags", FLAG_CASES)
def test_flags(cli: Cli, flags: tuple[str, ...]) -> None:
    outcome = cli(source_of(), *flags)
    refused(outcome, *FLAG_CASES[flags])
    assert not outcome.written


ENVIRONMENT: dict[tuple[str, str], tuple[str, ...]] = {
    ("CTL_BACTH_SIZE", "8"): ("CTL_BACTH_SIZE", "did you mean 'CTL_BATCH_SIZE'?"),
    ("CTL_", "8"): ("unknown setting CTL_ in the environment",),
    ("CTL_SEED", "x"): ("CTL_SEED: expected a whole number from 0 up, got 'x'",),
    ("CTL_SEED", "-1"): ("CTL_SEED: expected a whole number from 0 up, got -1",),
    ("CTL_DEBUG", "banana"): ("CTL_DEBUG: expected true or false, got 'banana'",),
    ("CTL_STRATEGY", "tpu"): ("CTL_STRATEGY: expected one of auto, one_device", "got 'tpu'"),
    ("CTL_HPARAMS", "a"): ("CTL_HPARAMS: expected names with values, got 'a'",),
    ("CTL_CONFIG", "missing.yaml"): ("missing.yaml: there is no such settings file",),
}


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]) -> None:
    monkeypatch.setenv(*variable)
    outcome = cli(source_of())
    refused(outcome, *ENVIRONMENT[variable])
    assert not outcome.written


FACTORS = "FACTORS = np.arange(8, dtype='float32')[:, None]\n"
# What takes full batches only, the line to be named, and what is said of it.
FULL_ONLY: dict[str, tuple[dict[str, str], str, str]] = {
    "the loss": (
        {
            "create_loss": "def create_loss():\n"
            "    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) * FACTORS, 1)\n"
        },
        "return lambda",
        "which do not fit: the model or the loss (callbacks.py:",
    ),
    "a hook": (
        {"own": "def eval_pre(loss):\n    return loss * FACTORS[:, 0], 0.0\n"},
        "return loss * FACTORS",
        "which do not fit: eval_pre (callbacks.py:",
    ),
}


@pytest.mark.parametrize("devices", ["1", "2"])
@pytest.mark.parametrize("name", FULL_ONLY)
def test_a_small_last_evaluation_batch_that_does_not_fit(cli: Cli, name: str, devices: str) -> None:
    pieces, fragment, words = FULL_ONLY[name]
    evaluation = "def create_eval_dataset():\n    return data.take(19).batch(8)\n"
    loss = "def create_loss():\n    return lambda pair: tf.reduce_sum((pair[0] - pair[1])**2, 1)\n"
    source = source_of(
        **{"factors": FACTORS, "create_loss": loss, "evaluation": evaluation, **pieces}
    )
    flags = ("--virtual-devices", devices, "--batch-size", str(8 * int(devices)))
    outcome = cli(source, *flags)
    where = f"create_eval_dataset (callbacks.py:{line_of(source, 'def create_eval_dataset')})"
    few = f"{where}: the last evaluation batch has 3 examples, not 8, {words}"
    failed(outcome, few, "write tf.shape(batch[0])[0]")
    if devices == "1":  # TensorFlow tells the line of one device's ops only
        assert f"callbacks.py:{line_of(source, fragment)}" in outcome.err


def test_an_evaluation_that_fails_on_full_batches_does_not_blame_the_last_one(cli: Cli) -> None:
    loss = "def create_loss():\n    return lambda p: tf.reduce_sum(p[0] * FACTORS, 1)\n"
    evaluation = "def create_eval_dataset():\n    return data.take(19).batch(7)\n"
    outcome = cli(source_of(factors=FACTORS, create_loss=loss, evaluation=evaluation))
    failed(outcome, "Incompatible shapes: ", "[7,1]")
    assert "last evaluation batch" not in outcome.err


def test_no_length_of_training(cli: Cli) -> None:
    refused(cli(source_of(), command=("train",)), "steps: say how long to train")


def test_a_config_file_that_is_a_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    refused(cli(source_of()), "config.yaml: cannot be read", "Is a directory")


def test_a_config_file_in_another_encoding(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"run_name: \xe4\n")
    refused(cli(source_of()), "config.yaml: cannot be read", "utf-8")


# A callbacks.py that cannot be imported, then words of the message.
IMPORTS: dict[str | bytes, tuple[str, ...]] = {
    "x = 1\ndef f(:\n": ("callbacks.py:2: SyntaxError: ",),
    "def f():\npass\n": ("callbacks.py:2: IndentationError: ",),
    "def f():\n\tif 1:\n        pass\n": ("callbacks.py:3: TabError: ",),
    b"x = 1\0": ("callbacks.py: ", "null bytes"),
    b"x = '\xe4'\n": ("callbacks.py:1: SyntaxError: ", "utf-8"),
    b"# -*- coding: foo -*-\n": ("callbacks.py", "SyntaxError: ", "foo"),
    "import os\nimport not_there\n": (
        "callbacks.py:2: ModuleNotFoundError: No module named 'not_there'",
    ),
    "from os import nothing\n": ("callbacks.py:1: ImportError: ", "'nothing'"),
    "\nimport helper\n": ("callbacks.py:2: ZeroDivisionError",),
    "\nimport wrong\n": ("wrong.py:2: SyntaxError",),
    "raise ValueError('two\\nlines')\n": ("callbacks.py:1: ValueError: two lines",),
    "\n\nassert False\n": ("callbacks.py:3: AssertionError",),
    "def f():\n    f()\nf()\n": ("callbacks.py:2: RecursionError",),
    "import sys\nsys.exit(0)\n": ("callbacks.py:2: SystemExit: 0",),
    "": ("callbacks.py: create_dataset, create_model, create_loss still to be written",),
}


@pytest.mark.parametrize("source", IMPORTS, ids=repr)
def test_a_callbacks_file_that_cannot_be_imported(
    cli: Cli, tmp_path: Path, source: str | bytes
) -> None:
    (tmp_path / "helper.py").write_text("1 / 0\n")
    (tmp_path / "wrong.py").write_text("\nx = (\n")
    refused(cli(source), *IMPORTS[source])


def test_no_callbacks_file(cli: Cli, tmp_path: Path) -> None:
    refused(cli(None), "no file callbacks.py in", str(tmp_path))
    (tmp_path / "callbacks.py").mkdir()
    refused(cli(None), "no file callbacks.py in", str(tmp_path))


@pytest.mark.parametrize("change", ["windows", "old mac", "byte order mark", "prints"])
def test_a_callbacks_file_that_is_odd_but_right(cli: Cli, change: str) -> None:
    text = source_of()
    source = {
        "windows": text.replace("\n", "\r\n").encode(),
        "old mac": text.replace("\n", "\r").encode(),
        "byte order mark": b"\xef\xbb\xbf" + text.encode(),
        "prints": text.encode() + b"print('hello from callbacks')\n",
    }[change]
    outcome = cli(source, "--steps", "1")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("hello from callbacks\n") == (change == "prints")


@pytest.mark.parametrize("name", ["runs", "runs/a", "runs/a/train.log/x", "runs/a/config.yaml/x"])
def test_a_run_folder_that_cannot_be_written(cli: Cli, tmp_path: Path, name: str) -> None:
    """A file stands where a folder should, or a folder where a file should."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("in the way")
    refused(cli(source_of()), "runs/a: the run folder cannot be written", "choose another")
    assert (tmp_path / name).read_text() == "in the way"


def test_a_checkpoint_that_does_not_fit_any_more(cli: Cli, tmp_path: Path) -> None:
    assert cli(source_of(), "--steps", "2").code == 0
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    changed = PIECES["create_model"].replace("Dense(1,", "Dense(1, use_bias=False,")
    outcome = cli(source_of(create_model=changed))
    refused(outcome, "runs/a/ckpt/ckpt-2", "does not fit the model any more", "dense/bias is gone")
    for name in before.keys() - {"callbacks.py", "runs/a/train.log"}:
        assert (tmp_path / name).read_bytes() == before[name], name
    assert cli(source_of()).code == 0, "with the old model it goes on"


# Pieces with a bug, the line to be named, words of the message, and the same pieces mended. Each
# fails after the checkpoint of step 5.
BUGS: dict[str, tuple[dict[str, str], str, tuple[str, ...], dict[str, str]]] = {
    "a host hook": (
        {
            "every_steps": "def watch(step, loss):\n"
            "    if step == 7:\n"
            '        raise ValueError("seven\\nis too much")\n\n'
            "every_steps = {1: watch}\n"
        },
        "raise ValueError",
        ("every_steps[1]", "ValueError: seven is too much"),
        {"every_steps": "def watch(step, loss):\n    pass\n\nevery_steps = {1: watch}\n"},
    ),
    "a helper of a host hook": (
        {
            "every_steps": "def helper(step):\n"
            "    return tf.linalg.inv(tf.zeros([2, step]))\n\n"
            "def watch(step):\n"
            "    helper(step)\n\n"
            "at_step = {7: watch}\n"
        },
        "return tf.linalg.inv",
        ("at_step[7]", "InvalidArgumentError: Input matrix must be square"),
        {"every_steps": "every_steps = {}\n"},
    ),
    "a graph hook that is traced again": (
        {
            "every_steps": "broken = []\n\n"
            "def input_pre(batch):\n"
            "    if broken:\n"
            '        raise KeyError("seventh")\n'
            "    return batch[0]\n\n"
            "at_step = {6: lambda: broken.append(1)}\n"
            "every_steps = {7: lambda loss: None}\n"
        },
        "raise KeyError",
        ("input_pre", "KeyError: 'seventh'", "[batch: (float32[8, 2], float32[8, 1])]"),
        {"every_steps": "every_steps = {7: lambda loss: None}\n"},
    ),
    "an op of a graph hook": (
        {
            "every_steps": "def input_pre(batch, lr):\n"
            '    tf.debugging.assert_less(lr.value, 1.0, message="too fast")\n'
            "    return batch[0]\n\n"
            "at_step = {7: lambda lr: lr.assign(2.0)}\n"
        },
        "tf.debugging.assert_less",
        ("input_pre", "InvalidArgumentError", "too fast", "after step 7"),
        {"every_steps": "every_steps = {}\n"},
    ),
    "Python in an op of a graph hook": (
        {
            "every_steps": "def check(value):\n"
            "    if value > 1:\n"
            '        raise RuntimeError("too fast")\n'
            "    return value\n\n"
            "def input_pre(batch, lr):\n"
            "    tf.numpy_function(check, [lr.value], tf.float32)\n"
            "    return batch[0]\n\n"
            "at_step = {7: lambda lr: lr.assign(2.0)}\n"
        },
        "raise RuntimeError",
        ("input_pre", "RuntimeError: too fast", "after step 7"),
        {"every_steps": "every_steps = {}\n"},
    ),
    "an op of the pipeline": (
        {
            "create_dataset": "def check(number, pair):\n"
            '    tf.debugging.assert_less(number, tf.constant(6, tf.int64), message="torn")\n'
            "    return pair\n\n"
            "def create_dataset():\n"
            "    return data.repeat(3).batch(8, True).enumerate().map(check)\n"
        },
        "def create_dataset",
        ("create_dataset", "InvalidArgumentError", "torn"),
        {},
    ),
    "Python in the pipeline": (
        {
            "create_dataset": "def check(number):\n"
            "    if number == 6:\n"
            '        raise OSError("no such image")\n'
            "    return number\n\n"
            "def read(number, pair):\n"
            "    with tf.control_dependencies([tf.numpy_function(check, [number], tf.int64)]):\n"
            "        return tf.nest.map_structure(tf.identity, pair)\n\n"
            "def create_dataset():\n"
            "    return data.repeat(3).batch(8, True).enumerate().map(read)\n"
        },
        "raise OSError",
        ("create_dataset", "OSError: no such image"),
        {},
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_hook_that_fails_while_training(cli: Cli, tmp_path: Path, bug: str) -> None:
    pieces, fragment, words, mended = BUGS[bug]
    source = source_of(**pieces)
    flags = ("--ckpt-every", "5", "--seed", "3")
    outcome = cli(source, *flags)
    failed(outcome, f"callbacks.py:{line_of(source, fragment)}", *words)
    log = (tmp_path / "runs" / "a" / "train.log").read_text()
    assert "ERROR" in log and "Traceback (most recent call last)" in log
    assert outcome.err.removeprefix("error: ") in log

    outcome = cli(None, *flags, "--debug")
    assert outcome.code == 1
    assert "Traceback (most recent call last)" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("error: ")

    outcome = cli(source_of(**mended), *flags)
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


def test_debug_may_stand_in_the_config_file(cli: Cli) -> None:
    source = source_of(create_model="def create_model():\n    pass\n")
    outcome = cli(source, config="debug: true")
    assert outcome.code == 2 and "Traceback (most recent call last)" in outcome.err
    refused(cli(source, "--no-debug"), "create_model")


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


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("every_step = {}", "every_steps"),
        ("at_steps = {}", "at_step"),
        ("def grad_prep(loss): pass", "grad_pre"),
        ("def create_optimizer(lr): pass", "create_opt"),
        ("def create_checkpoint(step): pass", "create_ckpt"),
        ("def create_layers(width): pass", None),
        ("every = 10", None),
        ("import collections as every_step", None),
    ],
)
def test_a_slip_in_a_name_gives_a_warning(cli: Cli, name: str, hook: str | None) -> None:
    outcome = cli(source_of(own=name), "--steps", "1")
    warnings = [line for line in outcome.out.splitlines() if line.startswith("warning: ")]
    assert (outcome.code, outcome.err, len(warnings)) == (0, "", 0 if hook is None else 1)
    if hook is not None:
        assert f"is no hook and is not used; did you mean {hook}?" in warnings[0]


def doubled(batch: Any, factor: float = 2.0) -> Any:
    """An input_pre with a default argument and an ``if`` that only AutoGraph can trace."""
    inputs = batch[0]
    if tf.reduce_sum(inputs**2) > 0.0:
        inputs = inputs * factor
    return inputs


class Doubler:
    """Hooks that are a callable object and methods."""

    factor = 2.0

    def __call__(self, batch: Any) -> Any:
        return doubled(batch, self.factor)

    def method(self, batch: Any) -> Any:
        inputs = batch[0]
        if tf.reduce_sum(inputs**2) > 0.0:
            inputs = inputs * self.factor
        return inputs

    @classmethod
    def of_class(cls, batch: Any) -> Any:
        return doubled(batch, cls.factor)

    @staticmethod
    def static(batch: Any) -> Any:
        return doubled(batch)


def halved_first(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator whose work must not get lost."""

    @functools.wraps(hook)
    def wrapper(batch: Any) -> Any:
        return hook(batch=(batch[0] / 2.0, batch[1]))

    return wrapper


def quadrupled(batch: Any) -> Any:
    return doubled(batch, 4.0)


KINDS: dict[str, Callable[..., Any]] = {
    "function": doubled,
    "lambda": lambda batch: doubled(batch),
    "keyword only": lambda *, batch: doubled(batch),
    "partial": functools.partial(doubled, factor=2.0),
    "tf.function": tf.function(doubled),
    "object": Doubler(),
    "method": Doubler().method,
    "class method": Doubler.of_class,
    "static method": Doubler.static,
    "partial of a method": functools.partial(Doubler().method),
    "decorated": halved_first(quadrupled),
}


@pytest.fixture(scope="module")
def trained_on_doubled_inputs(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """The weights after the doubling is done in the data."""
    inputs, target = make_hooks().create_dataset(100).get_single_element()
    hooks = make_hooks(create_dataset=sliced((2.0 * inputs, target)))
    folder = str(tmp_path_factory.mktemp("doubled"))
    config = ctl_core.Config(steps=3, batch_size=16, learning_rate=0.01, runs_dir=folder)
    return ctl_core.train(hooks, config).train_model.get_weights()


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_hook_of_any_kind(
    train: Train, trained_on_doubled_inputs: list[np.ndarray], kind: str
) -> None:
    weights = train(make_hooks(input_pre=KINDS[kind]), steps=3).train_model.get_weights()
    for one, other in zip(weights, trained_on_doubled_inputs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_hooks_may_be_methods_of_one_object(
    train: Train, trained_on_doubled_inputs: list[np.ndarray]
) -> None:
    class Own(Doubler):
        every_steps: dict[int, Any] = {}  # noqa: RUF012
        input_pre = Doubler.method

        def __init__(self) -> None:
            self.losses: list[float] = []
            self.at_step = {3: self.note}

        def create_dataset(self, per_replica_batch_size: int) -> tf.data.Dataset:
            return make_hooks().create_dataset(per_replica_batch_size)

        def create_model(self) -> keras.Model:
            return small_model()

        def create_loss(self) -> Any:
            return make_hooks().create_loss()

        def note(self, loss: Any) -> None:
            self.losses.append(float(loss))

    hooks = Own()
    weights = train(hooks, steps=3).train_model.get_weights()
    for one, other in zip(weights, trained_on_doubled_inputs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert len(hooks.losses) == 1
    Own.factor = property(lambda self: self.nothing)  # type: ignore[assignment]
    with pytest.raises(ctl_core.SetupError, match=r"input_pre \(test_errors.py:\d+\): Attribute"):
        train(hooks, run_name="other")


def test_from_python_the_same_errors_are_exceptions(train: Train) -> None:
    with pytest.raises(ctl_core.SetupError, match=r"grad_pre \(test_errors.py:\d+\): returned 2"):
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

    one = tf.constant([[1.0]])
    cases: list[tuple[Callable[[], Any], str]] = [
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
