"""What ``export`` writes, used without our code; and what follows a training by ``--then``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.__main__ import main
from ctl_core.run_process import read_process
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import Cli, refused, source_of

# Keras' layers alone, of which gelu needs an op that other formats do not have under its name.
CREATE_MODEL = """\
def create_model():
    first = keras.layers.Dense(4, "gelu", kernel_initializer=keras.initializers.Constant(0.3))
    return keras.Sequential([keras.Input((2,)), first, keras.layers.Dense(1)])
"""
EVALUATION = """\
def create_eval_dataset(per_replica_batch_size):
    return data.batch(per_replica_batch_size)
"""
SCALED = "def input_pre(batch):\n    return 2.0 * batch[0] - 1.0\n"
FORMATS = ("keras", "tflite", "onnx")

# Run in a process that has neither the engine nor the hooks: what each export returns.
OTHERS = """
import sys
import numpy as np
import tensorflow as tf

x, found = np.load("x.npy"), {}
served = tf.saved_model.load("runs/a/export/1")
found["serving_default"] = served.signatures["serving_default"](inputs=tf.constant(x))["output"]
found["serve"] = served.serve(x)
rows = [tf.train.Feature(float_list=tf.train.FloatList(value=row)) for row in x]
rows = [tf.train.Example(features=tf.train.Features(feature={"inputs": row})) for row in rows]
texts = tf.constant([row.SerializeToString() for row in rows])
found["tf_example"] = served.signatures["tf_example"](examples=texts)["output"]
import keras
layer = keras.layers.TFSMLayer("runs/a/export/1", call_endpoint="serving_default")
found["layer"] = layer(x)["output"]
found["keras"] = keras.saving.load_model("runs/b/model.keras")(x)
runner = tf.lite.Interpreter("runs/a/model.tflite").get_signature_runner("serving_default")
found["tflite"] = runner(inputs=x)["output"]
import onnxruntime
session = onnxruntime.InferenceSession("runs/a/model.onnx")
found["onnx"] = session.run(["output"], {"inputs": x})[0]
assert not {"ctl_core", "callbacks"} & sys.modules.keys()
np.savez("found.npz", **{name: np.asarray(value) for name, value in found.items()})
"""


@pytest.mark.slow
def test_every_format_in_a_process_without_our_code(cli: Cli, tmp_path: Path) -> None:
    """With what comes before the model, but for Keras' own format, which has the model alone."""
    assert cli(source_of(create_model=CREATE_MODEL, input_pre=SCALED)).code == 0
    for flags in ([], ["--format", "tflite"], ["--format", "onnx"]):
        outcome = cli(None, command=("export", *flags))
        assert (outcome.code, outcome.err) == (0, ""), outcome
    expected = ctl_core.load("runs/a")
    again = ("train", "--steps", "10", "--batch-size", "8", "--run-name", "b")
    assert cli(source_of(create_model=CREATE_MODEL), command=again).code == 0
    outcome = cli(None, command=("export", "--format", "keras"))
    assert (outcome.code, outcome.err) == (0, ""), outcome
    x = np.random.default_rng(0).uniform(size=(8, 2)).astype("float32")
    np.save("x.npy", x)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-I", "-c", OTHERS]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "callbacks.py").write_text(source_of(create_model=CREATE_MODEL, input_pre=SCALED))
    sys.modules.pop("callbacks")
    with np.load("found.npz") as found:
        for name in ("serving_default", "serve", "tf_example", "layer"):
            np.testing.assert_array_equal(found[name], expected(x), err_msg=name)
        for name in ("tflite", "onnx"):
            np.testing.assert_allclose(found[name], expected(x), rtol=1e-5, atol=1e-6, err_msg=name)
        (tmp_path / "callbacks.py").write_text(source_of(create_model=CREATE_MODEL))
        plain = ctl_core.load("runs/b")(x)
        np.testing.assert_allclose(found["keras"], plain, rtol=1e-6, err_msg="keras")
        assert abs(plain - expected(x)).numpy().max() > 1e-2


OWN = """\
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2.0 * x


def create_model():
    return keras.Sequential([keras.Input((2,)), Twice(), keras.layers.Dense(1)])
"""
LAMBDA = """\
def create_model():
    return keras.Sequential(
        [keras.Input((2,)), keras.layers.Lambda(lambda x: 2.0 * x), keras.layers.Dense(1)])
"""
ACTIVATION = """\
def twice(x):
    return 2.0 * x


def create_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation=twice)])
"""
MODULE = """\
class Line(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable([[1.0], [1.0]])

    def __call__(self, x):
        return x @ self.weight


def create_model():
    return Line()


def grad_pre(loss, train_model):
    return loss, 0.0, train_model.trainable_variables
"""
WORDS = """\
def input_pre(batch):
    return tf.strings.to_number(tf.strings.as_string(batch[0]))
"""
STRANGE = "def input_pre(batch):\n    return tf.math.lgamma(batch[0] + 1.0)\n"


