"""Hidden state of hooks, and the files of interrupted runs, are restored or refused in one line."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small

SETTINGS: dict[str, Any] = small.settings(9, ckpt_every=3, log_every=1000)


# ---- State that is hidden in hooks -------------------------------------------------------------


class LayerDrop(keras.layers.Layer):
    """Tosses a coin on each replica to decide whether Dropout draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.coin = keras.random.SeedGenerator(5)
        self.dropout = keras.layers.Dropout(0.4, seed=7)

    def call(self, inputs: Any, training: bool = False) -> Any:
        heads = keras.random.uniform((), seed=self.coin) < 0.5
        return tf.cond(heads, lambda: self.dropout(inputs, training=training), lambda: 1.0 * inputs)


class ListLoss:
    """Weights examples by a variable in a nested list, which changes in each step."""

    def __init__(self) -> None:
        self.parts = [[tf.Variable(1.0, trainable=False)]]

    def __call__(self, pair: Any) -> Any:
        self.parts[0][0].assign(0.9 * self.parts[0][0])
        return self.parts[0][0] * small.squared_error(pair)


def hide() -> tuple[SimpleNamespace, Callable[[], list[Any]]]:
    """Returns hooks that hide their state, and a function that returns this state.

    Layers are in a dict of a plain object, one variable is in a closure, and the loss has another
    one in nested lists. Generators are created when ``update_pre`` is first called, one of them by
    Keras.
    """
    plain = SimpleNamespace()
    created: dict[str, Any] = {}

    def create_model() -> Any:
        plain.layers = {"net": small.model_with(LayerDrop()), "inner": [keras.layers.Dense(5)]}
        created.update(norm=tf.Variable(1.0, trainable=False), generators=None)
        return lambda inputs: plain.layers["net"](inputs + plain.layers["inner"][0](inputs))

    def create_loss() -> Any:
        plain.loss = ListLoss()
        return plain.loss

    def weights() -> list[Any]:
        return [*plain.layers["net"].weights, *plain.layers["inner"][0].weights]

    def update_pre(gradients: Any) -> Any:
        if created["generators"] is None:
            with tf.init_scope():
                generators = tf.random.Generator.from_seed(5), keras.random.SeedGenerator(6)
                created["generators"] = generators
        first, other = created["generators"]
        noise = first.normal([]) + keras.random.normal([], seed=other) + keras.random.normal([])
        scale = 1.0 + ctl_core.all_reduce(noise, "mean")
        created["norm"].assign(0.9 * created["norm"] + 0.1 * tf.linalg.global_norm(gradients))
        return [scale * gradient / created["norm"] for gradient in gradients], gradients

    hooks = small.hooks(create_model=create_model, create_loss=create_loss, update_pre=update_pre)
    hooks.grad_pre = lambda loss: (loss, 0.0, weights())
    return hooks, lambda: [*weights(), created["norm"], plain.loss.parts[0][0]]


def hide_outside() -> tuple[SimpleNamespace, Callable[[], list[Any]]]:
    """Returns hooks whose loss changes a variable that exists before any hook runs.

    The second value is a function that returns the variable.
    """
    variable = tf.Variable(0.0, trainable=False, name="count")

    def loss(pair: Any) -> Any:
        variable.assign_add(1.0)
        return small.squared_error(pair) * variable / 5.0

    return small.hooks(create_loss=lambda: loss), lambda: [variable]


@pytest.mark.parametrize(
    ("make", "devices"),
    small.slow_but((hide_outside, 1), of=[(hide, 1), (hide, 3), (hide_outside, 1)]),
)
def test_hidden_state_survives_a_kill(
    train: engine.Train, runs: Path, make: Any, devices: int
) -> None:
    saved = []
    for run_name in ("whole", "killed"):
        hooks, hidden = make()
        if run_name == "whole":
            hooks.at_step = {5: lambda: engine.leave_as_killed(runs / "whole", runs / "killed")}
        state = train(hooks, **SETTINGS, run_name=run_name, virtual_devices=devices)
        weights = getattr(state.train_model, "weights", [])
        saved.append(compare.read_numbers([*weights, *hidden()]))
    assert "resuming at step 3" in (runs / "killed/train.log").read_text()
    compare.assert_same(*saved)


