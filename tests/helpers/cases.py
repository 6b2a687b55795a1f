"""Data, models and hooks that several tests, and the processes of their clusters, train with.

Nothing here starts TensorFlow: devices and cluster are still to be chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ctl_core
from tests.golden import small

EXAMPLES, FEATURES = small.EXAMPLES, small.FEATURES
regression_data, small_model, squared_error = small.data, small.create_model, small.squared_error
sgd, unclipped = small.create_opt, small.update_pre


def set_weights(model: keras.Model, seed: int = 1) -> keras.Model:
    """Gives a model weights that depend on nothing but their shapes."""
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(scale=0.3, size=w.shape) for w in model.get_weights()])
    return model


def l2_model() -> keras.Model:
    """The small model with regularisation."""
    model = small_model()
    for layer in model.layers:
        layer.kernel.regularizer = keras.regularizers.L2(0.01)
    return model


def norm_model() -> keras.Model:
    """A model with batch normalisation."""
    return small.model_with(keras.layers.BatchNormalization())


def dropout_model() -> keras.Model:
    """A model with batch normalisation and Dropout."""
    return small.model_with(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1))


def assert_weights(state: Any, expected: Any, rtol: float = 1e-6) -> None:
    """Compares all weights of a trained model with those of another, or with a list of them.

    Args:
        state: of the run
        expected: the weights, a model or the state of another run
        rtol: how far they may differ; with 0 they are the same bit for bit
    """
    if not isinstance(expected, list):
        expected = getattr(expected, "train_model", expected).get_weights()
    for weight, other in zip(state.train_model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(weight, other, rtol=rtol, atol=1e-6 if rtol else 0.0)


def sliced(data: Any) -> Callable[[int], tf.data.Dataset]:
    """Returns a create_dataset that reads arrays in their order."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(data).batch(
            per_replica_batch_size, drop_remainder=True
        )

    return create_dataset


def make_hooks(**hooks: Any) -> SimpleNamespace:
    """Returns hooks that train ``small_model``, quietly; what is named replaces them."""
    base: dict[str, Any] = {
        "create_dataset": sliced(regression_data()),
        "create_model": small_model,
        "create_loss": small.create_loss,
        "every_steps": {},
    }
    return SimpleNamespace(**{**base, **hooks})


# ---- The same weights on any number of devices and processes ----------------------------------

CLIP = 0.05


def shuffled(batch_size: int) -> tf.data.Dataset:
    """One pass, reshuffled each time; what is left over at its end is no whole batch."""
    examples = tf.data.Dataset.from_tensor_slices(regression_data())
    return examples.shuffle(40, seed=3).batch(batch_size, drop_remainder=True)


def nadam(lr: Any) -> keras.optimizers.Optimizer:
    """The default of create_opt."""
    return keras.optimizers.Nadam(learning_rate=lr, epsilon=0.001)


OPTIMIZERS = {"sgd": sgd, "nadam": nadam}


def clipped(gradients: Any) -> Any:
    """An update_pre whose clipping clips at every step."""
    return tf.clip_by_global_norm(gradients, CLIP)[0], gradients


def exact_hooks(kind: str) -> SimpleNamespace:
    """Clipped updates of ``kind``, L2, shuffled data."""
    return make_hooks(
        create_dataset=lambda per_replica_batch_size: shuffled(per_replica_batch_size),
        create_model=l2_model,
        create_opt=OPTIMIZERS[kind],
        update_pre=clipped,
    )


def by_hand(kind: str, steps: int, batch_size: int, rate: float) -> list[np.ndarray]:
    """The weights of the same training as a plain loop on one device."""
    keras.utils.set_random_seed(0)
    stream = iter(shuffled(batch_size).repeat())
    model, update = l2_model(), OPTIMIZERS[kind](rate)
    for _ in range(steps):
        inputs, target = next(stream)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(squared_error((model(inputs, training=True), target)))
            total = total / batch_size + tf.add_n(model.losses)
        gradients = tape.gradient(total, model.trainable_variables)
        assert tf.linalg.global_norm(gradients) > CLIP, "the clip has to clip"
        update.apply_gradients(zip(clipped(gradients)[0], model.trainable_variables, strict=True))
    return model.get_weights()  # type: ignore[no-any-return]


