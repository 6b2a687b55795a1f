"""Tests that ``load``, ``predict`` and ``export`` compute the same outputs from a run."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.commands import use
from tests.golden import compare, small
from tests.helpers.cases import make_hooks, sgd
from tests.helpers.project import Cli, Train, refused

FLAGS = ("train", "--run-name", "a", "--steps", "6", "--batch-size", "16")
IMAGES = f"""{small.CALLBACKS}
x = np.random.default_rng(0).uniform(size=(48, 8, 8, 1)).astype("float32")
create_dataset = create_eval_dataset = small.slices((x, x[:, :3, 0, 0]))


def create_model():
    layers = keras.layers.RandomFlip(seed=1), keras.layers.Flatten(), keras.layers.Dense(3)
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])
"""
SCALED = """

def create_model():
    return small.model_with(keras.layers.Dense(1), keras.layers.Rescaling(SCALE))
"""
# A model whose inputs and outputs are nested dicts. It does not use the input "label".
NESTED = f"""{small.CALLBACKS}
x = np.random.default_rng(0).normal(size=(3, 32, 4)).astype("float32")
create_dataset = small.slices(
    {{"anchor": x[0], "label": x[0], "others": {{"positive": x[1], "negative": x[2]}}}}
)


class Triplets(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(3, kernel_initializer=keras.initializers.Constant(0.1))

    def call(self, inputs):
        others = inputs["others"]
        anchor = self.encoder(inputs["anchor"])
        near, far = self.encoder(others["positive"]), self.encoder(others["negative"] * 2.0)
        far = tf.norm(anchor - far, axis=1)
        return {{"near": tf.norm(anchor - near, axis=1), "all": {{"far": far}}}}


create_model = Triplets


def create_loss():
    return lambda output: output["near"] - output["all"]["far"]


def input_pre(batch):
    return batch


def loss_pre(output):
    return output
"""


@pytest.mark.slow
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
        for values in (file["all/far"], by_name["all/far"]):
            np.testing.assert_array_equal(values, output["all"]["far"])
    arrays["others/negative"] = x[2, :3]
    np.savez("x.npz", **arrays)
    outcome = cli(None, "--input", "x.npz", command=("predict",))
    refused(outcome, "others/negative [3, 4]", "equally many examples")


def test_inputs_and_models_that_do_not_fit_are_refused(train: Train) -> None:
    """Inputs that do not fit are refused, including numbers that a conversion would truncate."""
    number = tf.function(input_signature=[{"n": tf.TensorSpec([None], tf.uint8)}])
    serve = number(lambda inputs: tf.one_hot(inputs["n"], small.FEATURES))
    state = train(small.hooks(), steps=3)
    served = ctl_core.load(state.run_dir, callbacks=small.hooks(serve=serve))
    expected = state.train_model(np.eye(small.FEATURES)[[1, 0]])
    np.testing.assert_allclose(served({"n": [1, 0]}), expected, rtol=1e-5)
    for wrong in ({"n": [1.5]}, {"n": [300]}, {"n": [[1]]}, {"m": [1]}, [1]):
        with pytest.raises(ctl_core.SetupError, match=r"^input: expected n uint8 \(None,\): "):
            served(wrong)
    hooks = small.hooks(create_inference_model=lambda model: keras.layers.Dense(2))
    with pytest.raises(ctl_core.SetupError, match="no checkpoint contains it"):
        ctl_core.load(state.run_dir, callbacks=hooks)


@pytest.mark.slow
def test_serving_hooks_shown_in_documents_work(cli: Cli) -> None:
    """The hooks of docs/serving.md serve images of 8 by 8 pixels that clients send as files."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    serve, around = (b for b in blocks if "def serve" in b or "def create_inference" in b)
    outcome = cli(IMAGES + serve + around, command=FLAGS)
    assert outcome.code == 0, outcome
    served = ctl_core.load("runs/a")
    pixels = np.random.default_rng(1).integers(0, 256, (4, 8, 8, 1)).astype("uint8")
    sent = [tf.io.encode_png(image).numpy() for image in pixels]
    answer = served(sent).numpy()
    np.testing.assert_allclose(answer.sum(1), 1.0, rtol=1e-5)
    network = served.model.__closure__[0].cell_contents
    expected = tf.nn.softmax(network(pixels.astype("float32") / 255.0, training=False))
    np.testing.assert_allclose(answer, expected, rtol=1e-5)
    np.savez("x.npz", np.array(sent, object).astype(bytes))
    for words in (("predict", "--input", "x.npz"), ("predict",), ("export",)):
        assert cli(None, *words[1:], command=words[:1]).code == 0
    np.save("o.npy", np.array(sent, object))
    outcome = cli(None, "--input", "o.npy", command=("predict",))
    assert outcome.code == 2
    assert "o.npy: expected arrays of numbers, strings or bytes" in outcome.err
    exported = tf.saved_model.load("runs/a/export/1").signatures["serving_default"]
    np.testing.assert_array_equal(exported(inputs=tf.constant(sent))["output"], answer)
    with np.load("runs/a/predictions-x.npz") as file:
        np.testing.assert_array_equal(file["output"], answer)
    # Without --input, predict reads batches of arrays, for which it calls input_pre, not serve.
    with np.load("runs/a/predictions.npz") as file:
        expected = tf.nn.softmax(network(sys.modules["callbacks"].x[:16], training=False))
        np.testing.assert_allclose(file["output"][:16], expected, rtol=1e-5)


# ---- Layers inside functions are in training mode only during training ---------------------------


class Noise(keras.layers.Layer):
    """Scales its inputs unless it is called with ``training=False``, like an augmentation layer."""

    def call(self, inputs: Any, training: bool = True) -> Any:
        return inputs * (1.5 if training else 1.0)


def test_functions_around_the_model_are_evaluated_predicted_and_exported_without_noise(
    train: Train,
) -> None:
    """Layers that hooks call around the model are in training mode only during training, too."""
    augment, extra = Noise(), Noise()
    # The batches have the shape of training batches, for which functions are already traced.
    inputs, target = small.data(32)
    hooks = make_hooks(
        create_model=lambda: small.model_with(keras.layers.BatchNormalization(), Noise()),
        create_eval_model=lambda train_model: lambda inputs: 3.0 * train_model(inputs),
        create_eval_dataset=small.slices((inputs, target)),
        create_metrics=lambda: {"mean": keras.metrics.Mean()},
        input_pre=lambda batch: augment(batch[0]),
        loss_pre=lambda output, batch: (extra(output), batch[1]),
        metric_pre=lambda output: (extra(output),),
    )
    state = train(hooks, steps=3)
    expected = 3.0 * state.train_model(inputs, training=False).numpy()
    assert state.metrics["loss"] == pytest.approx(((expected - target) ** 2).mean(), rel=1e-5)
    assert state.metrics["mean"] == pytest.approx(expected.mean(), rel=1e-5)
    served = ctl_core.load(state.run_dir, callbacks=hooks)
    np.testing.assert_allclose(served(inputs), expected, rtol=1e-5, atol=1e-6)

    hooks.create_inference_model = lambda model: tf.function(lambda inputs: 2.0 * model(inputs))
    hooks.serve = lambda inputs: augment(inputs)
    with np.load(use.predict(hooks, state.config)) as file:
        predicted = file["output"]
    np.testing.assert_allclose(predicted, 2.0 * expected, rtol=1e-5, atol=1e-6)
    exported = tf.saved_model.load(str(use.export(hooks, state.config)[0]))
    np.testing.assert_allclose(exported.serve(inputs), predicted, rtol=1e-5, atol=1e-6)


# ---- Outputs whose sizes vary --------------------------------------------------------------------

LENGTHS = [3, 3, 5, 5, 4, 4, 4, 4, 2, 2, 6, 6]


def sentences(per_replica_batch_size: int = 2) -> tf.data.Dataset:
    """Returns batches of labeled token sequences that are padded to the longest sequence.

    Each batch is the share of one replica, because the tensor of positions has no row per example.
    """
    tokens = tf.ragged.range(1, tf.constant(LENGTHS) + 1)
    dataset = tf.data.Dataset.from_tensor_slices((tokens, tokens % 2))
    dense = dataset.map(lambda x, y: (tf.convert_to_tensor(x), tf.convert_to_tensor(y)))
    batches = dense.padded_batch(per_replica_batch_size, ([None], [None]), drop_remainder=True)
    return batches.map(lambda x, y: ((x, tf.range(tf.shape(x)[1])), y))


def tagger(seen: list[Any]) -> SimpleNamespace:
    """Returns the hooks of a model that has an output for each token, like a sequence tagger.

    Args:
        seen: the list to which a hook appends the step, output and batch of each step
    """

    def create_model() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(11, 4), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((None,), dtype="int32"), *layers])

    def create_loss() -> Any:
        each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        return lambda pair: tf.reduce_sum(each(pair[1], pair[0]), -1)

    def look(step: int, output: Any, batch: Any) -> None:
        seen.append((step, output, batch))

    return SimpleNamespace(
        create_dataset=sentences,
        create_eval_dataset=lambda: sentences(),
        count_examples=lambda batch: tf.shape(batch[1])[0],
        input_pre=lambda batch: batch[0][0],
        create_model=create_model,
        create_loss=create_loss,
        create_opt=sgd,
        every_steps={1: look},
    )