def test_variable_that_replicas_would_share_is_refused(train: engine.Train) -> None:
    with pytest.raises(ctl_core.SetupError, match="assigns count") as refused:
        train(hide_outside()[0], **SETTINGS, virtual_devices=2)
    assert "create_model" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("returned", [0, 1])
def test_written_lookup_table_outside_the_checkpoint_is_refused(
    train: engine.Train, returned: int
) -> None:
    """The table is refused even if ``create_ckpt`` saves another table."""
    tables: list[Any] = []
    key = tf.constant([1], tf.int64)

    def create_model() -> Any:
        table = tf.lookup.experimental.MutableHashTable
        tables[:] = [table(tf.int64, tf.float32, 0.0) for _ in range(1 + returned)]
        return small.create_model()

    def create_ckpt(ckpt_path: str, train_model: Any) -> Any:
        kept = {"table": tables[1]} if returned else {}
        ckpt = tf.train.Checkpoint(train_model=train_model, **kept)
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)

    def update_pre(gradients: Any) -> Any:
        with tf.control_dependencies([table.insert(key, [1.0]) for table in tables]):
            return [tf.identity(gradient) for gradient in gradients], gradients

    hooks = small.hooks(create_model=create_model, create_ckpt=create_ckpt, update_pre=update_pre)
    with pytest.raises(ctl_core.SetupError, match="lookup table") as refused:
        train(hooks, **SETTINGS)
    assert "create_ckpt" in str(refused.value)
    assert "\n" not in str(refused.value)


class MixesPast(keras.layers.Layer):
    """Adds the mean of four earlier rows, which are in a queue."""

    def __init__(self, queue: type[Any]) -> None:
        super().__init__()
        options = {"min_after_dequeue": 1} if queue is tf.queue.RandomShuffleQueue else {}
        self.past = queue(100, dtypes=[tf.float32], shapes=[[8]], **options)
        self.past.enqueue_many(tf.zeros([16, 8]))

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        old = self.past.dequeue_many(4)
        self.past.enqueue_many(inputs[:4])
        return inputs + 0.3 * tf.reduce_mean(old, axis=0)


@pytest.mark.parametrize(
    ("queue", "devices"),
    [
        (tf.queue.FIFOQueue, 3),
        (tf.queue.PaddingFIFOQueue, 1),
        (tf.queue.RandomShuffleQueue, 1),
    ],
)
def test_a_queue_that_steps_use_is_refused(
    train: engine.Train, queue: type[Any], devices: int
) -> None:
    hooks = small.hooks(create_model=lambda: small.model_with(MixesPast(queue)))
    with pytest.raises(ctl_core.SetupError, match="QueueDequeueManyV2 keeps values") as refused:
        train(hooks, **SETTINGS, virtual_devices=devices)
    assert "tf.Variable" in str(refused.value)
    assert "\n" not in str(refused.value)


class AddsNext(keras.layers.Layer):
    """Adds the next number of an iterator."""

    def __init__(self, iterator: Any) -> None:
        super().__init__()
        self.iterator = iterator

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs + next(self.iterator) if training else inputs


def count_up() -> Any:
    return iter(tf.data.Dataset.range(100).map(lambda number: 0.01 * tf.cast(number, tf.float32)))


def test_an_iterator_of_the_model_resumes(
    train: engine.Train, capfd: pytest.CaptureFixture[str]
) -> None:
    """The iterator is an attribute of a layer, so the checkpoint contains its position."""
    weights = []
    for run_name, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
        hooks = small.hooks(create_model=lambda: small.model_with(AddsNext(count_up())))
        weights.append(train(hooks, **small.settings(steps, run_name=run_name)).train_model.weights)
    compare.assert_same(weights[2], weights[0])
    assert "do not contain" not in capfd.readouterr().out


