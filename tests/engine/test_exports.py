"""What ``export`` writes, used without our code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ctl_core
from tests.helpers.project import Cli, source_of

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
