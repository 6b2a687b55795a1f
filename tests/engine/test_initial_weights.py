"""Tests of runs that load initial weights, and of all values that depend on these weights."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.commands.use import export
from tests.golden import compare, engine, small
from tests.golden.lookahead import Lookahead
from tests.golden.reference import RATE, Reference

STEPS = 7
# Two devices show whether replicas start with equal weights. With one device, it is easier to find
# the cause of a failure.
DEVICES = pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])


def train_source(train: engine.Train, **hooks: Any) -> ctl_core.State:
    """Trains the run from which other runs load their initial weights."""
    return train(small.hooks(**hooks), **small.settings(5, run_name="source"))


@pytest.fixture(scope="module")
def trained_source(tmp_path_factory: pytest.TempPathFactory) -> ctl_core.State:
    """Returns the trained run from which most tests load initial weights."""
    runs = tmp_path_factory.mktemp("runs")
    return train_source(functools.partial(engine.train, runs=runs))


@pytest.fixture
def source(trained_source: ctl_core.State, tmp_path: Path) -> ctl_core.State:
    """Returns the shared source run, and copies its folder to the runs of the test."""
    shutil.copytree(trained_source.run_dir, tmp_path / "runs" / "source")
    return trained_source


def copy_model(state: ctl_core.State) -> keras.Model:
    """Returns a model with the weights of a run."""
    model = small.create_model()
    model.set_weights(state.train_model.get_weights())
    return model


def create_schedule_free() -> keras.optimizers.Optimizer:
    return keras.optimizers.ScheduleFreeAdamW(RATE)


def create_lookahead() -> keras.optimizers.Optimizer:
    return Lookahead(RATE)


def create_averaging() -> keras.optimizers.Optimizer:
    """Returns an optimizer that replaces the weights by their average at every third step."""
    return keras.optimizers.SGD(RATE, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)


@DEVICES
@pytest.mark.parametrize("create", [create_schedule_free, create_lookahead, create_averaging])
def test_an_optimizer_that_copies_weights(
    train: engine.Train,
    source: ctl_core.State,
    create: Callable[[], keras.optimizers.Optimizer],
    devices: int,
) -> None:
    plain = create()
    expected = small.plain(STEPS, model=copy_model(source), optimizer=plain)
    kept = [v for v in plain.variables if not v.path.endswith("learning_rate")]
    hooks = small.hooks(create_opt=create)
    state = train(
        hooks, **small.settings(STEPS, run_name="b", init_from="source", virtual_devices=devices)
    )
    compare.assert_close(state.train_model.weights, expected.weights)
    variables = [v for v in state.optimizer.variables if not v.path.endswith("learning_rate")]
    compare.assert_close(variables, kept)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keras", "weights.h5", "saved_model"])
def test_an_optimizer_that_copies_weights_of_a_file(
    train: engine.Train, source: ctl_core.State, tmp_path: Path, kind: str
) -> None:
    model = copy_model(source)
    path = str(tmp_path / f"model.{kind}")
    if kind == "keras":
        model.save(path)
    elif kind == "weights.h5":
        model.save_weights(path)
    else:
        path = str(export(small.hooks(), source.config)[0])
    expected = small.plain(STEPS, model=model, optimizer=Lookahead(RATE))
    hooks = small.hooks(create_opt=create_lookahead)
    state = train(hooks, **small.settings(STEPS, init_from=path, virtual_devices=2))
    compare.assert_close(state.train_model.weights, expected.weights)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_fork_and_a_resumed_run_keep_their_slow_weights(
    train: engine.Train, source: ctl_core.State, devices: int
) -> None:
    """Neither a fork nor a resumed run loads the weights of ``init_from`` again."""
    hooks = small.hooks(create_opt=create_lookahead)
    expected = small.plain(STEPS, model=copy_model(source), optimizer=Lookahead(RATE))
    more = {"init_from": "source", "virtual_devices": devices}
    train(hooks, **small.settings(4, run_name="b", **more))
    resumed = train(hooks, **small.settings(STEPS, run_name="b", **more))
    compare.assert_close(resumed.train_model.weights, expected.weights)
    forked = train(
        hooks, **small.settings(STEPS, run_name="c", fork="b@4", virtual_devices=devices)
    )
    compare.assert_same(forked.train_model.weights, resumed.train_model.weights)


@DEVICES
def test_the_average_of_the_weights(
    train: engine.Train, source: ctl_core.State, devices: int
) -> None:
    model = copy_model(source)
    average = model.get_weights()
    for batch in small.create_dataset(small.BATCH).repeat().take(STEPS):
        small.plain(1, model=model, batches=[batch])
        pairs = zip(average, model.get_weights(), strict=True)
        average = [0.9 * before + 0.1 * weight for before, weight in pairs]
    more = {"init_from": "source", "ema": 0.9, "virtual_devices": devices}
    state = train(small.hooks(), **small.settings(STEPS, run_name="b", **more))
    compare.assert_close(state.train_model.weights, model.weights)
    assert state.average is not None
    state.average.swap()
    compare.assert_close(state.train_model.weights, average)


@DEVICES
def test_hooks_that_copy_weights(train: engine.Train, source: ctl_core.State, devices: int) -> None:
    """Hooks that copy the weights at the beginning copy the loaded weights."""

    def pull_back() -> Callable[..., Any]:
        anchors: list[tf.Variable] = []

        def update_pre(gradients: Any, train_model: keras.Model) -> Any:
            weights = train_model.trainable_variables
            if not anchors:
                with tf.init_scope():
                    values = [keras.ops.convert_to_numpy(weight) for weight in weights]
                    anchors.extend(tf.Variable(value, trainable=False) for value in values)
            triples = zip(gradients, weights, anchors, strict=True)
            pulled = [gradient + 0.5 * (weight - anchor) for gradient, weight, anchor in triples]
            return pulled, gradients

        return update_pre

    def create_eval_model(train_model: keras.Model) -> keras.Model:
        copy = keras.models.clone_model(train_model)
        copy.set_weights(train_model.get_weights())
        return copy

    plain = small.hooks(create_model=lambda: copy_model(source), update_pre=pull_back())
    batches = small.create_dataset(small.BATCH).repeat().take(STEPS)
    expected = Reference(plain).train(batches).parts.train_model
    hooks = small.hooks(update_pre=pull_back(), create_eval_model=create_eval_model)
    more = {"init_from": "source", "virtual_devices": devices}
    state = train(hooks, **small.settings(STEPS, run_name="b", **more))
    compare.assert_close(state.train_model.weights, expected.weights)
    eval_model = state.components.eval_model
    assert isinstance(eval_model, keras.Model)
    compare.assert_same(eval_model.weights, source.train_model.weights)


class HeadForEvaluation(keras.Model):
    """Has an additional layer whose variables are created when an evaluation is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small.create_model()
        self.scale = keras.layers.Dense(1, name="scale")

    def call(self, inputs: Any, training: bool = False) -> Any:
        output = self.body(inputs)
        return output if training else self.scale(output)