def kept_hooks(kind: str) -> SimpleNamespace:
    """A last batch of one example, which only the first process has; ``synchronized`` statistics.

    ``hook`` shards for itself, and the second process then has fewer elements; ``gather`` exchanges
    rows, of which there is another number in the last step.
    """

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices(regression_data()).take(25)
        return examples.batch(per_replica_batch_size)

    def sharded(per_replica_batch_size: int, input_context: Any) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices(regression_data()).take(25)
        pipelines, index = input_context.num_input_pipelines, input_context.input_pipeline_id
        return examples.shard(pipelines, index).batch(per_replica_batch_size)

    def gathered(output: Any, batch: Any) -> Any:
        return output - tf.reduce_mean(ctl_core.all_gather(output)), batch[1]

    hooks = make_hooks(
        create_dataset=sharded if kind == "hook" else create_dataset,
        create_model=lambda: synchronized_model(kind != "plain"),
        create_opt=sgd,
        update_pre=unclipped,
    )
    if kind == "gather":
        hooks.loss_pre = gathered
    return hooks


def synchronized_model(synchronized: bool) -> keras.Model:
    """With batch normalisation over all replicas, and regularisation."""
    hidden = keras.layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.01))
    norm = keras.layers.BatchNormalization(momentum=0.9, synchronized=synchronized)
    model = keras.Sequential([keras.Input((FEATURES,)), hidden, norm, keras.layers.Dense(1)])
    for layer, seed in ((model.layers[0], 1), (model.layers[2], 2)):
        set_weights(layer, seed)
    return model


# ---- Evaluation of every remainder ------------------------------------------------------------

SIZES = (1, 7, 23, 24, 25)


def eval_hooks(size: int, **hooks: Any) -> SimpleNamespace:
    """Evaluates the first ``size`` examples, with a mean and a count as metrics."""
    data = tuple(part[:size] for part in regression_data())

    def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(data).batch(per_replica_batch_size)

    return make_hooks(
        create_eval_dataset=create_eval_dataset,
        create_metrics=lambda: {
            "error": keras.metrics.MeanAbsoluteError(),
            "seen": keras.metrics.Sum(),
        },
        metric_pre=lambda output, batch: {
            "error": (batch[1], output),
            "seen": tf.ones(tf.shape(output)[0]),
        },
        **hooks,
    )


def evaluated_by_hand(size: int) -> dict[str, float]:
    """The same by NumPy."""
    inputs, target = (part[:size] for part in regression_data())
    error = small_model()(inputs).numpy() - target
    return {"loss": (error**2).mean(), "error": abs(error).mean(), "seen": size}


# ---- Hooks that exchange values between the replicas -------------------------------------------


def mean_by_sum(values: Any) -> tf.Tensor:
    """The mean over the global batch, of a sum and a count."""
    context = tf.distribute.get_replica_context()
    own = [tf.reduce_sum(values, 0), tf.cast(tf.shape(values)[0], tf.float32)]
    total, count = context.all_reduce(tf.distribute.ReduceOp.SUM, own)
    return total / count


def mean_by_gather(values: Any) -> tf.Tensor:
    """The same, of all examples."""
    return tf.reduce_mean(tf.distribute.get_replica_context().all_gather(values, axis=0), 0)


def mean_by_merge(values: Any) -> tf.Tensor:
    """The same, in the cross-replica context; without a gradient."""

    def merge(strategy: tf.distribute.Strategy, total: Any, count: Any) -> Any:
        sums = [strategy.reduce("SUM", part, axis=None) for part in (total, count)]
        return sums[0] / sums[1]

    own = (tf.reduce_sum(values, 0), tf.cast(tf.shape(values)[0], tf.float32))
    return tf.distribute.get_replica_context().merge_call(merge, own)


def plain_mean(values: Any) -> tf.Tensor:
    """The same in a program that sees the whole batch."""
    return tf.reduce_mean(values, 0)


def mean_by_name(values: Any) -> tf.Tensor:
    """The same by the engine's own names, where there is one replica, too."""
    own = tf.reduce_mean(ctl_core.all_gather(values), 0)
    count = ctl_core.all_reduce({"rows": tf.cast(tf.shape(values)[0], tf.float32)})["rows"]
    total = ctl_core.all_reduce(tf.reduce_sum(values, 0))
    replicas = tf.cast(ctl_core.num_replicas(), tf.float32)
    first = ctl_core.all_reduce(tf.cast(tf.equal(ctl_core.replica_id(), 0), tf.float32))
    return (own + total / count + 0.0 * replicas) / (1.0 + first)


