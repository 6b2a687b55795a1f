"""Functions of a step are traced once for all devices, and what cannot be shared trains right, too.

A row of the table in ``ctl_core/README.md`` says what is traced for each device. Each has a test.
"""

import collections
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import engine, small
from tests.golden.uneven_batches import (
    FEATURES,
    assert_trained,
    batches_of,
    split,
    train_on,
    train_plainly,
)

BATCH, STEPS = 24, 7


def count_traces(devices: int, train: engine.Train) -> dict[str, int]:
    """Trains with an evaluation, checkpoints and hooks of two sets of values; counts all traces."""
    traces: collections.Counter[str] = collections.Counter()

    class Counting(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.normalize = keras.layers.BatchNormalization()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any, training: bool = False) -> Any:
            traces[f"call in training {training}"] += 1
            return self.dense(self.normalize(inputs, training=training))

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        traces[name] = 0

        def note(*values: Any) -> Any:
            traces[name] += 1
            return function(*values)

        return note

    note_loss = counting("loss_pre", lambda output, batch: (output, batch[1]))
    note_update = counting("update_pre", small.update_pre)
    note_end = counting("update_post", lambda: None)
    hooks = small.hooks(create_model=Counting)
    hooks.create_eval_dataset = small.create_eval_dataset
    hooks.loss_pre = lambda output, batch: note_loss(output, batch)
    hooks.update_pre = lambda gradients: note_update(gradients)
    hooks.update_post = lambda: note_end()
    hooks.every_steps = {3: [lambda loss: None], 4: [lambda output, gradients: None]}
    more = {"eval_every": 6, "ckpt_every": 6, "run_name": f"on-{devices}"}
    train_on(train, hooks, devices, 30, steps=12, **more)
    return dict(traces)


def test_traces_do_not_grow_with_the_devices(train: engine.Train) -> None:
    on_one = count_traces(1, train)
    assert on_one["update_post"] == 2, "one for each set of values that hooks take"
    for devices in (3, engine.DEVICES):
        assert count_traces(devices, train) == on_one


def center(inputs: Any) -> Any:
    return inputs - ctl_core.all_reduce(tf.reduce_mean(inputs, 0), "mean")


def add_noise(inputs: Any) -> Any:
    return inputs + 0.01 * tf.random.normal(tf.shape(inputs))


@pytest.mark.parametrize("change", [center, add_noise])
def test_a_leaf_that_is_not_shared_is_traced_once_for_each_device(
    train: engine.Train, change: Callable[[Any], Any]
) -> None:
    """The trace that creates the variables shows that the leaf cannot be shared."""

    def count_calls(devices: int, change: Callable[[Any], Any]) -> int:
        calls = 0

        class Counting(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.dense = keras.layers.Dense(1)

            def call(self, inputs: Any) -> Any:
                nonlocal calls
                calls += 1
                return self.dense(change(inputs))

        name = f"{change.__name__}-on-{devices}"
        train_on(train, small.hooks(create_model=Counting), devices, BATCH, steps=2, run_name=name)
        return calls

    shared = count_calls(1, tf.identity)
    for devices in (2, 3):
        assert count_calls(devices, change) == shared + devices - 1


class Table(keras.Model):
    """Looks up a factor for each row in a table, which exists once for all devices."""

    def __init__(self) -> None:
        super().__init__()
        pairs = tf.lookup.KeyValueTensorInitializer([0, 1], [-0.5, 0.5], tf.int64, tf.float32)
        self.table = tf.lookup.StaticHashTable(pairs, 0.0)
        self.dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.Ones())

    def call(self, inputs: Any) -> Any:
        sign = tf.cast(inputs[:, :1] > 0, tf.int64)
        return self.dense(inputs) + self.table.lookup(sign)