@pytest.mark.parametrize("kind", small.slow_but("run", of=["run", "weights.h5"]))
def test_a_layer_that_only_evaluations_call(train: engine.Train, tmp_path: Path, kind: str) -> None:
    def change_scale(train_model: HeadForEvaluation) -> None:
        train_model.scale.kernel.assign([[3.0]])

    hooks = small.hooks(create_model=HeadForEvaluation, at_step={5: change_scale})
    hooks.create_eval_dataset = small.create_eval_dataset
    source = train(hooks, **small.settings(5, run_name="source"))
    hooks = small.hooks(create_model=HeadForEvaluation)
    hooks.create_eval_dataset = small.create_eval_dataset
    path = "source"
    if kind == "weights.h5":
        path = str(tmp_path / "model.weights.h5")
        source.train_model.save_weights(path)
    state = train(hooks, **small.settings(0, run_name="b", init_from=path))
    assert float(state.train_model.scale.kernel.numpy().squeeze()) == 3.0
    compare.assert_same(state.train_model.weights, source.train_model.weights)


# ---- Sources that save their model under another name ------------------------------------------


def name_model(*names: str) -> Callable[..., Any]:
    """Returns a ``create_ckpt`` that saves the model by the first name.

    For each further name, it saves a copy of the model.
    """

    def create_ckpt(ckpt_path: str, step: Any, optimizer: Any, train_model: Any) -> Any:
        models = [train_model, *(keras.models.clone_model(train_model) for _ in names[1:])]
        named = dict(zip(names, models, strict=True))
        ckpt = tf.train.Checkpoint(step=step, optimizer=optimizer, **named)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)

    return create_ckpt


def test_a_run_that_gives_its_model_another_name(train: engine.Train) -> None:
    source = train_source(train, create_ckpt=name_model("network"))
    state = train(small.hooks(), **small.settings(0, run_name="b", init_from="source"))
    compare.assert_same(state.train_model.weights, source.train_model.weights)