MEANS = {
    "sum": mean_by_sum,
    "gather": mean_by_gather,
    "merge": mean_by_merge,
    "name": mean_by_name,
}


def exchange_hooks(kind: str = "plain", size: int = 0) -> SimpleNamespace:
    """Uses means over the global batch in each hook; ``size`` examples are evaluated."""
    mean = mean_in_loss = MEANS.get(kind, plain_mean)
    if kind == "merge":  # no gradient
        mean_in_loss = mean_by_sum

    def relative(loss_input: Any) -> Any:
        loss = squared_error(loss_input)
        return loss / (1.0 + mean_in_loss(loss))

    def with_mean(loss: Any, batch: Any, train_model: Any) -> Any:
        loss = loss + 0.5 * loss * mean_in_loss(loss) * mean(batch[1])
        return loss, 0.0, train_model.trainable_variables

    hooks = make_hooks(
        create_opt=sgd,
        create_loss=lambda: relative,
        input_pre=lambda batch: batch[0] - mean(batch[0]),
        grad_pre=with_mean,
        update_pre=lambda gradients, batch: (
            [gradient * (1.0 + mean(batch[0] ** 2)[0]) for gradient in gradients],
            gradients,
        ),
    )
    if size:
        hooks.create_eval_dataset = eval_hooks(size).create_eval_dataset
        hooks.create_metrics = lambda: {"above": keras.metrics.Mean(), "seen": keras.metrics.Sum()}
        hooks.metric_pre = lambda output, batch: {
            "above": tf.cast(output > mean(output), tf.float32),
            "seen": tf.ones_like(output),
        }
        hooks.eval_pre = lambda loss: (loss + mean(loss), 0.0)
    return hooks


def exchange_by_hand(steps: int, batch_size: int, rate: float) -> keras.Model:
    """The same training as a plain loop on one device."""
    model, hooks = small_model(), exchange_hooks()
    loss = hooks.create_loss()
    for batch in sliced(regression_data())(batch_size).repeat().take(steps):
        with tf.GradientTape() as tape:
            each = loss((model(hooks.input_pre(batch)), batch[1]))
            total = tf.reduce_mean(hooks.grad_pre(each, batch, model)[0])
        found = tape.gradient(total, model.trainable_variables)
        for variable, gradient in zip(
            model.trainable_variables, hooks.update_pre(found, batch)[0], strict=True
        ):
            variable.assign_sub(rate * gradient)
    return model


def exchange_evaluated_by_hand(model: keras.Model, size: int, batch_size: int) -> dict[str, float]:
    """The same evaluation as a plain loop over global batches."""
    hooks = exchange_hooks("plain", size)
    losses, above = [], []
    for batch in hooks.create_eval_dataset(batch_size):
        output = model(hooks.input_pre(batch))
        losses.append(hooks.eval_pre(hooks.create_loss()((output, batch[1])))[0].numpy())
        above.append(hooks.metric_pre(output, batch)["above"].numpy())
    found = [np.concatenate(values).mean() for values in (losses, above)]
    return {"loss": found[0], "above": found[1], "seen": size}


# ---- Random numbers ---------------------------------------------------------------------------


def dropout_hooks(seen: list[Any]) -> SimpleNamespace:
    """Writes down what Dropout makes of ones."""

    def create_model() -> keras.Model:
        inputs = keras.Input((FEATURES,))
        dropped = keras.layers.Dropout(0.5)(inputs)
        return keras.Model(inputs, [dropped, keras.layers.Dense(1)(dropped)])

    return make_hooks(
        create_model=create_model,
        input_pre=lambda batch: tf.ones_like(batch[0]),
        loss_pre=lambda output, batch: (output[1], batch[1]),
        every_steps={1: lambda output: seen.append(output[0].numpy())},
    )


class Noisy(keras.Model):
    """Adds noise from a tf.random.Generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, FEATURES))
        self.generator = tf.random.Generator.from_seed(5)

    def call(self, inputs: Any, training: bool = False) -> Any:
        noise = self.generator.normal(tf.shape(inputs))
        return self.dense(inputs + noise), noise


def generator_hooks(seen: list[Any]) -> SimpleNamespace:
    """Writes down the noise."""
    return make_hooks(
        create_model=lambda: set_weights(Noisy()),
        loss_pre=lambda output, batch: (output[0], batch[1]),
        every_steps={1: lambda output: seen.append(output[1].numpy())},
    )
