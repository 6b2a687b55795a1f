"""N devices with A micro-batches train as N x A devices do: both compute N x A leaves."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import compare, engine, small
from tests.golden.uneven_batches import batches_of, split, train_on

# The ways to compute four leaves: numbers of devices and of micro-batches.
WAYS = [(1, 4), (2, 2), (4, 1)]
LEAVES = 4
IMAGES = np.random.default_rng(0).normal(size=(96, 6, 6, 2)).astype("float32")
CLASSES = np.random.default_rng(1).integers(0, 4, 96)


def create_cnn(*noise: keras.layers.Layer) -> keras.Model:
    """Returns a model whose initial weights do not depend on the global seed."""
    initializer = keras.initializers.GlorotUniform(seed=4)
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            keras.layers.Conv2D(6, 3, kernel_initializer=initializer),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.ReLU(),
            *noise,
            keras.layers.Flatten(),
            keras.layers.Dense(4, kernel_initializer=initializer),
        ]
    )


def create_noisy_cnn() -> keras.Model:
    return create_cnn(keras.layers.Dropout(0.4), keras.layers.GaussianNoise(0.2))


def cnn_hooks(**more: Any) -> Any:
    return small.hooks(
        create_dataset=lambda: tf.data.Dataset.from_tensor_slices((IMAGES, CLASSES)).batch(7),
        create_loss=lambda: small.crossentropy,
        **more,
    )


def weights_of(state: ctl_core.State) -> list[keras.Variable]:
    """Returns the weights and moving statistics of a model, without the states of generators."""
    return [weight for weight in state.train_model.weights if "seed" not in weight.path]


@pytest.mark.parametrize(
    ("batch", "jit_compile"),
    small.slow_but((27, False), of=[(27, False), (32, False), (32, True)]),
)
def test_micro_batches_draw_and_normalize_as_devices_do(
    train: engine.Train, batch: int, jit_compile: bool
) -> None:
    """The model has batch normalization and Dropout. The last batch of a pass has 15 or no rows.

    A run that goes on with fewer devices and more micro-batches in each continues in the same way.
    """
    hooks = cnn_hooks(create_model=create_noisy_cnn)
    hooks.create_eval_dataset = hooks.create_dataset

    def train_in(devices: int, micro_batches: int, run_name: str, steps: int = 8) -> Any:
        more = {"accumulate_steps": micro_batches, "run_name": run_name, "last_batch": "keep"}
        more["jit_compile"] = jit_compile
        return train_on(train, hooks, devices, batch, steps=steps, **more)

    first, *others = (train_in(*way, run_name=f"on-{way[0]}") for way in WAYS)
    train_in(4, 1, run_name="moved", steps=5)
    moved = train_in(1, 4, run_name="moved")
    for state in (*others, moved):
        compare.assert_close(weights_of(state), weights_of(first))
        assert state.metrics == pytest.approx(first.metrics, rel=1e-5)


def train_leaves_plainly(steps: int, batch: int) -> keras.Model:
    """Trains without the engine, and computes the four leaves of each batch one after another.

    Each leaf starts with the moving statistics from before the step. Their changes are averaged
    over the rows.
    """
    model = create_cnn()
    optimizer = keras.optimizers.SGD(0.05)
    data = tf.data.Dataset.from_tensor_slices((IMAGES, CLASSES))
    for (images, classes), _ in zip(batches_of(data, batch), range(steps), strict=False):
        rows = len(classes)
        before = [statistic.numpy() for statistic in model.non_trainable_weights]
        changes = [np.zeros_like(value) for value in before]
        sums = [tf.zeros_like(weight) for weight in model.trainable_weights]
        for part in np.array_split(np.arange(rows), LEAVES):
            if not len(part):
                continue
            leaf = slice(part[0], part[-1] + 1)
            with tf.GradientTape() as tape:
                output = model(images[leaf], training=True)
                loss = tf.reduce_sum(small.crossentropy((output, classes[leaf]))) / rows
            gradients = tape.gradient(loss, model.trainable_weights)
            sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
            for index, statistic in enumerate(model.non_trainable_weights):
                changes[index] += len(part) / rows * (statistic.numpy() - before[index])
                statistic.assign(before[index])
        for statistic, change in zip(model.non_trainable_weights, changes, strict=True):
            statistic.assign_add(change)
        optimizer.apply_gradients(zip(sums, model.trainable_weights, strict=True))
    return model


@pytest.mark.parametrize(("devices", "micro_batches"), small.slow_but((2, 2), of=WAYS))
def test_moving_statistics_change_once_in_a_step(
    train: engine.Train, devices: int, micro_batches: int
) -> None:
    """The last batch of a pass has 2 rows, so that two of the four leaves have none."""
    hooks = cnn_hooks(create_model=create_cnn)
    more = {"accumulate_steps": micro_batches, "last_batch": "keep"}
    state = train_on(train, hooks, devices, 47, steps=4, **more)
    compare.assert_close(state.train_model.weights, train_leaves_plainly(4, 47).weights)


# ---- Variables ----------------------------------------------------------------------------------


class Keeping(keras.layers.Layer):
    """Reads a variable of each kind, and then writes it, also in evaluations."""

    def build(self, shape: Any) -> None:
        def create(name: str, aggregation: tf.VariableAggregation) -> tf.Variable:
            return tf.Variable(0.0, trainable=False, name=name, aggregation=aggregation)

        kinds = tf.VariableAggregation
        self.mean = create("mean", kinds.MEAN)
        self.sum = create("sum", kinds.SUM)
        self.first = create("first", kinds.ONLY_FIRST_REPLICA)
        self.calls = create("calls", kinds.NONE)
        self.rows = tf.Variable(0, trainable=False, name="rows", aggregation=kinds.SUM)
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, inputs: Any) -> Any:
        read = self.mean + tf.tanh(0.01 * self.sum) + self.first + 0.01 * self.calls
        rows = tf.shape(inputs)[0]
        outputs = inputs * tf.cos(
            read + 0.01 * (tf.cast(self.rows, tf.float32) + self.seen.result())
        )
        self.mean.assign(0.7 * self.mean + 0.3 * tf.reduce_mean(inputs))
        self.sum.assign_add(tf.reduce_sum(inputs))
        self.first.assign(inputs[0, 0])
        self.calls.assign_add(1.0)
        self.rows.assign_add(rows)
        self.seen.update_state(tf.reduce_sum(inputs, 1))
        return outputs


@pytest.mark.parametrize(
    ("devices", "micro_batches"), small.slow_but((2, 2), (3, 1), of=[(1, 3), (2, 2), (3, 1)])
)
def test_a_step_reads_each_kind_of_variable_as_on_one_device(
    train: engine.Train, devices: int, micro_batches: int
) -> None:
    """A step reads what the step before it wrote, combined as the aggregation of a variable says.

    The batches have 17 rows, and the last batch of a pass has 2, fewer than there are leaves.
    """
    hooks = small.hooks(
        create_dataset=lambda: split(36).batch(5),
        create_model=lambda: small.model_with(Keeping()),
        create_eval_dataset=lambda: split(36).batch(5),
    )
    one = train_on(train, hooks, 1, 17, steps=5, last_batch="keep", run_name="one")
    more = {"accumulate_steps": micro_batches, "last_batch": "keep"}
    several = train_on(train, hooks, devices, 17, steps=5, run_name="several", **more)
    compare.assert_close(several.train_model.weights, one.train_model.weights)
    assert several.metrics == pytest.approx(one.metrics, rel=1e-5)
    layer, expected = (state.train_model.layers[1] for state in (several, one))
    for name in ("mean", "sum", "first", "calls", "rows"):
        np.testing.assert_allclose(getattr(layer, name), getattr(expected, name), rtol=1e-5)
    assert several.train_model.layers[1].rows.numpy() == 17 + 17 + 2 + 17 + 17


class Spectral(keras.layers.Layer):
    """Normalizes a kernel by its largest singular value, which it estimates in each call."""

    def build(self, shape: Any) -> None:
        self.dense = keras.layers.SpectralNormalization(keras.layers.Dense(8))
        self.dense.build(shape)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.dense(inputs, training=training)


class FirstBatch(keras.layers.Layer):
    """Takes its shift from the first batch."""

    def build(self, shape: Any) -> None:
        self.shift = tf.Variable(
            tf.zeros(shape[-1]), trainable=False, aggregation=tf.VariableAggregation.MEAN
        )
        self.is_known = tf.Variable(False, trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs - self.shift
        if training:
            mean = tf.reduce_mean(inputs, 0)
            self.shift.assign(tf.where(self.is_known, self.shift, mean))
            self.is_known.assign(True)
        return outputs


class RunningCenters(keras.layers.Layer):
    """Subtracts a running mean of its inputs, as it was before the step."""

    def build(self, shape: Any) -> None:
        self.center = tf.Variable(
            tf.zeros(shape[-1]), trainable=False, aggregation=tf.VariableAggregation.MEAN
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs - self.center
        if training:
            self.center.assign(0.9 * self.center + 0.1 * tf.reduce_mean(inputs, 0))
        return outputs


LAYERS: dict[str, Callable[[], keras.layers.Layer]] = {
    "spectral": Spectral,
    "first batch": FirstBatch,
    "centers": RunningCenters,
}


@pytest.mark.parametrize("kind", small.slow_but("spectral", of=LAYERS))
def test_layers_with_a_state_in_micro_batches(train: engine.Train, kind: str) -> None:
    """In micro-batches of 6, 6 and 5 rows, each layer has the state that it has without them."""
    hooks = small.hooks(create_model=lambda: small.model_with(LAYERS[kind]()))
    one = train_on(train, hooks, 1, 17, steps=6, run_name="one")
    for devices, micro_batches in ((1, 3), (2, 2)):
        more = {"accumulate_steps": micro_batches, "run_name": f"on-{devices}"}
        state = train_on(train, hooks, devices, 17, steps=6, **more)
        compare.assert_close(state.train_model.weights, one.train_model.weights)


class Writing(keras.layers.Layer):
    """Assigns the mean of its input to a variable with a given aggregation."""

    def __init__(self, aggregation: tf.VariableAggregation) -> None:
        super().__init__()
        self.last = tf.Variable(0.0, trainable=False, name="last", aggregation=aggregation)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.last.assign(tf.reduce_mean(inputs))
        return inputs


def test_values_that_differ_between_micro_batches_are_refused(train: engine.Train) -> None:
    hooks = small.hooks(create_model=lambda: small.model_with(Writing(tf.VariableAggregation.NONE)))
    message = (
        r"accumulate_steps: in step 1, .* assigns different values to \S*last in different "
        r"micro-batches; create it with aggregation=tf.VariableAggregation.MEAN"
    )
    with pytest.raises(ctl_core.RunError, match=message):
        train_on(train, hooks, 1, 16, steps=2, accumulate_steps=2)
    hooks.create_model = lambda: small.model_with(Writing(tf.VariableAggregation.MEAN))
    state = train_on(train, hooks, 1, 16, steps=2, accumulate_steps=2, run_name="mean")
    assert state.step == 2


@pytest.mark.parametrize("last_batch", ["drop", "keep"])
def test_values_that_differ_between_devices_are_refused(
    train: engine.Train, last_batch: str
) -> None:
    """With batches of varying sizes, too, in which a device without rows takes another's value."""
    hooks = small.hooks(create_model=lambda: small.model_with(Writing(tf.VariableAggregation.NONE)))
    with pytest.raises(ctl_core.RunError, match=r"after step 2, .*last differs"):
        train_on(train, hooks, 2, 16, steps=2, last_batch=last_batch)