def test_a_run_with_several_models_that_fit(train: engine.Train) -> None:
    train_source(train, create_ckpt=name_model("network", "copy"))
    with pytest.raises(
        ctl_core.SetupError, match="several models that fit: copy, network"
    ) as error:
        train(small.hooks(), **small.settings(0, run_name="b", init_from="source"))
    assert "\n" not in str(error.value)
    other = small.hooks(create_model=lambda: small.model_with(keras.layers.BatchNormalization()))
    with pytest.raises(
        ctl_core.SetupError, match=r"contains copy, network, .*none of which has the"
    ) as error:
        train(other, **small.settings(0, run_name="b", init_from="source"))
    assert "\n" not in str(error.value)


# ---- Loading a part of the weights with init_skip ----------------------------------------------

CLASSES = 3


def create_classifier(classes: int = CLASSES, *layers: keras.layers.Layer) -> keras.Model:
    """Returns a model like ``small.create_model`` that may have a head of another shape."""
    return keras.Sequential(
        [
            keras.Input((small.FEATURES,)),
            keras.layers.Dense(8, "tanh", name="hidden"),
            keras.layers.Dense(classes, kernel_initializer=fill_head, name="out"),
            *layers,
        ]
    )


def create_source() -> keras.Model:
    return create_classifier(1)


def fill_head(shape: Any, dtype: Any = None) -> Any:  # noqa: ARG001  (Keras passes both by name)
    """Returns initial values that depend only on the shape."""
    return np.random.default_rng(2).normal(scale=0.3, size=shape).astype("float32")


def classifier_hooks(**more: Any) -> Any:
    """Returns hooks that train three outputs towards the same target."""
    return small.hooks(create_model=create_classifier, **more)


def find_line(lines: str, setting: str) -> str:
    """Returns the line about a setting, and asserts that there is only one such line."""
    (line,) = [line for line in lines.splitlines() if f"{setting}: " in line]
    return line


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("run", 2),
        *small.slow_but(
            of=[("run", 1), ("step", 2), ("keras", 2), ("weights.h5", 2), ("saved_model", 2)]
        ),
    ],
)
def test_run_with_another_head_begins_with_the_other_layers(
    train: engine.Train,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    kind: str,
    devices: int,
) -> None:
    """A model with three outputs starts with the hidden layer of a model with one output."""
    hooks = small.hooks(create_model=create_source)
    source = train(hooks, **small.settings(5, run_name="source", ckpt_every=2))
    model = create_source()
    model.set_weights(source.train_model.get_weights())
    path = str(tmp_path / f"model.{kind}")
    if kind == "run":
        path = "source"
    elif kind == "step":
        path = "source@4"
        shorter = train(hooks, **small.settings(4, run_name="shorter"))
        model.set_weights(shorter.train_model.get_weights())
    elif kind == "keras":
        model.save(path)
    elif kind == "weights.h5":
        model.save_weights(path)
    else:
        path = str(export(hooks, source.config)[0])
    begun = create_classifier()
    begun.get_layer("hidden").set_weights(model.get_layer("hidden").get_weights())
    expected = small.plain(STEPS, model=begun)
    more = {"init_from": path, "init_skip": ["out/*"], "virtual_devices": devices}
    capfd.readouterr()
    state = train(classifier_hooks(), **small.settings(STEPS, run_name="b", **more))
    compare.assert_close(state.train_model.weights, expected.weights)
    lines = "".join(capfd.readouterr())
    assert "init_from: 2 of 4 variables are loaded from " in find_line(lines, "init_from")
    skipped = find_line(lines, "init_skip")
    assert "2 of 4 variables keep their initial values: " in skipped
    assert "out/kernel (shape (8, 3), (8, 1) in the source)" in skipped
    assert "out/bias (shape (3,), (1,) in the source)" in skipped
    assert "hidden" not in skipped


def test_variables_that_do_not_fit_are_listed(train: engine.Train) -> None:
    """Errors list variables of another shape, missing variables, and patterns without a match."""

    def create_deeper() -> keras.Model:
        extra = keras.layers.Dense(CLASSES, name="extra")
        return create_classifier(CLASSES, keras.layers.Dropout(0.5), extra)

    train_source(train, create_model=create_source)
    hooks = small.hooks(create_model=create_deeper)
    settings = small.settings(0, run_name="b", init_from="source")
    with pytest.raises(ctl_core.SetupError) as error:
        train(hooks, **settings)
    message = str(error.value)
    assert "\n" not in message
    assert "out/kernel (shape (8, 3), (8, 1) in the source)" in message
    assert "extra/bias (not in the source)" in message
    assert "--init-skip 'out/*' --init-skip 'extra/*'" in message
    assert "hidden" not in message
    with pytest.raises(ctl_core.SetupError) as error:
        train(hooks, **settings, init_skip=["out/*"])
    assert "extra/kernel" in str(error.value)
    assert "out/kernel" not in str(error.value)
    for pattern in ("head/*", "OUT/*"):
        with pytest.raises(ctl_core.SetupError) as error:
            train(hooks, **settings, init_skip=["out/*", "extra/*", pattern])
        message = str(error.value)
        assert f"init_skip: {pattern!r} matches no variable of create_model" in message
        assert "hidden/kernel, hidden/bias, out/kernel" in message
        assert "\n" not in message
    state = train(hooks, **settings, init_skip=["out/*", "extra/*"])
    assert state.train_model.get_layer("extra").kernel.shape == (CLASSES, CLASSES)