@pytest.mark.parametrize(
    ("kind", "pieces", "words"),
    [
        ("keras", {"create_model": OWN}, "format: keras cannot hold Twice of "),
        ("keras", {"create_model": LAMBDA}, "cannot hold a function, such as that of a Lambda"),
        ("keras", {"create_model": ACTIVATION}, "format: keras cannot hold "),
        ("keras", {"create_model": MODULE}, "holds Keras models, and create_model (callbacks.py:"),
        ("keras", {"input_pre": SCALED}, "holds the model alone, without input_pre (callbacks.py:"),
        ("onnx", {"input_pre": STRANGE}, "format: onnx cannot hold the model of create_model"),
        (
            "tflite",
            {"input_pre": WORDS},
            "callbacks.py:16): it has no AsString, StringToNumber; take",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_format_that_cannot_hold_the_model_is_one_line(
    cli: Cli, kind: str, pieces: dict[str, Any], words: str
) -> None:
    assert cli(source_of(**pieces), "--steps", "2").code == 0
    outcome = cli(None, command=("export", "--format", kind))
    refused(outcome, words, "savedmodel")
    assert not Path("runs/a", f"model.{kind}").exists()


def test_what_is_asked_for_wrongly(cli: Cli) -> None:
    assert cli(source_of(), "--steps", "2").code == 0
    for flags, words in (
        (["--format", "pb"], "format: expected one of savedmodel, keras, tflite, onnx, got 'pb'"),
        (["--format", "keras", "--output", "x.h5"], "output: expected the name of a .keras file"),
    ):
        refused(cli(None, command=("export", *flags)), words)


def test_the_model_card_says_what_the_record_has(cli: Cli) -> None:
    source = source_of(create_model=CREATE_MODEL, evaluation=EVALUATION, input_pre=SCALED)
    assert cli(source, "--hparams.width", "3", "--ckpt-every", "5").code == 0
    assert cli(None, "--checkpoint", "5", command=("export",)).code == 0
    assert (
        cli(None, "--format", "tflite", "--output", "small.tflite", command=("export",)).code == 0
    )
    lines = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    (last,) = [line for line in lines if line["split"] == "eval"]
    first, other = Path("runs/a/export/1/model_card.md"), Path("small.tflite.md")
    for words in (
        "# a, step 5\n",
        "signatures serving_default, tf_example",
        "Trained for 5 steps of 8 examples, 40 examples in all, on 1 replica",
        "The run has evaluated nothing before this checkpoint.",
        "| input | inputs | float32 [None, 2] |",
        "| output | output | float32 [None, 1] |",
        '| hparams | {"width": 3} |',
        "| steps | 10 |",
        "- Commit: ",
        f"tensorflow{'-cpu' if 'tensorflow-cpu' in first.read_text() else ''} {tf.__version__}",
    ):
        assert words in first.read_text(), words
    assert "# a, step 10\n" in other.read_text() and "- Format: tflite\n" in other.read_text()
    assert f"| loss | {last['loss']:.6g} |" in other.read_text()


def test_then_runs_commands_after_a_training(cli: Cli) -> None:
    source = source_of(evaluation=EVALUATION)
    outcome = cli(source, "--then", "evaluate,export,predict")
    assert outcome.code == 0, outcome
    assert {"runs/a/export/1/saved_model.pb", "runs/a/predictions.npz"} <= outcome.written
    lines = outcome.out.splitlines()
    done = next(n for n, line in enumerate(lines) if line.startswith("done: step 10"))
    assert [line.startswith("step 10  eval: loss") for line in lines[done:]].count(True) == 1
    # A run that is done already has come to its end, too.
    assert cli(None, "--then", "export").code == 0 and Path("runs/a/export/2").is_dir()
    # The first that fails ends it, with its exit code.
    broken = source + "\n\ndef create_inference_model(model):\n    return 3\n"
    outcome = cli(broken, "--then", "evaluate,predict,export")
    refused_line = outcome.err.splitlines()
    assert outcome.code == 2 and len(refused_line) == 1
    assert "create_inference_model (callbacks.py:" in refused_line[0]
    assert not Path("runs/a/export/3").exists()


def test_nothing_follows_a_training_that_was_stopped_or_has_diverged(cli: Cli) -> None:
    hook = "every_steps = {5: lambda: os.kill(os.getpid(), signal.SIGTERM)}\n"
    stopped = "import os, signal\n" + source_of(every_steps=hook)
    outcome = cli(stopped, "--steps", "1000000", "--then", "export")
    assert outcome.code == 143 and not Path("runs/a/export").exists()
    outcome = cli(
        source_of(),
        "--steps",
        "60",
        "--learning-rate",
        "1e29",
        "--then",
        "export",
        command=("train", "--batch-size", "8", "--run-name", "b"),
    )
    assert outcome.code == 1 and not Path("runs/b/export").exists()


def test_then_is_refused_before_training(cli: Cli) -> None:
    for flags, words in (
        (
            ["--then", "evaluate,exprt"],
            "then: expected one or several of evaluate, predict, export",
        ),
        (["--then", "export,export"], "each once, with commas between them, got 'export,export'"),
        (["--then", ""], "then: expected one or several of"),
        (["--then", "export,evaluate"], "then: there is no create_eval_dataset, so that evaluate"),
        (["--then", "export", "--check"], "then: a check trains nothing"),
    ):
        outcome = cli(source_of(), *flags)
        refused(outcome, words)
        assert not Path("runs").exists()


@pytest.mark.cluster
def test_then_follows_a_cluster_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And finds its run, though callbacks.py goes elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    going = 'import os\n\nos.chdir("elsewhere")\n'
    (tmp_path / "callbacks.py").write_text(going + source_of(evaluation=EVALUATION))
    flags = ["--workers", "2", "--steps", "4", "--batch-size", "8", "--run-name", "a"]
    flags += ["--then", "evaluate,predict,export"]
    command = [sys.executable, "-m", "ctl_core", "train", *flags]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"wrote a SavedModel to {tmp_path}/runs/a/export/1") == 1
    assert (tmp_path / "runs/a/predictions.npz").exists()
    assert os.listdir(tmp_path / "runs/a/export") == ["1"]
    process = read_process(tmp_path / "runs/a")
    assert process is not None and process.then == []
    assert main(["runs", "--json", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "done"
    last = [line for line in done.stdout.splitlines() if "  eval: loss" in line]
    assert len(last) == 2 and last[0].split("loss ")[1].split()[0] in last[1]
