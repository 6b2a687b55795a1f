"""A run has files with known names and contents, and other programs can read them."""

import json
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml
from packaging.requirements import Requirement

import ctl_core
from tests.golden import small
from tests.golden.engine import Command

SOURCE = (
    small.CALLBACKS
    + small.EVALUATED
    + """

def create_opt(lr):
    return keras.optimizers.SGD(lr, momentum=0.5)


def create_train_metrics():
    return {"error": keras.metrics.MeanAbsoluteError()}


def report_own(step, loss):
    ctl_core.report(step, loss=loss, own=3.0)


every_steps = {2: report_own}
"""
)
FLAGS = (
    *("--steps=6", "--batch-size=16", "--learning-rate=0.05", "--run-name=a", "--seed=3"),
    *("--ckpt-every=2", "--eval-every=3", "--log-every=2", "--hparams.width=8"),
)


@pytest.fixture(scope="module")
def trained_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of a trained project, which does not exist before ``run`` is first used."""
    return tmp_path_factory.mktemp("trained") / "project"


@pytest.fixture
def run(tmp_path: Path, command: Command, trained_project: Path) -> Path:
    """Returns the folder of a run, in a copy of the project that the test may change."""
    if trained_project.exists():
        shutil.copytree(trained_project, tmp_path, dirs_exist_ok=True)
    else:
        (tmp_path / "callbacks.py").write_text(SOURCE)
        (tmp_path / "config.yaml").write_text("hparams: {width: 4, rate: 0.5}\n")
        outcome = command("train", *FLAGS)
        assert (outcome.code, outcome.err) == (0, ""), outcome
        shutil.copytree(tmp_path, trained_project)
    return tmp_path / "runs" / "a"


def trained(steps: int) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """Returns a model and its optimizer after the same training without the engine."""
    optimizer = keras.optimizers.SGD(small.RATE, momentum=0.5)
    return small.plain(steps, optimizer=optimizer), optimizer


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_files_of_a_run(run: Path) -> None:
    """A run saves its settings, hooks, log, values, environment, checkpoints and summaries."""
    names = {"config.yaml", "callbacks.py", "train.log", "metrics.jsonl", "env.json", "ckpt", "tb"}
    assert names <= {path.name for path in run.iterdir()}
    assert (run / "callbacks.py").read_text() == SOURCE

    settings = yaml.safe_load((run / "config.yaml").read_text())
    expected: dict[str, Any] = {
        "steps": 6,
        "epochs": None,
        "batch_size": 16,
        "learning_rate": 0.05,
        "seed": 3,
    }
    expected |= {"run_name": "a", "ckpt_every": 2, "hparams": {"width": 8, "rate": 0.5}}
    assert {name: settings[name] for name in expected} == expected
    assert ctl_core.load_config(run / "config.yaml") == ctl_core.Config(**settings)

    surroundings = json.loads((run / "env.json").read_text())
    assert {"started", "command", "host", "system", "devices", "versions", "commit"} <= {
        *surroundings
    }
    assert list(surroundings["command"])[1:] == ["train", *FLAGS]
    assert surroundings["versions"]["ctl_core"] == ctl_core.__version__
    assert {"python", "keras", "numpy"} <= {*surroundings["versions"]}

    # pip can install these requirements. They exclude the engine, which no package index has, and
    # the tools that every environment has.
    _, *packages = (run / "requirements.txt").read_text().splitlines()
    names = {Requirement(package).name.lower() for package in packages}
    assert f"numpy=={np.__version__}" in packages
    assert {"keras", "pyyaml"} <= names
    assert not {"ctl-core", "ctl_core", "pip", "setuptools", "wheel"} & names

    log = (run / "train.log").read_text()
    assert "INFO" in log
    assert "step 6/6  eval: loss " in log
    assert "done: step 6" in log


def test_values_of_a_run(run: Path) -> None:
    """metrics.jsonl has a line for each report, and TensorBoard has the same values."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    values: dict[str, dict[tuple[int, str], float]] = {"train": {}, "eval": {}}
    for line in lines:
        step, split = line.pop("step"), line.pop("split")
        values[split] |= {(step, name): value for name, value in line.items()}
    names = ("loss", "own", "error", "learning_rate")
    assert {*values["train"]} == {(step, name) for step in (2, 4, 6) for name in names}
    assert {*values["eval"]} == {(step, name) for step in (3, 6) for name in ("loss", "error")}

    for step in (3, 6):
        for name, value in small.errors(trained(step)[0]).items():
            assert values["eval"][step, name] == pytest.approx(value, rel=1e-5)
    inputs, target = next(iter(small.create_dataset(16).skip(3)))
    error = small.squared_error((trained(3)[0](inputs), target)).numpy().mean()
    assert values["train"][4, "loss"] == pytest.approx(error, rel=1e-5)

    for split, expected in values.items():
        logged = {
            (event.step, value.tag): float(tf.make_ndarray(value.tensor))
            for file in (run / "tb" / split).glob("events.out.tfevents.*")
            for event in tf.compat.v1.train.summary_iterator(str(file))
            for value in event.summary.value
        }
        assert {key: logged[key] for key in expected} == pytest.approx(expected)