def test_host_hooks_see_and_predict_writes_what_does_not_fit(train: Train) -> None:
    """Hooks receive outputs of different widths as ragged tensors.

    The files of ``predict`` contain padded arrays and the lengths of the rows.
    """
    seen: list[Any] = []
    hooks = tagger(seen)
    state = train(hooks, steps=3, batch_size=4, virtual_devices=2)
    (_, first, ((tokens, _), _)), (_, second, ((dense, _), _)), (_, third, _) = seen
    assert isinstance(first, tf.RaggedTensor)
    assert first.shape[0] == 4
    assert first.row_lengths().numpy().tolist() == [3, 3, 5, 5]
    assert tokens.to_list() == [[1, 2, 3]] * 2 + [[1, 2, 3, 4, 5]] * 2
    assert isinstance(second, tf.Tensor)
    assert second.shape == (4, 4, 2)
    assert dense.shape == (4, 4)
    assert third.row_lengths().numpy().tolist() == [2, 2, 6, 6]
    with np.load(use.predict(hooks, state.config)) as file:
        output, lengths = file["output"], file["output.lengths"]
    assert output.shape == (12, 6, 2)
    assert lengths.tolist() == LENGTHS
    assert not output[0, 3:].any()
    assert output[0, :3].all()


OWN_MODULES = f"""{small.CALLBACKS}
import features


@keras.saving.register_keras_serializable("test")
class Scale(keras.layers.Layer):
    def call(self, inputs):
        return inputs * features.SCALE


def create_model():
    import later

    return small.model_with(Scale(), later.create_layer())


def read_scale():
    import features
    from later import read_offset

    return features.SCALE, read_offset()
"""
LATER = """
import keras


def create_layer():
    from package.offset import OFFSET

    return keras.layers.Rescaling(1.0, offset=OFFSET)


def read_offset():
    from package.offset import OFFSET

    return OFFSET
"""


