"""Tests ``export --format litert,onnx``: files that their own runtimes compute as the checkpoint.

The tests that need a runtime are skipped where its package is not installed; the extra ``test``
contains all of them.
"""

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ctl_core
from ctl_core.conversion import formats, write
from tests.golden import small
from tests.helpers.project import EVALUATED, Cli, failed, line_of, refused

FLAGS = ("train", "--run-name", "a", "--steps", "4", "--batch-size", "16")
EXPORT = ("export", "a", "--format")
RUNTIMES = {"litert": "ai_edge_litert", "onnx": "tf2onnx"}


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips a test if a package of one of the formats is not installed."""
    missing = [name for name in names if importlib.util.find_spec(RUNTIMES[name]) is None]
    return pytest.mark.skipif(bool(missing), reason=f"the extra {' and '.join(missing)} is missing")


# The model of a run whose evaluation data are larger than its training data. Two outputs with other
# names than the model's layers; the exact gelu, which ONNX lacks; and a hook that scales.
PROGRAM = (
    EVALUATED
    + """
inputs, target = small.data()
create_eval_dataset = small.slices((5.0 * inputs[-37:], target[-37:]))


def input_pre(batch):
    return 0.5 * batch[0]


def create_model():
    inputs = keras.Input((small.FEATURES,))
    hidden = keras.layers.Dense(8, "gelu", kernel_initializer=INITIAL)(inputs)
    first = keras.layers.Dense(1, kernel_initializer=INITIAL)(hidden)
    return keras.Model(inputs, {"first": first, "logits": keras.layers.Dense(3)(hidden)})


INITIAL = keras.initializers.GlorotUniform(seed=1)


def loss_pre(output, batch):
    return output["first"] + 0.0 * output["logits"][:, :1], batch[1]


def metric_pre(output, batch):
    return batch[1], output["first"]
"""
)


def read_proof(format: str, version: int = 1) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        Path(f"runs/a/export/{format}/{version}/proof.json").read_text()
    )
    return content


def run_litert(path: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter(path)
    outputs: dict[str, np.ndarray] = interpreter.get_signature_runner("serving_default")(**inputs)
    return outputs


def run_onnx(path: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


@needs("litert", "onnx")
def test_files_compute_what_the_checkpoint_computes(cli: Cli) -> None:
    """The files contain input_pre, and the proofs have the numbers of the evaluation."""
    assert cli(PROGRAM, command=FLAGS).code == 0
    outcome = cli(None, command=(*EXPORT, "saved_model,litert,onnx"))
    assert (outcome.code, outcome.err) == (0, "")
    assert Path("runs/a/export/1/saved_model.pb").exists()
    served = ctl_core.load("runs/a")
    inputs = 5.0 * small.data()[0][-37:]
    expected = {name: np.asarray(value) for name, value in served(inputs).items()}
    files = {"litert": ("model.tflite", run_litert), "onnx": ("model.onnx", run_onnx)}
    for format, (name, run) in files.items():
        actual = run(f"runs/a/export/{format}/1/{name}", {"inputs": inputs})
        assert actual.keys() == expected.keys() == {"first", "logits"}
        for key, values in expected.items():
            np.testing.assert_allclose(actual[key], values, rtol=1e-4, atol=1e-5)
        proof = read_proof(format)
        assert (proof["proven"], proof["file"], proof["tolerance"]) == (True, name, 1e-4)
        assert (proof["data"], proof["examples"]) == ("create_eval_dataset", 37)
        assert proof["contents"] == "input_pre and the model"
        assert proof["versions"].keys() >= {"numpy", "python"}
        for key, values in expected.items():
            largest = proof["outputs"][key]["largest_value"]
            assert largest == pytest.approx(np.abs(values).max(), rel=1e-5)
        error = np.abs(expected["first"] - small.data()[1][-37:]).mean()
        metric = proof["metrics"]["error"]
        assert metric["checkpoint"] == pytest.approx(served.metrics["error"], rel=1e-5)
        assert metric["file"] == pytest.approx(error, rel=1e-4)
    assert f"{served.metrics['error']:.4g}" in outcome.out


@needs("litert", "onnx")
def test_a_file_with_another_weight_is_not_proven(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight is 1 % larger in the file: the command fails, and the name of the file says so."""
    assert cli(PROGRAM, command=FLAGS).code == 0
    weights = ctl_core.load("runs/a").model.get_weights()
    (kernel,) = [array for array in weights if array.shape == (8, 3)]
    changed = kernel.copy()
    changed.flat[np.abs(kernel).argmax()] *= 1.01

    def spoil(content: bytes) -> bytes:
        for old, new in ((kernel, changed), (kernel.T, changed.T)):
            if old.tobytes() in content:
                return content.replace(old.tobytes(), new.tobytes())
        raise AssertionError("the file does not contain the weights")

    for name in ("convert_to_litert", "convert_to_onnx"):
        convert = getattr(write, name)
        monkeypatch.setattr(write, name, lambda *args, convert=convert: spoil(convert(*args)))
    outcome = cli(None, command=(*EXPORT, "litert,onnx,saved_model"))
    failed(outcome, "model.onnx.unproven is not proven", "more than the tolerance of 0.0001")
    assert "model.tflite.unproven is not proven" in outcome.out
    for format in ("litert", "onnx"):
        folder = Path(f"runs/a/export/{format}/1")
        assert {path.suffix for path in folder.iterdir()} == {".json", ".unproven"}
        proof = read_proof(format)
        assert not proof["proven"]
        assert proof["file"].endswith(".unproven")
        differences = [output["relative_difference"] for output in proof["outputs"].values()]
        assert 1e-4 < max(differences) < 0.1
    assert Path("runs/a/export/1/saved_model.pb").exists()
    outcome = cli(None, command=(*EXPORT, "litert", "--tolerance", "0.5"))
    assert (outcome.code, read_proof("litert", 2)["tolerance"]) == (0, 0.5)