def test_a_layer_that_fits_and_is_skipped(train: engine.Train, source: ctl_core.State) -> None:
    settings = small.settings(0, run_name="b", init_from="source", init_skip=["*/bias"])
    state = train(small.hooks(), **settings)
    for ours, theirs in zip(state.train_model.weights, source.train_model.weights, strict=True):
        if ours.name == "kernel":
            compare.assert_same([ours], [theirs])
        else:
            assert np.any(theirs.numpy() != ours.numpy())


def test_a_layer_that_only_evaluations_call_is_skipped(train: engine.Train) -> None:
    """``init_skip`` also applies to variables that are created after the weights are loaded."""

    def create_body() -> Any:
        model = HeadForEvaluation()
        model.scale = keras.layers.Identity()
        return model

    source = train_source(
        train, create_model=create_body, create_eval_dataset=small.create_eval_dataset
    )
    hooks = small.hooks(
        create_model=HeadForEvaluation, create_eval_dataset=small.create_eval_dataset
    )
    settings = small.settings(0, run_name="b", init_from="source")
    with pytest.raises(ctl_core.SetupError, match=r"scale/kernel .*not in the source"):
        train(hooks, **settings)
    state = train(hooks, **settings, init_skip=["scale/*"])
    compare.assert_same(state.train_model.body.weights, source.train_model.body.weights)


@pytest.mark.parametrize("kind", small.slow_but("weights.h5", of=["run", "weights.h5"]))
def test_adapters_and_the_weights_of_the_base(
    train: engine.Train, source: ctl_core.State, tmp_path: Path, kind: str
) -> None:
    """The matrices of an adapter keep their initial values when the base's weights are loaded.

    Keras sets both matrices to 0 when it reads a file. Such matrices could never be trained.
    """

    def create_adapted() -> keras.Model:
        model = small.create_model()
        model.get_layer("hidden").enable_lora(2)
        return model

    base = source.train_model
    path = "source"
    if kind == "weights.h5":
        path = str(tmp_path / "base.weights.h5")
        base.save_weights(path)
    settings = small.settings(0, run_name="b", init_from=path)
    hooks = small.hooks(create_model=create_adapted)
    with pytest.raises(ctl_core.SetupError) as error:
        train(hooks, **settings)
    assert "lora_kernel_a (not in the source)" in str(error.value)
    assert "--init-skip" in str(error.value)
    state = train(hooks, **settings, init_skip=["*/lora_*"])
    adapter = state.train_model.get_layer("hidden").lora_kernel_a
    assert np.any(adapter.numpy() != 0)
    inputs = small.data()[0]
    np.testing.assert_allclose(state.train_model(inputs), base(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_file_of_keras_2_is_loaded_without_a_head_of_another_size(
    train: engine.Train, tmp_path: Path, devices: int
) -> None:
    """A misfit is named with its pattern; skipped variables keep their initial values."""
    layers = [keras.layers.Dense(8, "tanh", name="hidden"), keras.layers.Dense(7, name="out")]
    old = keras.Sequential([keras.Input((small.FEATURES,)), *layers])
    old.save(tmp_path / "old.h5")
    settings = small.settings(2, init_from=tmp_path / "old.h5", virtual_devices=devices)
    with pytest.raises(ctl_core.SetupError, match=r"out/kernel .*add --init-skip 'out/\*'\.$"):
        train(small.hooks(), **settings)
    state = train(small.hooks(), **settings, init_skip="out/*")

    def train_plain() -> Any:
        model = small.create_model()
        model.layers[0].set_weights(old.layers[0].get_weights())
        return small.plain(2, model=model).weights

    compare.assert_close(state.train_model.weights, train_plain())
    # Layers are matched by name if the file has another number of layers.
    shorter = keras.Sequential([keras.Input((small.FEATURES,)), old.layers[0]])
    shorter.save(tmp_path / "old.h5")
    state = train(small.hooks(), **settings | {"run_name": "b"}, init_skip="out/*")
    compare.assert_close(state.train_model.weights, train_plain())
