"""Runs with ``logical_replicas`` save the same bits on any number of devices."""

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
from tests.golden.catalogue import NAMES, SETTINGS, load_program
from tests.golden.logical_features import (
    FEATURES,
    clip,
    create_row_counter,
    make_feature,
    make_small_hooks,
)

LOGICAL_REPLICAS = 6
layers = keras.layers


def images() -> tuple[np.ndarray, np.ndarray]:
    """Returns 100 images of 12 × 12 pixels with their classes.

    In batches of 16, the rows cannot be divided evenly between 6 logical replicas.
    """
    random = np.random.default_rng(0)
    return random.normal(size=(100, 12, 12, 3)).astype("float32"), random.integers(0, 10, 100)


def create_cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.MaxPooling2D(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.GaussianNoise(0.1),
            layers.Dense(10),
        ]
    )


def create_transformer() -> keras.Model:
    """Returns a Transformer over nine patches of an image."""
    inputs = keras.Input((12, 12, 3))
    tokens = layers.Reshape((9, 16))(layers.Conv2D(16, 4, strides=4)(inputs))
    attention = layers.MultiHeadAttention(2, 8, dropout=0.2)
    tokens += attention(tokens, tokens)
    hidden = layers.Dense(16, "gelu")(layers.LayerNormalization()(tokens))
    tokens += layers.Dropout(0.2)(hidden)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(tokens)))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "cnn": create_cnn,
    "transformer": create_transformer,
}


def make_hooks(model: str, **replaced: Any) -> SimpleNamespace:
    """Returns hooks with Adam and the default ``update_pre``, which clips."""
    hooks = small.hooks(
        **{
            "create_dataset": small.slices(images()),
            "create_model": MODELS[model],
            "create_loss": lambda: small.crossentropy,
            "create_opt": keras.optimizers.Adam,
            # The last batch has 3 rows, fewer than there are logical replicas.
            "create_eval_dataset": small.slices(tuple(array[:35] for array in images())),
            "create_metrics": lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
            **replaced,
        }
    )
    del hooks.update_pre
    return hooks


def train(hooks: SimpleNamespace, runs: Path, name: str, **settings: Any) -> ctl_core.State:
    """Trains a run that is evaluated after every second step."""
    return engine.train(
        hooks, runs, **{"run_name": name, "ckpt_every": 0, "eval_every": 2, "seed": 7, **settings}
    )


def assert_equal(state: ctl_core.State, expected: ctl_core.State, more_than: int = 5) -> None:
    """Asserts that two runs have reported the same values, and saved the same bits at the end.

    Args:
        state: the state at the end of a run
        expected: the state at the end of the other run
        more_than: the number of tensors that the checkpoint has to exceed
    """
    assert list_values(state) == list_values(expected)
    compared = 0
    for subfolder in ("", "engine"):
        saved = compare.read_checkpoint(state.run_dir, state.step, subfolder)
        others = compare.read_checkpoint(expected.run_dir, expected.step, subfolder)
        assert saved.keys() == others.keys()
        compared += len(saved)
        for key, value in others.items():
            assert saved[key].tobytes() == value.tobytes(), key
    assert compared > more_than


def list_values(state: ctl_core.State) -> list[dict[str, Any]]:
    """Returns the values of evaluations, training metrics and ``ctl.report``, without durations."""
    timed = ("time", "seconds", "examples_per_second")
    return [{name: line[name] for name in line if name not in timed} for line in state.history]


def test_a_cnn_ends_with_the_same_bits_on_three_devices_and_resumed_on_one(tmp_path: Path) -> None:
    """Weights, moving statistics, optimizer, generators and evaluations have the same bits.

    Adam would amplify a difference.
    """
    hooks = make_hooks("cnn")
    expected = train(hooks, tmp_path, "one", logical_replicas=LOGICAL_REPLICAS, steps=6)
    train(hooks, tmp_path, "many", logical_replicas=LOGICAL_REPLICAS, virtual_devices=3, steps=4)
    assert_equal(train(hooks, tmp_path, "many", steps=6), expected)