RECURRENT = (
    small.CALLBACKS
    + """
random = np.random.default_rng(0)
x = random.normal(size=(300, 6, 2)).astype("float32")
create_dataset = small.slices((x, x[:, 0]))


def create_model():
    return keras.Sequential([keras.Input((6, 2)), keras.layers.LSTM(3), keras.layers.Dense(2)])


@tf.function(input_signature=[tf.TensorSpec([None, 6, 2])])
def serve(inputs):
    return 3.0 * inputs
"""
)


@needs("litert")
def test_a_recurrent_model_needs_no_flex_ops(cli: Cli) -> None:
    """LiteRT takes one example at a time; without evaluation data, 256 training examples."""
    assert cli(RECURRENT, command=FLAGS).code == 0
    outcome = cli(None, command=(*EXPORT, "litert"))
    assert (outcome.code, outcome.err) == (0, "")
    assert "litert: the file takes one example in each call, because" in outcome.out
    assert "TensorListReserve (sequential" in outcome.out
    proof = read_proof("litert")
    assert (proof["examples_per_call"], proof["examples"]) == (1, 256)
    assert (proof["data"], proof["metrics"]) == ("256 training examples", {})
    assert proof["contents"] == "serve and the model"
    inputs = np.ones((1, 6, 2), "float32")
    outputs = run_litert("runs/a/export/litert/1/model.tflite", {"inputs": inputs})
    np.testing.assert_allclose(outputs["output"], ctl_core.load("runs/a")(inputs), rtol=1e-4)
    outcome = cli(None, command=(*EXPORT, "litert", "--quantize", "int8"))
    failed(outcome, "litert: the model cannot be exported: the converter of LiteRT crashes")


