"""``ctl_core.load``: what it returns is what predict writes and an export serves, bit for bit."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import FEATURES, make_hooks, regression_data, sgd
from tests.helpers.fixtures import Train
from tests.helpers.project import EVALUATED, Cli, refused

FLAGS = ("train", "--run-name", "a", "--steps", "6", "--batch-size", "16")
IMAGES = """
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(0).uniform(size=(48, 8, 8, 1)).astype("float32")


def create_dataset(per_replica_batch_size):
    return tf.data.Dataset.from_tensor_slices((x, x[:, :3, 0, 0])).batch(per_replica_batch_size)


def create_eval_dataset(per_replica_batch_size):
    return create_dataset(per_replica_batch_size)


def create_model():
    return keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.RandomFlip(seed=1), keras.layers.Flatten(),
         keras.layers.Dense(3)])


def create_loss():
    return lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2, 1)


every_steps = {}
"""
# A model of a dict within a dict, and one of a tuple.
NESTED = """
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(0).normal(size=(3, 32, 4)).astype("float32")
triplets = {"anchor": x[0], "others": {"positive": x[1], "negative": x[2]}}


def create_dataset(per_replica_batch_size):
    return tf.data.Dataset.from_tensor_slices(triplets).batch(per_replica_batch_size)


class Triplets(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(3, kernel_initializer=keras.initializers.Constant(0.1))

    def call(self, inputs):
        others = inputs["others"]
        anchor = self.encoder(inputs["anchor"])
        near, far = self.encoder(others["positive"]), self.encoder(others["negative"] * 2.0)
        far = tf.norm(anchor - far, axis=1)
        return {"near": tf.norm(anchor - near, axis=1), "all": {"far": far}}


def create_model():
    return Triplets()


def create_loss():
    return lambda output: output["near"] - output["all"]["far"]


def input_pre(batch):
    return batch


def loss_pre(output):
    return output


every_steps = {}
"""


def test_nested_inputs_have_names_in_files_and_signatures(cli: Cli) -> None:
    assert cli(NESTED, command=FLAGS).code == 0
    assert cli(None, command=("export",)).err == ""
    x = np.random.default_rng(1).normal(size=(3, 16, 4)).astype("float32")
    arrays = {"anchor": x[0], "others/positive": x[1], "others/negative": x[2]}
    np.savez("x.npz", **arrays)
    outcome = cli(None, "--input", "x.npz", command=("predict",))
    assert outcome.code == 0, outcome
    served = ctl_core.load("runs/a")
    output = served({"anchor": x[0], "others": {"positive": x[1], "negative": x[2]}})
    kernel, _ = served.model.get_weights()
    expected = np.linalg.norm((x[0] - 2 * x[2]) @ kernel, axis=1)
    np.testing.assert_allclose(output["all"]["far"], expected, rtol=1e-4, atol=1e-6)
    exported = tf.saved_model.load("runs/a/export/1").signatures["serving_default"]
    by_name = exported(**{name: tf.constant(array) for name, array in arrays.items()})
    with np.load("runs/a/predictions-x.npz") as file:
        assert set(file) == set(by_name) == {"near", "all/far"}
        for found in (file["all/far"], by_name["all/far"]):
            np.testing.assert_array_equal(found, output["all"]["far"])
    arrays["others/negative"] = x[2, :3]
    np.savez("x.npz", **arrays)
    outcome = cli(None, "--input", "x.npz", command=("predict",))
    refused(outcome, "others/negative [3, 4]", "as many examples each")


def test_an_inference_model_that_no_checkpoint_holds(train: Train) -> None:
    state = train(make_hooks(create_opt=sgd), steps=3)
    own = make_hooks(create_opt=sgd, create_inference_model=lambda model: keras.layers.Dense(2))
    with pytest.raises(ctl_core.SetupError, match="no checkpoint holds it"):
        ctl_core.load(state.run_dir, callbacks=own)


def test_inputs_that_do_not_fit(train: Train) -> None:
    """Numbers are cut off nowhere: where they would be, they are refused."""
    number = tf.function(input_signature=[{"n": tf.TensorSpec([None], tf.uint8)}])
    serve = number(lambda inputs: tf.one_hot(inputs["n"], FEATURES))
    state = train(make_hooks(create_opt=sgd), steps=3)
    served = ctl_core.load(state.run_dir, callbacks=make_hooks(create_opt=sgd, serve=serve))
    expected = state.train_model(np.eye(FEATURES)[[1, 0]])
    np.testing.assert_allclose(served({"n": [1, 0]}), expected, rtol=1e-5)
    for wrong in ({"n": [1.5]}, {"n": [300]}, {"n": [[1]]}, {"m": [1]}, [1]):
        with pytest.raises(ctl_core.SetupError, match=r"^input: expected n uint8 \(None,\): "):
            served(wrong)


def test_what_the_page_shows_works(cli: Cli) -> None:
    """The hooks of docs/serving.md, for images of 8 by 8 that clients send as files."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    serve, around, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    outcome = cli(IMAGES + serve + around, command=FLAGS)
    assert outcome.code == 0, outcome
    served = ctl_core.load("runs/a")
    pixels = np.random.default_rng(1).integers(0, 256, (4, 8, 8, 1)).astype("uint8")
    sent = [tf.io.encode_png(image).numpy() for image in pixels]
    found = served(sent).numpy()
    np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-5)
    network = served.model.__closure__[0].cell_contents
    expected = tf.nn.softmax(network(pixels.astype("float32") / 255.0, training=False))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.savez("x.npz", np.array(sent, object).astype(bytes))
    for words in (("predict", "--input", "x.npz"), ("predict",), ("export",)):
        assert cli(None, *words[1:], command=words[:1]).code == 0
    exported = tf.saved_model.load("runs/a/export/1").signatures["serving_default"]
    np.testing.assert_array_equal(exported(inputs=tf.constant(sent))["output"], found)
    with np.load("runs/a/predictions-x.npz") as file:
        np.testing.assert_array_equal(file["output"], found)
    with np.load("runs/a/predictions.npz") as file:  # of batches, which are no files: input_pre
        expected = tf.nn.softmax(network(sys.modules["callbacks"].x[:16], training=False))
        np.testing.assert_allclose(file["output"][:16], expected, rtol=1e-5)


def test_what_is_read_is_not_written_over(cli: Cli, tmp_path: Path) -> None:
    flags = ("--steps", "2", "--batch-size", "16", "--run-name", "a")
    assert cli(EVALUATED, command=("train", *flags)).code == 0
    np.savez("x.npz", regression_data()[0])
    os.link("x.npz", "hard.npz")
    os.symlink("x.npz", "soft.npz")
    before = Path("x.npz").read_bytes()
    for output in ("x.npz", "./x.npz", "hard.npz", "soft.npz"):
        outcome = cli(None, "--input", "x.npz", "--output", output, command=("predict",))
        assert outcome.code == (2 if "x.npz" in output else 0)  # a link is replaced, not followed
        assert Path("x.npz").read_bytes() == before
    assert cli(None, command=("predict",)).code == 0
    first = Path("runs/a/predictions.npz").read_bytes()
    outcome = cli(None, "--input", "x.npz", command=("predict",))
    assert outcome.code == 0 and "to runs/a/predictions-x.npz" in outcome.out
    assert Path("runs/a/predictions.npz").read_bytes() == first