def test_a_transformer_ends_with_the_same_bits_on_five_devices(tmp_path: Path) -> None:
    hooks = make_hooks("transformer")
    one, five = (
        train(
            hooks,
            tmp_path,
            f"on-{devices}",
            steps=4,
            logical_replicas=LOGICAL_REPLICAS,
            virtual_devices=devices,
        )
        for devices in (1, 5)
    )
    assert_equal(five, one)


class Noise(keras.Layer):
    """Adds noise from a TensorFlow generator."""

    def build(self, shape: Any) -> None:
        self.generator = tf.random.Generator.from_seed(5)

    def call(self, values: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return values
        return values + 0.1 * self.generator.normal(tf.shape(values))


class Counter(keras.Layer):
    """Updates variables that are equal on all replicas, and one that is summed over replicas."""

    def build(self, shape: Any) -> None:
        self.calls = tf.Variable(0, trainable=False)
        self.was_called = tf.Variable(False, trainable=False)
        self.unknown = tf.Variable(0.0, trainable=False)
        self.rows = create_row_counter()

    def call(self, values: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            self.calls.assign_add(1)
            self.was_called.assign(True)
            self.unknown.assign(float("nan"))
            self.rows.assign_add(tf.shape(values, tf.int64)[0])
        return values


def create_frozen() -> keras.Model:
    model = small.model_with(layers.BatchNormalization(momentum=0.9), layers.Dropout(0.3))
    model.layers[0].trainable = False
    model.layers[1].trainable = False
    return model


def create_eval_model(train_model: Any) -> keras.Model:
    return keras.Sequential([train_model.layers[0], layers.Dense(1)])


def summarize(batch: Any) -> tf.Tensor:
    """Writes a summary. The engine keeps only that of the first logical replica."""
    tf.summary.scalar("mean", tf.reduce_mean(batch[0]))
    return batch[0]


def unfreeze(train_model: Any) -> None:
    train_model.layers[0].trainable = True


# For each program: the hooks that it replaces, and its settings. A program has several features,
# because a bit of any of them that differs would be seen.
PROGRAMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frozen, with a model of evaluations and a summary": (
        {
            "create_model": create_frozen,
            "at_step": {2: unfreeze},
            "create_eval_model": create_eval_model,
            "input_pre": summarize,
        },
        {"lr_schedule": "cosine", "warmup": 2},
    ),
    "bfloat16, and a logical replica for each row of the same batch": (
        {},
        {"precision": "bfloat16", "overfit_batches": 1, "logical_replicas": small.BATCH},
    ),
    "anomaly": ({}, {"detect_anomaly": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_end_with_the_same_bits_on_three_devices(name: str, tmp_path: Path) -> None:
    replaced, settings = PROGRAMS[name]
    one, three = train_on_one_and_three(tmp_path, replaced, **settings)
    assert_equal(three, one)


def train_on_one_and_three(
    runs: Path, replaced: dict[str, Any], **settings: Any
) -> list[ctl_core.State]:
    """Trains a small program on one device and on three devices."""
    hooks = make_small_hooks(**replaced)
    settings = {"logical_replicas": LOGICAL_REPLICAS, "steps": 4, **settings}
    return [
        train(hooks, runs, f"on-{devices}", virtual_devices=devices, **settings)
        for devices in (1, 3)
    ]


# In test_logical_processes, the program "compiled" is killed, and resumed on two devices.
OTHER_FEATURES = [name for name in FEATURES if name != "compiled"]


@pytest.mark.parametrize(
    "feature", small.slow_but("lora, groups, logged and reported values", of=OTHER_FEATURES)
)
def test_features_end_with_the_same_bits_killed_and_on_other_devices(
    feature: str, tmp_path: Path
) -> None:
    """The bits are the same on one device, on three, and if a run on three resumes on two."""
    _, settings = FEATURES[feature]
    hooks = make_feature(feature)
    settings = {
        "logical_replicas": LOGICAL_REPLICAS,
        "steps": 9,
        "ckpt_every": 6,
        "eval_every": 3,
        "log_every": 4,
        **settings,
    }
    expected = train(hooks, tmp_path, "one", **settings)

    def kill() -> None:
        engine.leave_as_killed(tmp_path / "three", tmp_path / "killed")

    hooks.at_step = {8: kill}
    shards = {"virtual_devices": 3, "shard_optimizer": True}
    assert_equal(train(hooks, tmp_path, "three", **shards, **settings), expected)
    del hooks.at_step
    resumed = train(hooks, tmp_path, "killed", virtual_devices=2, **settings)
    assert "resuming at step 6" in (tmp_path / "killed" / "train.log").read_text()
    assert_equal(resumed, expected)
    if settings.get("precision") == "float16":
        saved = compare.read_checkpoint(expected.run_dir, expected.step, "engine")
        (scale,) = (value for key, value in saved.items() if "Sscale/" in key)
        assert scale < 2**15, "no update was skipped"


# These programs in tests/golden/programs exchange values between replicas, and are refused with
# these messages.
NEEDS_ALL = "needs all replicas at the same time, but a device computes logical replicas one after"
REFUSED = {
    "batch_norm": r"create_model \(basics.py:30\): BatchNormalization .* is synchronized, which",
    "codebook": rf"create_model \(codebook.py:30\): all_reduce {NEEDS_ALL}",
    "exchanges": rf"loss_pre \(exchanges.py:76\): all_reduce {NEEDS_ALL}",
    "experts": rf"create_model \(experts.py:44\): all_reduce {NEEDS_ALL}",
    "simclr": rf"loss_pre \(simclr.py:45\): all_gather {NEEDS_ALL}",
    "survival": rf"loss_pre \(survival.py:43\): all_gather {NEEDS_ALL}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_programs_have_the_weights_of_their_plain_loops_and_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    """Each program has the same bits on one device and on two, or is refused on both."""
    program = load_program(name)
    # with 4 logical replicas, each share has two examples
    leaves = 4 if name == "two_by_two" else 5
    settings = {**SETTINGS, **program.settings, "logical_replicas": leaves, "seed": 0}
    if name in REFUSED:
        for devices in (1, 2):
            with pytest.raises(ctl_core.SetupError, match=REFUSED[name]):
                train(program.hooks(), tmp_path, "run", virtual_devices=devices, **settings)
        return
    expected = train(program.hooks(), tmp_path, "one", **settings)
    shards = {"virtual_devices": 2, "shard_optimizer": True}
    state = train(program.hooks(), tmp_path, "two", **shards, **settings)
    assert_equal(state, expected, more_than=3)
    program.assert_plain(program.weights(state), state.metrics)


@pytest.mark.slow
def test_generators_and_written_variables_do_not_depend_on_devices(tmp_path: Path) -> None:
    """Sums that are exchanged in several buckets do not depend on the number of devices either.

    The devices finish the buckets one by one.
    """
    wide = 1100  # a kernel of 4.8 MB, which is larger than a bucket
    counters: list[Counter] = []

    def create_model() -> keras.Model:
        counters.append(Counter())
        return small.model_with(Noise(), counters[-1], layers.Dense(wide), layers.Dense(wide))

    one, three = train_on_one_and_three(tmp_path, {"create_model": create_model})
    assert_equal(three, one)
    for counter in counters:
        assert counter.calls.numpy() == 4
        assert counter.rows.numpy() == 4 * small.BATCH


@pytest.mark.slow
def test_runs_that_start_from_another_run_do_not_depend_on_devices(tmp_path: Path) -> None:
    """The source run has a different number of logical replicas."""
    source = train(make_small_hooks(), tmp_path, "source", logical_replicas=4, steps=4)
    for setting in ("fork", "init_from"):
        one, three = train_on_one_and_three(
            tmp_path / setting, {}, steps=6, **{setting: str(source.run_dir)}
        )
        assert_equal(three, one)


def test_a_variable_that_differs_is_named(tmp_path: Path) -> None:
    class Sum(keras.Layer):
        def build(self, shape: Any) -> None:
            self.total = self.add_weight(shape=(), trainable=False, name="total")

        def call(self, values: tf.Tensor) -> tf.Tensor:
            self.total.assign(tf.reduce_sum(values))
            return values

    hooks = small.hooks(create_model=lambda: small.model_with(Sum()))
    line = r"in step 1, the forward or backward pass assigns different values to \S*/total on"
    with pytest.raises(ctl_core.RunError, match=line):
        train(hooks, tmp_path, "run", logical_replicas=2, steps=3)


def test_hooks_count_logical_replicas(tmp_path: Path) -> None:
    """``update_pre`` and ``update_post`` are called in the context of logical replica 0."""
    seen: list[tuple[str, int, int]] = []

    def note(hook: str) -> None:
        replica = tf.get_static_value(tf.convert_to_tensor(ctl_core.replica_id()))
        seen.append((hook, ctl_core.num_replicas(), int(np.array(replica))))

    def create_model() -> keras.Model:
        note("create_model")
        return small.create_model()

    def update_pre(gradients: Any) -> Any:
        note("update_pre")
        return gradients, gradients

    def update_post() -> None:
        note("update_post")

    hooks = small.hooks(create_model=create_model, update_pre=update_pre, update_post=update_post)
    train(hooks, tmp_path, "run", logical_replicas=3, virtual_devices=2, steps=1)
    assert set(seen) == {
        ("create_model", 3, 0),
        ("update_pre", 3, 0),
        ("update_post", 3, 0),
    }
    assert ctl_core.num_replicas() == 1


@pytest.mark.slow
def test_a_run_without_noise_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """The weights and evaluations are those of a plain loop, which clips the summed gradient.

    On one device and on three, the bits are the same.
    """
    hooks = small.hooks(
        update_pre=clip,
        create_eval_dataset=small.create_eval_dataset,
        create_metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
    )
    state, single = (
        engine.train(
            hooks,
            tmp_path / str(devices),
            **small.settings(7, logical_replicas=LOGICAL_REPLICAS, virtual_devices=devices),
        )
        for devices in (3, 1)
    )
    compare.assert_same(state.train_model.weights, single.train_model.weights)
    assert state.metrics == single.metrics
    expected = small.plain(7, optimizer=keras.optimizers.SGD(small.RATE, global_clipnorm=0.5))
    unclipped = small.plain(7)
    compare.assert_close(state.train_model.weights, expected.weights)
    assert not np.allclose(expected.weights[0], unclipped.weights[0], atol=1e-4)
    errors = small.errors(expected)
    assert state.metrics == pytest.approx(errors, rel=1e-5)


@pytest.mark.slow
def test_logical_replicas_see_their_index_and_host_hooks_get_all_rows(tmp_path: Path) -> None:
    """Host hooks get the rows in the batch's order. The outputs depend on the replica index."""
    seen: list[Any] = []

    def look(output: Any, batch: Any) -> None:
        seen.append((output.numpy(), batch[0].numpy()))

    def input_pre(batch: Any) -> Any:
        context = tf.distribute.get_replica_context()
        # the replica index is static only while the model is built
        if tf.get_static_value(context.replica_id_in_sync_group) is None:
            assert context.num_replicas_in_sync == LOGICAL_REPLICAS
        index = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return tf.concat([batch[0][:, :4], tf.fill([tf.shape(batch[0])[0], 1], index)], axis=1)

    for devices in (1, 4):
        hooks = small.hooks(input_pre=input_pre, every_steps={1: look})
        hooks.create_dataset = small.slices(small.data(), drop_remainder=True)
        engine.train(
            hooks, tmp_path / str(devices), steps=2, logical_replicas=LOGICAL_REPLICAS,
            virtual_devices=devices,
        )  # fmt: skip
    for (output, rows), (other, other_rows) in zip(seen[:2], seen[2:], strict=True):
        np.testing.assert_array_equal(output, other)
        np.testing.assert_array_equal(rows, other_rows)
    np.testing.assert_array_equal(seen[0][1], small.data()[0][:16])