@needs("litert")
def test_quantized_files_are_compared(cli: Cli) -> None:
    """Any difference is accepted and recorded, unless a tolerance is given.

    A model that was trained in bfloat16 is exported in float32.
    """
    assert cli(PROGRAM, "--precision", "bfloat16", command=FLAGS).code == 0
    failed(cli(None, command=(*EXPORT, "litert")), "without Flex ops", "try --precision float32")
    in_float32 = ("--precision", "float32", "--quantize")
    outcome = cli(None, command=(*EXPORT, "litert", *in_float32, "int8"))
    assert (outcome.code, outcome.err) == (0, "")
    proof = read_proof("litert")
    assert (proof["proven"], proof["tolerance"], proof["quantize"]) == (True, None, "int8")
    assert proof["file"] == "model-int8.tflite"
    # Large, because the inputs of the evaluation are out of the range of the training data.
    assert 1e-2 < proof["outputs"]["logits"]["relative_difference"] < 1
    outcome = cli(None, command=(*EXPORT, "litert", *in_float32, "float16", "--tolerance", "1e-9"))
    failed(outcome, "model-float16.tflite.unproven", "more than the tolerance of 1e-09")
    assert 1e-6 < read_proof("litert", 2)["outputs"]["logits"]["relative_difference"] < 1e-2


TEXTS = (
    EVALUATED
    + """
inputs, target = small.data()
lines = tf.strings.as_string(tf.range(len(inputs)))
create_dataset = small.slices((lines, target), drop_remainder=True)
create_eval_dataset = small.slices((lines[:30], target[:30]))


def input_pre(batch):
    return read_lines(batch[0])


@tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
def serve(inputs):
    return read_lines(inputs)


def read_lines(lines):
    return tf.gather(inputs, tf.strings.to_number(lines, tf.int32))
"""
)
REFUSED = (
    EVALUATED
    + """

class Spectrum(keras.layers.Layer):
    def call(self, x):
        matrices = tf.einsum("bi,bj->bij", x, x)
        return tf.linalg.svd(matrices, compute_uv=False)


def create_model():
    return small.model_with(Spectrum())
"""
)


@needs("litert", "onnx")
def test_what_a_format_lacks_is_named(cli: Cli) -> None:
    """Hooks that take strings stay out of the file; other ops are an error with their line."""
    assert cli(TEXTS, command=FLAGS).code == 0
    outcome = cli(None, command=(*EXPORT, "litert,onnx"))
    assert (outcome.code, outcome.err) == (0, "")
    lines = {"input_pre": line_of(TEXTS, "def input_pre"), "serve": line_of(TEXTS, "@tf.function")}
    for format in ("litert", "onnx"):
        for name, line in lines.items():
            hook = f"{name} (callbacks.py:{line})"
            assert f"{format}: the file does not contain {hook}, because" in outcome.out
        assert read_proof(format)["contents"] == "the model"
        assert read_proof(format)["metrics"].keys() == {"error"}
    assert "inputs are strings; pass inputs float32 (None, 5)" in outcome.out

    assert cli(REFUSED, "--start-over", command=(*FLAGS[:2], "b", *FLAGS[3:])).code == 0
    line = line_of(REFUSED, "tf.linalg.svd")
    for format in ("litert", "onnx"):
        outcome = cli(None, command=("export", "b", "--format", format))
        failed(outcome, f"{format}: the model cannot be exported", "Svd", f"callbacks.py:{line}")
        assert list(Path(f"runs/b/export/{format}").iterdir()) == []


def test_options_that_do_not_fit_are_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run is opened, also if the packages are missing."""
    assert cli(EVALUATED, command=FLAGS).code == 0
    for flags, words in (
        (("tflite",), "format: expected 'saved_model', 'litert' or 'onnx', got 'tflite'"),
        (("saved_model", "--quantize", "int8"), "quantize: only LiteRT files"),
        (("litert", "--opset", "17"), "opset: only ONNX files"),
        (("saved_model", "--tolerance", "1"), "tolerance: a SavedModel is not compared"),
        (("onnx", "--opset", "99"), "opset: expected"),
    ):
        refused(cli(None, command=(*EXPORT, *flags)), words)

    find_version = importlib.metadata.version

    def find_others(package: str) -> str:
        if package in (*formats.PACKAGES["litert"], *formats.PACKAGES["onnx"]):
            raise importlib.metadata.PackageNotFoundError(package)
        return find_version(package)

    monkeypatch.setattr(importlib.metadata, "version", find_others)
    for format, package in (("litert", "ai-edge-litert"), ("onnx", "onnx")):
        outcome = cli(None, command=(*EXPORT, format))
        refused(outcome, f"needs the package {package},", f"pip install --editable '.[{format}]'")
    assert not Path("runs/a/export").exists()