class Remembering(keras.layers.Layer):
    """Adds the means of its previous inputs, also in evaluations, and normalizes in evaluations."""

    def build(self, shape: Any) -> None:
        self.mean = tf.Variable(
            0.0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )
        self.last = tf.Variable(0.0, trainable=False)
        self.norm = keras.layers.BatchNormalization(momentum=0.5)

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs + self.mean + self.last
        if not training:
            self.mean.assign(tf.reduce_mean(inputs))
            self.last.assign(tf.reduce_mean(inputs))
            self.norm(inputs, training=True)
        return outputs + self.norm(inputs, training=False)


def test_an_evaluation_that_writes_has_the_same_bits_on_any_devices(train: engine.Train) -> None:
    """Four logical replicas write different values. Those of the first one are kept."""
    hooks = small.hooks(
        create_model=lambda: small.model_with(Remembering()),
        create_eval_dataset=small.create_eval_dataset,
    )
    more = {"logical_replicas": 4, "eval_batch_size": 12}
    one, two = (
        train_on(train, hooks, devices, 16, steps=1, run_name=f"on-{devices}", **more)
        for devices in (1, 2)
    )
    assert one.metrics == two.metrics


@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 1), (1, 2)])
def test_a_metric_of_the_model_is_combined_like_its_other_variables(
    train: engine.Train, devices: int, micro_batches: int
) -> None:
    """The step reads the metric, which was created in create_model, as the step before left it."""

    class Reading(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = keras.metrics.Sum(name="seen")

        def call(self, inputs: Any) -> Any:
            return inputs * tf.cos(0.1 * self.seen.result())

    layers: list[Reading] = []

    def create_model() -> keras.Model:
        layers[:] = [Reading()]
        return small.model_with(*layers)

    hooks = small.hooks(
        create_model=create_model,
        create_train_metrics=lambda: {"seen": layers[0].seen},
        train_metric_pre=lambda batch: batch[0],
    )
    one = train_on(train, hooks, 1, 16, steps=3, run_name="one")
    expected = float(layers[0].seen.result())
    more = {"accumulate_steps": micro_batches, "run_name": "several"}
    several = train_on(train, hooks, devices, 16, steps=3, **more)
    compare.assert_close(several.train_model.weights, one.train_model.weights)
    assert float(layers[0].seen.result()) == pytest.approx(expected, rel=1e-5)