class Module(tf.Module):
    """Has plain variables, one of which the forward and the backward pass write."""

    @property
    def weights(self) -> list[tf.Variable]:
        return [self.kernel, self.passes]

    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.ones([FEATURES, 1]))
        self.passes = tf.Variable(0.0, trainable=False)

    def __call__(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def count(values: tf.Tensor) -> Any:
            def differentiate(gradient: tf.Tensor) -> tf.Tensor:
                self.passes.assign_add(2.0)
                return gradient

            self.passes.assign_add(1.0)
            return tf.identity(values), differentiate

        return count(inputs @ self.kernel)


class Embedded(keras.Model):
    """Has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(7, 3, embeddings_initializer="ones")
        self.dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.Ones())

    def call(self, inputs: Any) -> Any:
        rows = tf.cast(tf.abs(inputs) * 3.0, tf.int32) % 7
        return self.dense(tf.reduce_sum(self.embedding(rows), 1))


def create_synchronized() -> keras.Model:
    """Returns a model whose replicas exchange values in a leaf."""
    return small.model_with(keras.layers.BatchNormalization(synchronized=True))


MODELS: dict[str, Callable[[], Any]] = {
    "exchange": create_synchronized,
    "table": Table,
    "module": Module,
    "embedding": Embedded,
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_on_three_devices_are_those_of_one(train: engine.Train, name: str) -> None:
    """Batches have 22 rows, so that the shares of the devices differ in size."""
    hooks = small.hooks(create_model=MODELS[name])
    plain = train_plainly(hooks, STEPS, batches_of(split(100), 22, "drop"))
    assert_trained(train_on(train, hooks, 3, 22, steps=STEPS), plain)


@pytest.mark.parametrize("devices", [1, 3])
def test_a_tensor_that_a_hook_stores_is_used_in_the_update(
    train: engine.Train, devices: int
) -> None:
    """``update_pre`` scales the gradients by a tensor that ``loss_pre`` has stored."""
    stored: list[tf.Tensor] = []

    def loss_pre(output: Any, batch: Any) -> Any:
        stored[:] = [tf.constant(0.5) * tf.ones_like(output[0, 0])]
        return output, batch[1]

    def update_pre(gradients: Any) -> Any:
        scaled = [stored[-1] * gradient for gradient in gradients]
        return scaled, gradients

    hooks = small.hooks(loss_pre=loss_pre, update_pre=update_pre)
    plain = train_plainly(hooks, STEPS, batches_of(split(100), BATCH, "drop"))
    state = train_on(train, hooks, devices, BATCH, steps=STEPS)
    assert_trained(state, plain)


def test_ops_with_a_seed_of_their_own_draw_different_numbers_on_each_device(
    train: engine.Train,
) -> None:
    drawn: list[np.ndarray] = []

    def note(values: np.ndarray) -> np.ndarray:
        drawn.append(values)
        return values

    def input_pre(batch: Any) -> Any:
        noise = tf.random.normal([4])
        noted = tf.numpy_function(note, [noise], tf.float32)
        return batch[0] + 0.0 * tf.reduce_sum(noted)

    train_on(train, small.hooks(input_pre=input_pre), 3, BATCH, steps=2)
    assert len(drawn) == 6
    assert len({values.tobytes() for values in drawn}) == 6


def test_a_summary_of_a_hook_is_written_once(train: engine.Train) -> None:
    """A summary writer exists once; the first replica writes, with the number of the step."""

    def update_pre(gradients: Any, loss: Any) -> Any:
        tf.summary.scalar("noted", loss)
        return gradients, gradients

    hooks = small.hooks(update_pre=update_pre)
    plain = train_plainly(small.hooks(), STEPS, batches_of(split(100), BATCH, "drop"))
    state = train_on(train, hooks, 3, BATCH, steps=STEPS)
    assert_trained(state, plain)
    steps = []
    for path in state.run_dir.rglob("events*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            steps += [event.step for value in event.summary.value if value.tag == "noted"]
    assert sorted(steps) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("more", [{}, {"logical_replicas": 3}])
def test_an_op_that_fails_on_one_of_several_devices_is_named(
    train: engine.Train, more: dict[str, Any]
) -> None:
    """The devices cancel each other. The step is repeated on each device to find the reason."""

    def input_pre(batch: Any) -> Any:
        tf.debugging.assert_less(batch[0][:, 0], 1.0, "too large")
        return batch[0]

    hooks = small.hooks(input_pre=input_pre)
    with pytest.raises(ctl_core.RunError, match=r"input_pre \(test_traces.py:\d+\): .*too large"):
        train_on(train, hooks, 3, BATCH, steps=2, **more)


def test_an_op_that_fails_in_an_evaluation_is_named(train: engine.Train) -> None:
    def metric_pre(output: Any, batch: Any) -> Any:
        tf.debugging.assert_less(batch[1][:, 0], 0.5, "too large")
        return batch[1], output

    hooks = small.hooks(metric_pre=metric_pre)
    hooks.create_eval_dataset = small.create_eval_dataset
    hooks.create_metrics = lambda: {"error": keras.metrics.MeanAbsoluteError()}
    with pytest.raises(ctl_core.RunError, match=r"metric_pre \(test_traces.py:\d+\): .*too large"):
        train_on(train, hooks, 3, BATCH, steps=2)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_call_that_fails_counts_no_steps(train: engine.Train, devices: int) -> None:
    ends: list[Any] = []

    def input_pre(batch: Any, step: Any) -> Any:
        tf.debugging.assert_less(step, tf.constant(5, tf.int64))
        return batch[0]

    hooks = small.hooks(input_pre=input_pre)
    hooks.at_end = lambda step, reason: ends.append((step, reason))
    with pytest.raises(ctl_core.RunError, match=r"after step 0\.$"):
        train_on(train, hooks, devices, BATCH, steps=8)
    assert [reason for _, reason in ends] == ["failed"]
    assert ends[0][0] == 0


def test_hooks_of_an_update_use_a_table_one_after_another(train: engine.Train) -> None:
    """All devices call ``update_pre`` before ``update_post`` writes what they read."""
    tables: list[Any] = []
    key = tf.constant(0, tf.int64)

    def create_model() -> Any:
        tables[:] = [tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)]
        return small.create_model()

    def create_ckpt(ckpt_path: str, train_model: Any) -> Any:
        ckpt = tf.train.Checkpoint(train_model=train_model, table=tables[0])
        return ckpt, tf.train.CheckpointManager(ckpt, ckpt_path, max_to_keep=3)

    def update_pre(gradients: Any) -> Any:
        count = tables[0].lookup(key)
        return [gradient / (1.0 + count) for gradient in gradients], gradients

    def update_post(step: Any) -> None:
        tables[0].insert(key, tf.cast(step, tf.float32))

    hooks = small.hooks(create_model=create_model, create_ckpt=create_ckpt)
    hooks.update_pre, hooks.update_post = update_pre, update_post
    # The run would end at its last checkpoint if the devices had read different values.
    assert train_on(train, hooks, 3, BATCH, steps=4).step == 4


def test_a_python_function_in_a_loss_is_differentiated_on_each_device(
    train: engine.Train,
) -> None:
    def create_loss() -> Any:
        def square(difference: Any) -> Any:
            return tf.ensure_shape(
                tf.py_function(lambda value: value * value, [difference], tf.float32), [None]
            )

        return lambda pair: square(pair[0][:, 0] - pair[1][:, 0])

    hooks = small.hooks(create_loss=create_loss)
    plain = train_plainly(hooks, STEPS, batches_of(split(100), BATCH, "drop"))
    assert_trained(train_on(train, hooks, 3, BATCH, steps=STEPS), plain)