def test_state_that_may_be_unsaved_is_named_at_each_start(
    train: engine.Train, capfd: pytest.CaptureFixture[str]
) -> None:
    iterator = count_up()

    def input_pre(batch: Any) -> Any:
        tf.py_function(lambda: None, [], [])
        return batch[0] + next(iterator)

    for steps in (1, 2):
        train(small.hooks(input_pre=input_pre), **small.settings(steps))
        (line,) = [line for line in capfd.readouterr().out.splitlines() if "do not contain" in line]
        assert "tf.py_function in input_pre (" in line
        assert "an iterator" in line


class Encoder(tf.Module):
    """Computes three features from a lookup table and a variable."""

    def __init__(self) -> None:
        super().__init__()
        pairs = tf.lookup.KeyValueTensorInitializer([0, 1], [-0.5, 0.5], tf.int64, tf.float32)
        self.table = tf.lookup.StaticHashTable(pairs, 0.0)
        self.kernel = tf.Variable(tf.linspace([-1.0] * 3, [1.0] * 3, small.FEATURES))

    @tf.function(input_signature=[tf.TensorSpec([None, small.FEATURES])])
    def serve(self, inputs: tf.Tensor) -> tf.Tensor:
        signs = tf.cast(inputs[:, :1] > 0, tf.int64)
        return tf.tanh(inputs @ self.kernel) + self.table.lookup(signs)


