"""What ``export`` writes, used without our code; and what follows a training by ``--then``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ctl_core
from ctl_core.__main__ import main
from ctl_core.run_process import read_process
from tests.helpers.lean import PYTHONPATH
from tests.helpers.project import Cli, refused, source_of

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
converter = tf.lite.TFLiteConverter.from_saved_model(
    "runs/a/export/1", signature_keys=["serving_default"])
lite = tf.lite.Interpreter(model_content=converter.convert())
found["tflite"] = lite.get_signature_runner("serving_default")(inputs=x)["output"]
assert not {"ctl_core", "callbacks"} & sys.modules.keys()
np.savez("found.npz", **{name: np.asarray(value) for name, value in found.items()})
"""


@pytest.mark.slow
def test_an_export_in_a_process_without_our_code(cli: Cli, tmp_path: Path) -> None:
    """With what comes before the model, also as what TensorFlow Lite makes of it."""
    assert cli(source_of(create_model=CREATE_MODEL, input_pre=SCALED)).code == 0
    outcome = cli(None, command=("export",))
    assert (outcome.code, outcome.err) == (0, ""), outcome
    x = np.random.default_rng(0).uniform(size=(8, 2)).astype("float32")
    np.save("x.npy", x)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-I", "-c", OTHERS]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = ctl_core.load("runs/a")(x)
    with np.load("found.npz") as found:
        for name in ("serving_default", "serve", "tf_example", "layer"):
            np.testing.assert_array_equal(found[name], expected, err_msg=name)
        np.testing.assert_allclose(found["tflite"], expected, rtol=1e-5, atol=1e-6)


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