def test_a_checkpoint_is_read_without_the_engine(run: Path) -> None:
    """A fresh model and optimizer can load a checkpoint, and then equal those of a plain loop."""
    assert {path.name for path in (run / "ckpt").glob("ckpt-*.index")} == {
        f"ckpt-{step}.index" for step in (2, 4, 6)
    }
    assert tf.train.latest_checkpoint(str(run / "ckpt")) == str(run / "ckpt" / "ckpt-6")
    for step in (4, 6):
        # With a function as its learning rate, the optimizer has no variable for it. In the
        # checkpoint, the rate is saved separately.
        model, optimizer = small.create_model(), keras.optimizers.SGD(lambda: 0.05, momentum=0.5)
        optimizer.build(model.trainable_variables)
        model.set_weights([0 * weight for weight in model.get_weights()])
        number = tf.Variable(0, dtype=tf.int64)
        ckpt = tf.train.Checkpoint(train_model=model, optimizer=optimizer, step=number)
        status = ckpt.read(str(run / "ckpt" / f"ckpt-{step}")).expect_partial()
        status.assert_existing_objects_matched()
        expected, momenta = trained(step)
        assert number == step == optimizer.iterations
        for variable, other in zip(model.weights, expected.weights, strict=True):
            assert_close(variable, other)
        for variable, other in zip(optimizer.variables[1:], momenta.variables[2:], strict=True):
            assert_close(variable, other)


def test_predictions_and_exports_are_read_without_the_engine(
    run: Path, tmp_path: Path, command: Command
) -> None:
    """Predictions use the newest checkpoint or a given one, and each export is a new version."""
    (inputs, _), (model, _) = small.data(), trained(6)
    assert command("predict", "--run-name=a").code == 0
    with np.load(run / "predictions.npz") as file:
        assert_close(file["output"], model(inputs[-37:]))
    np.save(tmp_path / "new.npy", inputs[:7])
    assert command("predict", "--input=new.npy", "--output=own.npz", "--checkpoint=4").code == 0
    with np.load(tmp_path / "own.npz") as file:
        assert_close(file["output"], trained(4)[0](inputs[:7]))

    for version in ("1", "2"):
        assert command("export", "--run-name=a").code == 0
        served = tf.saved_model.load(str(run / "export" / version))
        for rows in (inputs[:1], inputs[:9]):
            assert_close(served.serve(rows), model(rows))
            (answer,) = served.signatures["serving_default"](tf.constant(rows)).values()
            assert_close(answer, model(rows))
    assert {path.name for path in (run / "export").iterdir()} == {"1", "2"}

    loaded = ctl_core.load(run)
    assert_close(loaded(inputs[:7]), model(inputs[:7]))


WORDS = """
words = tf.constant([f"w{number % 3}" for number in range(100)])
look_up = keras.layers.StringLookup(vocabulary=["w0", "w1"])


def create_dataset(per_replica_batch_size):
    pairs = tf.data.Dataset.from_tensor_slices((words, small.data()[1]))
    return pairs.batch(per_replica_batch_size, drop_remainder=True)


def input_pre(batch):
    tf.debugging.assert_equal(tf.shape(batch[0])[0], tf.shape(batch[1])[0])
    return look_up(batch[0])


def create_model():
    keys = tf.range(3, dtype=tf.int64)
    pairs = tf.lookup.KeyValueTensorInitializer(keys, tf.roll(keys, 1, 0))
    table = tf.lookup.StaticHashTable(pairs, 0)
    layers = keras.layers.Embedding(3, 2), keras.layers.Dense(1)
    return lambda numbers: layers[1](layers[0](table.lookup(numbers)))
"""


def test_an_export_holds_tables_of_the_file_and_of_a_function(
    tmp_path: Path, command: Command
) -> None:
    """Clients send the words only, because the output does not depend on the labels.

    The hook uses the labels in an assertion.
    """
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS + WORDS)
    assert command("train", *FLAGS).code == 0
    outcome = command("export", "--run-name=a")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    words = tf.constant(["w1", "w0", "other"])
    exported = tf.saved_model.load(str(tmp_path / "runs/a/export/1"))
    numbers = exported.serve(words)
    assert_close(numbers, ctl_core.load(tmp_path / "runs/a")(words))
    assert len(np.unique(numbers)) == 3


def test_evaluate_leaves_a_run_as_it_is(run: Path, command: Command) -> None:
    before = small.read_files(run)
    for words, step in (((), 6), (("--checkpoint=4",), 4)):
        outcome = command("evaluate", "--run-name=a", *words)
        error = small.errors(trained(step)[0])["error"]
        assert (outcome.code, outcome.err) == (0, ""), outcome
        assert f"step {step}" in outcome.out
        assert f"error {error:.4g}" in outcome.out
    assert small.read_files(run) == before