class OnEncoder(keras.Model):
    """A trained head on the output of a SavedModel."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        run = self.encoder if isinstance(self.encoder, keras.Layer) else self.encoder.serve
        return self.head(tf.stop_gradient(run(inputs)))


def read_as_layer(folder: str) -> keras.Layer:
    return keras.layers.TFSMLayer(folder, call_endpoint="serve", trainable=False)


@pytest.mark.parametrize(
    ("is_of_keras", "read", "devices"),
    [
        (True, read_as_layer, 2),
        (False, tf.saved_model.load, 2),
        *small.slow_but(of=[(True, tf.saved_model.load, 1), (False, read_as_layer, 1)]),
    ],
)
def test_model_that_holds_a_saved_model_resumes(
    train: engine.Train, runs: Path, tmp_path: Path, is_of_keras: bool, read: Any, devices: int
) -> None:
    """A run whose model contains a SavedModel resumes bit for bit.

    TensorFlow itself uses the names of the SavedModel's parts, which must not disturb the
    checkpoint.
    """
    folder = str(tmp_path / "encoder")
    if is_of_keras:
        small.create_model().export(folder, verbose=False)
    else:
        encoder = Encoder()
        tf.saved_model.save(encoder, folder, {"serve": encoder.serve})
    hooks = small.hooks(create_model=lambda: OnEncoder(read(folder)))
    hooks.at_step = {5: lambda: engine.leave_as_killed(runs / "whole", runs / "killed")}
    how = {**SETTINGS, "virtual_devices": devices}
    whole = train(hooks, **how, run_name="whole")
    del hooks.at_step
    resumed = train(hooks, **how, run_name="killed")
    assert "resuming at step 3" in (runs / "killed/train.log").read_text()
    compare.assert_same(resumed.train_model.weights, whole.train_model.weights)
    plain = small.plain(9, model=OnEncoder(read(folder)))
    compare.assert_close(whole.train_model.head.weights, plain.head.weights)


# ---- Files of interrupted or older runs --------------------------------------------------------

WRITES = ("engine/input-6-*", "ckpt-6.*", "engine/ckpt-6.[!j]*", "engine/ckpt-6.json")


def test_checkpoint_counts_only_with_its_record(train: engine.Train, runs: Path) -> None:
    """A checkpoint is used only if its record exists, a JSON file that is written last."""
    examples = tf.data.Dataset.from_tensor_slices(small.data())
    hooks = small.hooks(
        create_dataset=lambda: examples.shuffle(20, seed=3).batch(7),
        create_opt=lambda lr: keras.optimizers.SGD(lr, momentum=0.5),
    )
    whole = train(hooks, **SETTINGS, run_name="whole")
    train(hooks, **SETTINGS | {"steps": 6}, run_name="parts")
    for writes in (1, 2, 3, 4):
        run = shutil.copytree(runs / "parts", runs / f"parts-{writes}")
        for pattern in WRITES[writes:]:
            files = list((run / "ckpt").glob(pattern))
            assert files
            for file in files:
                file.unlink()
        resumed = train(hooks, **SETTINGS, run_name=run.name)
        step = 6 if writes == 4 else 3
        assert f"resuming at step {step}" in (run / "train.log").read_text()
        compare.assert_same(resumed.train_model.weights, whole.train_model.weights)


def read_model(path: Path) -> keras.Model:
    model = small.create_model()
    tf.train.Checkpoint(train_model=model).read(str(path)).expect_partial()
    return model


def test_run_of_engine_0_4_is_refused(tmp_path: Path, command: engine.Command) -> None:
    """A run of engine 0.4 is refused and not changed, but a new run can start with its weights."""
    (tmp_path / "callbacks.py").write_text(small.CALLBACKS)
    words = ("train", "--batch-size=16", "--learning-rate=0.05")
    runs = tmp_path / "runs"
    shutil.copytree(Path(__file__).parent / "run_of_0.4", runs / "old")
    kept = shutil.copytree(runs / "old" / "ckpt", tmp_path / "kept")
    refused = command(*words, "--run-name=old", "--steps=5")
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "--init-from" in refused.err
    for file in (path for path in kept.rglob("*") if path.is_file()):
        assert (runs / "old/ckpt" / file.relative_to(kept)).read_bytes() == file.read_bytes()
    begun = command(*words, "--run-name=new", "--steps=2", "--init-from=old")
    assert begun.code == 0, begun.err
    first = read_model(kept / "ckpt-3")
    compare.assert_close(first.weights, small.plain(3).weights)
    trained = read_model(runs / "new/ckpt/ckpt-2")
    compare.assert_close(trained.weights, small.plain(2, model=first).weights)


@pytest.mark.parametrize("run_name", ["rows", "widths", "devices"])
def test_run_of_engine_1_0_resumes(tmp_path: Path, command: engine.Command, run_name: str) -> None:
    """A run of engine 1.0 resumes with the same weights, slots and random numbers.

    These are compared with a run that this engine trains without interruption. In ``widths``,
    elements differ in width. They pass a stage that 1.0 did not have, so that the saved position of
    the data cannot be restored. Reading again from the start must reach the same example. In
    ``devices``, two replicas had moving statistics of their own, which continue from their mean.
    """
    golden = Path(__file__).parent
    runs = shutil.copytree(golden / "runs_of_1.0", tmp_path / "runs")
    shutil.copy(golden / "program_of_1_0.py", tmp_path / "callbacks.py")
    shutil.copy(runs / run_name / "config.yaml", tmp_path)
    whole = command("train", "--run-name=whole", "--steps=16")
    resumed = command("train", f"--run-name={run_name}", "--steps=16")
    assert (whole.code, resumed.code) == (0, 0), resumed.err
    assert "resuming at step 8" in resumed.out
    reads_again = "reading and dropping 116 examples" in resumed.out + resumed.err
    assert reads_again == (run_name == "widths")
    for step in (8, 16):
        for folder in ("", "engine"):
            saved = compare.read_checkpoint(runs / run_name, step, folder)
            expected = compare.read_checkpoint(runs / "whole", step, folder)
            assert saved.keys() == expected.keys()
            compare.assert_close(saved.values(), [expected[name] for name in saved])


def test_run_of_engine_2_0_is_told_what_changes(tmp_path: Path, command: engine.Command) -> None:
    """Two devices with two micro-batches each had other random numbers, rows and statistics."""
    golden = Path(__file__).parent
    run = shutil.copytree(golden / "runs_of_2.0", tmp_path / "runs") / "both"
    shutil.copy(golden / "program_of_1_0.py", tmp_path / "callbacks.py")
    resumed = command("train", "--run-name=both", "--steps=12")
    assert resumed.code == 0, resumed.err
    line = next(line for line in resumed.out.splitlines() if "trained by ctl_core 2.0.0" in line)
    for change in ("random numbers", "momentum of moving statistics", "neighboring rows"):
        assert change in line
    assert "cannot be read" not in resumed.out + resumed.err
    saved = compare.read_checkpoint(run, 12)
    assert all(np.isfinite(value).all() for value in saved.values() if value.dtype.kind == "f")
    again = command("train", "--run-name=both", "--steps=16")
    assert "trained by ctl_core" not in again.out


def test_variable_that_a_host_hook_creates_while_training_is_refused(train: engine.Train) -> None:
    """A resumed process could not restore the variable, which the hook creates too late."""
    kept: list[tf.Variable] = []

    def follow(train_model: Any) -> None:
        tf.Variable(1.0)  # The hook does not keep this variable, so it is not state.
        if train_model.optimizer_steps > 3:
            kept.append(tf.Variable(0.0, name="average"))

    def count(train_model: Any, step: int) -> None:
        train_model.optimizer_steps = step

    hooks = small.hooks(every_steps={1: [count, follow]})
    with pytest.raises(ctl_core.RunError, match=r"every_steps\[1\] .*variable average"):
        train(hooks, **small.settings(6))
    assert train(hooks, **small.settings(3, run_name="well")).step == 3


class Parts:
    """A model that is a plain object with a list of layers."""

    def __init__(self) -> None:
        self.parts = [small.create_model()]

    def __call__(self, inputs: Any) -> Any:
        for part in self.parts:
            inputs = part(inputs)
        return inputs


def add_to_sequential(train_model: Any) -> None:
    train_model.add(keras.layers.Dense(1, name="added"))


def add_to_list(train_model: Any) -> None:
    train_model.parts.append(keras.layers.Dense(1, name="added"))  # has no variables yet


def add_to_optimizer(train_model: Any, optimizer: Any) -> None:
    optimizer.average = tf.Variable(train_model.weights[0], name="added")


@pytest.mark.parametrize(
    ("create_model", "add"),
    [
        (small.create_model, add_to_sequential),
        (Parts, add_to_list),
        (small.create_model, add_to_optimizer),
    ],
)
def test_layer_that_a_host_hook_adds_is_refused_right_after_the_hook(
    train: engine.Train, create_model: Callable[[], Any], add: Callable[..., None]
) -> None:
    taken: list[int] = []
    hooks = small.hooks(
        create_model=create_model,
        at_step={2: add},
        every_steps={1: lambda step: taken.append(step)},
    )
    with pytest.raises(ctl_core.RunError, match=r"at_step\[2\] \(.* added during") as refused:
        train(hooks, **small.settings(6))
    assert taken == [1, 2]
    assert "create_model" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_layers_that_a_host_hook_may_create(
    train: engine.Train, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are discarded, have no variables of their own, or are created after the last step."""
    kept: list[tf.Variable] = []

    def create(train_model: Any) -> None:
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        train_model.classifier = keras.Sequential([train_model, keras.layers.Softmax()])

    def keep() -> None:
        kept.append(tf.Variable(0.0, name="kept"))

    hooks = small.hooks(
        every_steps={1: create},
        at_step={2: keep, 4: kept.clear},
        at_end=lambda train_model: train_model.add(keras.layers.Softmax()),
    )
    state = train(hooks, **small.settings(6))
    compare.assert_close(state.train_model.weights, small.plain(6).weights)
    (warning,) = [line for line in capfd.readouterr().out.splitlines() if "warning" in line]
    assert "at_step[2]" in warning
    assert "the variable kept" in warning