def write_project(folder: Path, scale: float) -> float:
    """Writes a project whose modules have the same names as those of other projects."""
    (folder / "package").mkdir(parents=True, exist_ok=True)
    (folder / "callbacks.py").write_text(OWN_MODULES)
    (folder / "features.py").write_text(f"SCALE = {scale}\n")
    (folder / "later.py").write_text(LATER)
    (folder / "package/__init__.py").write_text("from .offset import OFFSET\n")
    (folder / "package/offset.py").write_text(f"OFFSET = {scale + 1}\n")
    return scale


def test_each_loaded_run_has_its_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are imported later, and ``sys.modules`` stays as it was."""
    projects = {name: tmp_path / name for name in ("first", "second", "here")}
    scales = {name: write_project(folder, n) for n, (name, folder) in enumerate(projects.items())}
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.syspath_prepend(str(projects["here"]))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = ("callbacks", "features", "later", "package", "package.offset")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)

    import callbacks

    for folder in projects.values():
        # Each project has the same weights, so its runs differ only in the modules.
        monkeypatch.chdir(folder)
        ctl_core.train(callbacks, ctl_core.Config(steps=0, batch_size=16, run_name="a"))
    modules = dict(sys.modules)
    objects = dict(keras.saving.get_custom_objects())
    path = list(sys.path)

    loaded = {name: ctl_core.load(folder / "runs/a") for name, folder in projects.items()}
    inputs = small.data()[0][:4]
    for name, served in loaded.items():
        hidden, scale, rescaling, _ = served.model.layers
        assert type(scale).__module__ == "callbacks"
        np.testing.assert_allclose(scale(hidden(inputs)), hidden(inputs) * scales[name])
        assert rescaling.offset == scales[name] + 1
        read_scale = served.state.hooks.create_model.function.__globals__["read_scale"]
        assert read_scale() == (scales[name], scales[name] + 1)
    assert {name: sys.modules[name] for name in names} == {name: modules[name] for name in names}
    assert sys.path == path
    assert keras.saving.get_custom_objects() == objects
    assert callbacks.read_scale() == (2, 3)

    write_project(projects["here"], 9)  # an edit, and a run that is loaded again
    assert ctl_core.load(projects["here"] / "runs/a").model.layers[2].offset == 10
    assert callbacks.read_scale() == (2, 3)


def test_hooks_are_imported_as_they_are_now_after_a_run_was_loaded(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli(small.CALLBACKS, command=FLAGS).code == 0
    monkeypatch.delitem(sys.modules, "callbacks", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = list(sys.path)
    ctl_core.load("runs/a")
    assert "callbacks" not in sys.modules
    assert sys.path == path
    Path("callbacks.py").write_text(f"{small.CALLBACKS}\nEDITED = True\n")
    monkeypatch.syspath_prepend(".")

    import callbacks

    assert callbacks.EDITED
    monkeypatch.delitem(sys.modules, "callbacks")


def test_a_run_is_loaded_with_the_hooks_that_it_was_trained_with(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Hooks and modules are the copies in the run folder; the data are those of the project."""
    for name in ("parts", "parts.sizes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    source = (
        small.CALLBACKS
        + """
from pathlib import Path

from parts.sizes import OFFSET, read_data

NAME = Path(__file__).name
assert read_data() == "data"


def create_model():
    return small.model_with(keras.layers.Dense(3, name="edited"), keras.layers.Rescaling(1, OFFSET))
"""
    )
    sizes = Path("parts/sizes.py")
    sizes.parent.mkdir()
    sizes.write_text(
        "from pathlib import Path\n\nOFFSET = 2\n\n\ndef read_data():\n"
        "    return Path(__file__).with_name('data.txt').read_text()\n"
    )
    Path("parts/data.txt").write_text("data")
    assert cli(source, command=FLAGS).code == 0
    inputs = small.data()[0][:4]
    for name in ("parts", "parts.sizes"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    # Only a module has changed.
    sizes.write_text(sizes.read_text().replace("OFFSET = 2", "OFFSET = 5"))
    outcome = cli(None, "--run-name=a", "--steps=7", command=("train",))
    assert "parts/sizes.py has changed since the run was trained; the run continues" in outcome.out
    sizes.write_text(sizes.read_text().replace("OFFSET = 5", "OFFSET = 7"))
    Path("callbacks.py").write_text(source.replace("Dense(3", "Dense(4"))
    with pytest.raises(ctl_core.SetupError, match="no longer fits the model"):
        ctl_core.load("runs/a")
    out = capfd.readouterr().out
    assert "callbacks.py, parts/sizes.py have changed since the run was trained; --callbacks" in out
    assert 'in Python, ctl.load(run, callbacks="saved") uses it.' in out

    loaded = ctl_core.load("runs/a", callbacks="saved", checkpoint=6)
    assert loaded.model.layers[2].offset == 5
    hidden, edited, _, last = loaded.model.layers
    np.testing.assert_allclose(loaded(inputs), last(edited(hidden(inputs)) + 5.0), rtol=1e-5)
    outcome = cli(None, "--callbacks=runs/a/callbacks.py", command=("export", "a"))
    assert outcome.code == 0, outcome
    exported = tf.saved_model.load("runs/a/export/1").signatures["serving_default"]
    output = exported(inputs=tf.constant(inputs))["output"]
    np.testing.assert_allclose(output, ctl_core.load("runs/a", callbacks="saved")(inputs))
    with pytest.raises(ctl_core.SetupError, match=r"expected a module, .* or 'saved'"):
        ctl_core.load("runs/a", callbacks="runs/a/callbacks.py")


@pytest.mark.parametrize("folder", ["parts", "../shared"])
def test_hooks_in_a_subfolder_or_outside_of_the_project_have_copies_of_their_modules(
    cli: Cli, folder: str
) -> None:
    """The file imports a module from its own folder."""
    hooks = Path(folder, "hooks.py").resolve()
    hooks.parent.mkdir()
    hooks.write_text(f"from scale_of_hooks import SCALE\n{small.CALLBACKS}{SCALED}")
    module = hooks.with_name("scale_of_hooks.py")
    module.write_text("SCALE = 2.0\n")
    outcome = cli(None, f"--callbacks={folder}/hooks.py", command=FLAGS)
    assert outcome.code == 0, outcome
    del sys.modules["scale_of_hooks"]
    outcome = cli(None, f"--callbacks={hooks}", command=("export", "a"))
    assert (outcome.code, "has changed" in outcome.out) == (0, False), outcome
    del sys.modules["scale_of_hooks"]

    module.write_text("SCALE = 3.0\n")
    saved = ctl_core.load("runs/a", callbacks="saved")
    assert saved.model.layers[-2].scale == 2.0


def test_a_relative_import_is_refused_with_the_import_to_write(cli: Cli) -> None:
    Path("hooks").mkdir()
    Path("hooks/mine.py").write_text(f"from .data import x\n{small.CALLBACKS}")
    outcome = cli(None, "--callbacks=hooks/mine.py", command=FLAGS)
    refused(outcome, "mine.py:1: ImportError", "full name of the module: from hooks.MODULE import")
    outcome = cli(None, "--callbacks=hooks", command=FLAGS)
    refused(outcome, "callbacks: no file hooks in", "it is a folder; name the file in it, such as")


def test_a_notebook_in_a_folder_of_the_project_uses_the_runs_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    (tmp_path / "config.yaml").write_text("batch_size: 16\nlearning_rate: 0.05\n")
    monkeypatch.chdir(tmp_path / "notebooks")
    config = ctl_core.load_config("../config.yaml", run_name="nb", steps=3)
    state = ctl_core.train(small.hooks(), config)
    assert state.run_dir == tmp_path / "runs" / "nb"
    assert not (tmp_path / "notebooks/runs").exists()
    for run in ("runs/nb", "../runs/nb", state.run_dir):
        model = ctl_core.load(run).model
        compare.assert_same(model.weights, state.train_model.weights)
    config = ctl_core.load_config("../config.yaml", run_name="nb", steps=5)
    state = ctl_core.train(small.hooks(), config)
    compare.assert_close(state.train_model.weights, small.plain(5).weights)

    # Settings in a folder of the project, and an explicit folder, are as before.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").rename("notebooks/big.yaml")
    assert ctl_core.load_config("notebooks/big.yaml").runs_dir == "runs"
    monkeypatch.chdir("notebooks")
    assert ctl_core.load_config("big.yaml", runs_dir="here").runs_dir == "here"
