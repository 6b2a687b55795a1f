"""``last_batch: keep``: each example of a pass counts once, however many replicas share a step.

The reference is a plain loop of one device over ``dataset.batch(B)``, whose last batch is smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import (
    FEATURES,
    assert_weights,
    clipped,
    l2_model,
    make_hooks,
    regression_data,
    set_weights,
    sgd,
    small_model,
    squared_error,
    unclipped,
)
from tests.helpers.fixtures import Train

RATE = 0.1


def examples(number: int) -> tf.data.Dataset:
    inputs, target = regression_data()
    return tf.data.Dataset.from_tensor_slices((inputs[:number], target[:number]))


def of_replicas(number: int) -> Callable[..., tf.data.Dataset]:
    return lambda per_replica_batch_size: examples(number).batch(per_replica_batch_size)


def of_steps(number: int) -> Callable[..., tf.data.Dataset]:
    return lambda global_batch_size: examples(number).batch(global_batch_size)


def shuffled(number: int) -> Callable[..., tf.data.Dataset]:
    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        return examples(number).shuffle(number, seed=3).batch(per_replica_batch_size)

    return create_dataset


def hooks(**more: Any) -> Any:
    base = {"create_model": l2_model, "create_opt": sgd, "update_pre": unclipped}
    return make_hooks(**{**base, **more})


def keep(train: Train, some: Any, **settings: Any) -> ctl_core.State:
    base = {"epochs": 3, "steps": None, "batch_size": 8, "learning_rate": RATE}
    return train(some, **{**base, "last_batch": "keep", "eval_every": 0, **settings})


def plain(
    data: tf.data.Dataset,
    model: Any,
    epochs: int = 3,
    loss: Callable[[Any, Any], tf.Tensor] | None = None,
) -> Any:
    """Trains without the engine, on each batch of a dataset as it is; returns the model."""
    optimizer = sgd(RATE)

    def mean(batch: Any, output: Any) -> tf.Tensor:
        return tf.reduce_mean(squared_error((output, batch[1])))

    for batch in data.repeat(epochs):
        with tf.GradientTape() as tape:
            output = model(batch[0], training=True)
            total = (loss or mean)(batch, output) + tf.add_n([0.0, *model.losses])
        gradients = tape.gradient(total, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model


@pytest.mark.parametrize("form", [of_replicas, of_steps])
@pytest.mark.parametrize(
    ("number", "batch_size", "replicas", "accumulate"),
    [
        pytest.param(10, 4, 1, 1, marks=pytest.mark.slow),
        (10, 4, 2, 1),
        (9, 8, 2, 1),
        (9, 8, 1, 2),
        pytest.param(12, 8, 1, 2, marks=pytest.mark.slow),
        (9, 8, 2, 2),
        pytest.param(14, 8, 2, 2, marks=pytest.mark.slow),
        pytest.param(17, 8, 4, 1, marks=pytest.mark.slow),
        pytest.param(3, 8, 2, 1, marks=pytest.mark.slow),
        (6, 8, 2, 1),
        pytest.param(16, 8, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_a_plain_loop(
    train: Train, form: Any, number: int, batch_size: int, replicas: int, accumulate: int
) -> None:
    """Some replicas, or a whole micro-batch, have no example in the last step."""
    state = keep(
        train,
        hooks(create_dataset=form(number)),
        batch_size=batch_size,
        virtual_devices=replicas,
        accumulate_steps=accumulate,
    )
    assert_weights(state, plain(examples(number).batch(batch_size), l2_model()))
    assert state.progress.examples == 3 * number
    assert state.step == 3 * -(-number // batch_size)


def test_drop_is_the_default(train: Train) -> None:
    state = keep(train, hooks(create_dataset=of_steps(10)), last_batch="drop")
    assert (state.step, state.progress.examples) == (3, 24)
    assert ctl_core.Config().last_batch == "drop"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_resumed_run_is_the_whole_run(train: Train, replicas: int) -> None:
    """From within a pass, from its end, and from the first step of the next."""

    def model() -> keras.Model:
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8),
            keras.layers.Dropout(0.5, seed=1),
        ]
        return set_weights(keras.Sequential([*layers, keras.layers.Dense(1)]))

    some = hooks(create_dataset=shuffled(19), create_model=model)
    more = {"virtual_devices": replicas, "steps": 9, "epochs": None}
    whole = keep(train, some, run_name="whole", **more)
    for steps, seen in ((2, 16), (3, 19), (4, 27), (7, 46), (9, 57)):
        state = keep(train, some, **{**more, "steps": steps})
        assert state.progress.examples == seen
    assert_weights(state, whole, 0)


def test_a_run_goes_on_with_other_replicas(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its position is reached by reading: whole steps of real examples, not of stand-ins."""
    some = hooks(create_dataset=shuffled(19))
    whole = keep(train, some, run_name="whole")
    for steps, settings in ((3, {}), (4, {"virtual_devices": 2}), (9, {"accumulate_steps": 4})):
        state = keep(train, some, steps=steps, epochs=None, **settings)
    assert "reading and dropping 27 examples" in capsys.readouterr().out
    assert_weights(state, whole)
    keep(train, some, run_name="other", steps=4, epochs=None)
    state = keep(train, some, run_name="other", steps=5, epochs=None, last_batch="drop")
    assert "since it was saved with last_batch keep." in capsys.readouterr().out
    assert state.step == 5


@pytest.mark.parametrize(("replicas", "accumulate"), [(2, 1), (1, 2), (2, 2)])
def test_batch_weight_of_nobody_counts_for_nothing(
    train: Train, replicas: int, accumulate: int
) -> None:
    def of_weights(batch: Any, output: Any) -> tf.Tensor:
        weight = tf.abs(batch[1])
        return tf.reduce_sum(weight * squared_error((output, batch[1]))[:, None]) / tf.reduce_sum(
            weight
        )

    some = hooks(
        create_dataset=of_replicas(9),
        create_loss=lambda: lambda pair: squared_error(pair) * tf.abs(pair[1][:, 0]),
        batch_weight=lambda batch: tf.reduce_sum(tf.abs(batch[1])),
    )
    state = keep(train, some, virtual_devices=replicas, accumulate_steps=accumulate)
    assert_weights(state, plain(examples(9).batch(8), l2_model(), loss=of_weights))


def norm_model(synchronized: bool) -> keras.Model:
    norm = keras.layers.BatchNormalization(momentum=0.9, synchronized=synchronized)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(8), norm, keras.layers.Dense(1)]
    )
    for layer, seed in ((model.layers[0], 1), (model.layers[2], 2)):
        set_weights(layer, seed)
    return model


@pytest.mark.parametrize(("number", "replicas"), [(9, 2), (13, 2), (10, 4)])
def test_synchronized_batch_normalization(train: Train, number: int, replicas: int) -> None:
    """Of the examples there are; moving statistics are those of one device, too."""
    some = hooks(create_dataset=of_replicas(number), create_model=lambda: norm_model(True))
    state = keep(train, some, virtual_devices=replicas)
    expected = plain(examples(number).batch(8), norm_model(False))
    assert_weights(state, expected, 1e-4)


@pytest.mark.parametrize("number", [10, 14])
def test_moving_statistics_count_each_example_once(train: Train, number: int) -> None:
    """A replica without examples keeps its own; one of r of R goes N r / R times as far."""

    def still(gradients: Any) -> Any:
        return [tf.zeros_like(gradient) for gradient in gradients], gradients

    some = hooks(
        create_dataset=of_replicas(number),
        create_model=lambda: norm_model(False),
        update_pre=still,
    )
    state = keep(train, some, virtual_devices=2)
    first, norm, _ = state.train_model.layers
    hidden = first(regression_data()[0][:number]).numpy()
    mean, variance = np.zeros([2, 8]), np.ones([2, 8])
    for _ in range(3):
        for rows in (hidden[:8], hidden[8:]):
            for replica, share in enumerate((rows[:4], rows[4:])):
                if len(share):
                    part = 0.1 * 2 * len(share) / len(rows)
                    mean[replica] += part * (share.mean(0) - mean[replica])
                    variance[replica] += part * (share.var(0) - variance[replica])
    np.testing.assert_allclose(norm.moving_mean, mean.mean(0), atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance, variance.mean(0), atol=1e-6)


class Counter(keras.layers.Layer):
    """Draws random numbers in two ways, adds noise of one, and keeps a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)
        self.generator = tf.random.Generator.from_seed(5)
        self.calls = self.add_weight(shape=(), dtype="int64", trainable=False, initializer="zeros")

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1)
        noise = keras.random.normal(tf.shape(inputs), seed=self.seeds)
        return inputs + 0.1 * noise + 0.1 * self.generator.normal(tf.shape(inputs))


def noisy_model() -> keras.Model:
    model = keras.Sequential([keras.Input((FEATURES,)), Counter(), keras.layers.Dense(1)])
    set_weights(model.layers[1])
    return model


def test_an_empty_micro_batch_writes_nothing_and_draws_nothing(train: Train) -> None:
    state = keep(
        train, hooks(create_dataset=of_replicas(3), create_model=noisy_model), accumulate_steps=2
    )
    layer = state.train_model.layers[0]
    assert int(layer.calls) == 3
    once = keras.random.SeedGenerator(3)
    for _ in range(3):
        keras.random.normal((3, FEATURES), seed=once)
    np.testing.assert_array_equal(layer.seeds.state, once.state)


def test_a_replica_without_examples_draws_nothing_also_when_resumed(train: Train) -> None:
    """Its generators fall behind the other replica's; a checkpoint holds those of both."""

    def model() -> keras.Model:
        layers = [keras.Input((FEATURES,)), keras.layers.Dropout(0.5, seed=1)]
        return set_weights(keras.Sequential([*layers, keras.layers.Dense(1)]))

    some = hooks(create_dataset=of_replicas(10), create_model=model)
    whole = keep(train, some, virtual_devices=2, run_name="whole")
    states = whole.strategy.experimental_local_results(whole.found.generators[0])
    first, second = (int(state.numpy()[1]) for state in states)
    assert first > second > 0
    for steps in (2, 3, 6):
        state = keep(train, some, virtual_devices=2, steps=steps, epochs=None)
    assert_weights(state, whole, 0)


def test_train_metrics_are_of_each_example_once(train: Train) -> None:
    def metrics(batch: Any, output: Any) -> Any:
        return {"mean": (batch[1],), "error": (batch[1], output)}

    some = hooks(
        create_dataset=of_replicas(9),
        create_train_metrics=lambda: {
            "mean": keras.metrics.Mean(),
            "error": keras.metrics.MeanSquaredError(),
        },
        train_metric_pre=metrics,
    )
    state = keep(train, some, virtual_devices=2, log_every=2)
    (line, *_) = [line for line in state.history if line["split"] == "train"]
    assert line["mean"] == pytest.approx(regression_data()[1][:9].mean(), rel=1e-5)


@pytest.mark.parametrize(("replicas", "accumulate"), [(2, 1), (1, 2), (2, 2)])
def test_host_hooks_get_what_there_is(train: Train, replicas: int, accumulate: int) -> None:
    """Of a replica without examples nothing; the loss is the mean over those there are."""
    seen = []

    def look(step: int, output: Any, batch: Any, loss: Any) -> None:
        seen.append((step, output.numpy(), batch[1].numpy(), float(loss)))

    some = hooks(create_dataset=of_replicas(9), create_model=small_model, every_steps={1: look})
    keep(train, some, virtual_devices=replicas, accumulate_steps=accumulate)
    target = regression_data()[1]
    for step, output, labels, loss in seen:
        expected = target[8:9] if step % 2 == 0 else target[:8]
        np.testing.assert_array_equal(np.sort(labels, axis=0), np.sort(expected, axis=0))
        assert loss == pytest.approx(((output - labels) ** 2).sum(1).mean(), rel=1e-5)
    assert len(seen) == 6


def words(number: int) -> tf.data.Dataset:
    ids = [[1 + (i * j) % 9 for j in range(1 + i % 5)] for i in range(number)]
    lengths = np.array([[len(row)] for row in ids], np.float32)
    return tf.data.Dataset.from_tensor_slices((tf.ragged.constant(ids, dtype=tf.int32), lengths))


def bag_model() -> keras.Model:
    return set_weights(Bag())


class Bag(keras.Model):
    """The mean of the words' vectors, by a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = keras.layers.Embedding(10, 4), keras.layers.Dense(1)
        self.table.build()
        self.out.build((None, 4))

    def call(self, inputs: Any) -> Any:
        vectors = self.table(inputs.to_tensor())
        mask = tf.sequence_mask(inputs.row_lengths(), tf.shape(vectors)[1], tf.float32)
        return self.out(tf.reduce_sum(vectors * mask[..., None], axis=1))


@pytest.mark.parametrize("form", ["replicas", "steps"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ragged_batches_and_sparse_gradients(train: Train, form: str, accumulate: int) -> None:
    def per_replica(per_replica_batch_size: int) -> tf.data.Dataset:
        return words(9).ragged_batch(per_replica_batch_size)

    def per_step(global_batch_size: int) -> tf.data.Dataset:
        return words(9).ragged_batch(global_batch_size)

    data = {"replicas": per_replica, "steps": per_step}[form]
    some = hooks(create_dataset=data, create_model=bag_model)
    state = keep(train, some, virtual_devices=2, accumulate_steps=accumulate, learning_rate=0.01)

    def rate_of_hundredth(model: Any) -> Any:
        optimizer = sgd(0.01)
        for inputs, target in words(9).ragged_batch(8).repeat(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(squared_error((model(inputs), target)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return model

    assert_weights(state, rate_of_hundredth(bag_model()), 1e-5)


def test_dicts_and_several_inputs(train: Train) -> None:
    def data(batch_size: int) -> tf.data.Dataset:
        inputs, target = regression_data()
        whole = {"left": inputs[:9], "right": inputs[9:18], "y": target[:9]}
        return tf.data.Dataset.from_tensor_slices(whole).batch(batch_size)

    def model() -> keras.Model:
        left, right = keras.Input((FEATURES,)), keras.Input((FEATURES,))
        return set_weights(
            keras.Model([left, right], keras.layers.Dense(1)(left) * keras.layers.Dense(1)(right))
        )

    some = hooks(
        create_dataset=lambda per_replica_batch_size: data(per_replica_batch_size),
        create_model=model,
        input_pre=lambda batch: [batch["left"], batch["right"]],
        loss_pre=lambda output, batch: (output, batch["y"]),
    )
    state = keep(train, some, virtual_devices=2)
    pairs = data(8).map(lambda batch: ((batch["left"], batch["right"]), batch["y"]))
    assert_weights(state, plain(pairs, model()))


def test_examples_that_are_not_rows(train: Train) -> None:
    """A batch of graphs: nodes of all of them, and which graph each belongs to."""
    inputs, target = regression_data()

    def graphs(batch_size: int) -> tf.data.Dataset:
        data = tf.data.Dataset.range(9).batch(batch_size)

        def join(index: tf.Tensor) -> Any:
            nodes = tf.reshape(tf.stack([2 * index, 2 * index + 1], 1), [-1])
            owner = tf.repeat(tf.range(tf.size(index)), 2)
            return (tf.gather(inputs, nodes), owner), tf.gather(target, index)

        return data.map(join)

    class Pool(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.dense.build((None, FEATURES))

        def call(self, batch: Any) -> Any:
            nodes, owner = batch
            return tf.math.segment_sum(self.dense(nodes), owner)

    some = hooks(
        create_dataset=lambda per_replica_batch_size: graphs(per_replica_batch_size),
        create_model=lambda: set_weights(Pool()),
        count_examples=lambda batch: tf.shape(batch[1])[0],
    )
    state = keep(train, some, virtual_devices=2, learning_rate=0.1)
    assert_weights(state, plain(graphs(8), set_weights(Pool())))


def test_shares_of_the_hooks_own_and_whole_elements(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """``input_context`` is named; and elements of one fixed size that fill no step."""

    def own(per_replica_batch_size: int, input_context: Any) -> tf.data.Dataset:
        data = examples(13).shard(input_context.num_input_pipelines, 0)
        return data.batch(per_replica_batch_size)

    expected = plain(examples(13).batch(8), l2_model())
    assert_weights(keep(train, hooks(create_dataset=own), virtual_devices=2), expected)

    def fixed(per_replica_batch_size: int) -> tf.data.Dataset:
        return examples(12).batch(per_replica_batch_size, drop_remainder=True)

    def model(per_replica_batch_size: int) -> keras.Model:
        return set_weights(
            keras.Sequential(
                [
                    keras.Input((FEATURES,), batch_size=per_replica_batch_size),
                    keras.layers.Dense(1),
                ]
            )
        )

    some = hooks(create_dataset=fixed, create_model=model)
    state = keep(train, some, virtual_devices=2, run_name="fixed")
    assert_weights(state, plain(examples(12).batch(8), model(None)))  # type: ignore[arg-type]
    assert state.progress.examples == 36
    assert "leave out drop_remainder=True to keep every example" in capsys.readouterr().out


def test_global_batches_may_be_smaller_anywhere(train: Train) -> None:
    """As those of length buckets, whose remainders come in any order."""

    def data() -> tf.data.Dataset:
        return (
            examples(14)
            .batch(8)
            .concatenate(examples(5).batch(8))
            .concatenate(examples(16).batch(8))
        )

    state = keep(train, hooks(create_dataset=lambda global_batch_size: data()), virtual_devices=2)
    assert_weights(state, plain(data(), l2_model()))
    assert (state.step, state.progress.examples) == (15, 105)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_objectives(train: Train, accumulate: int) -> None:
    def model() -> keras.Model:
        inputs = keras.Input((FEATURES,))
        outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
        return set_weights(keras.Model(inputs, outputs))

    def by_part(loss: Any, train_model: Any) -> Any:
        return {
            name: (loss[name], tf.reduce_sum(train_model.get_layer(name).kernel ** 2), variables)
            for name, variables in (
                (name, train_model.get_layer(name).trainable_variables) for name in ("a", "b")
            )
        }

    def loss(pair: Any) -> Any:
        output, target = pair
        return {name: factor * squared_error((output[name], target)) for name, factor in FACTORS}

    some = hooks(
        create_dataset=of_replicas(9),
        create_model=model,
        create_opt=lambda lr: {"a": sgd(lr), "b": sgd(lr)},
        create_loss=lambda: loss,
        grad_pre=by_part,
    )
    state = keep(train, some, virtual_devices=2, accumulate_steps=accumulate)

    def total(batch: Any, output: Any) -> Any:
        parts = loss((output, batch[1]))
        kernels = [expected.get_layer(name).kernel for name in parts]
        return tf.add_n([tf.reduce_mean(part) for part in parts.values()]) + tf.add_n(
            [tf.reduce_sum(kernel**2) for kernel in kernels]
        )

    expected = model()
    assert_weights(state, plain(examples(9).batch(8), expected, loss=total))


FACTORS = (("a", 1.0), ("b", 0.5))


@pytest.mark.parametrize(
    "settings", [{"jit_compile": True}, {"precision": "float16"}, {"ema": 0.9, "eval_every": 2}]
)
def test_with_other_settings(train: Train, settings: dict[str, Any]) -> None:
    def tenth(pair: Any) -> tf.Tensor:  # float16 has gradients of one example in its range, too
        return 0.1 * squared_error(pair)

    some = hooks(
        create_dataset=of_replicas(9),
        create_loss=lambda: tenth,
        create_eval_dataset=lambda per_replica_batch_size: examples(20).batch(4),
    )
    state = keep(train, some, virtual_devices=2, **settings)

    def mean(batch: Any, output: Any) -> tf.Tensor:
        return tf.reduce_mean(tenth((output, batch[1])))

    tolerance = 2e-2 if "precision" in settings else 1e-5
    assert_weights(state, plain(examples(9).batch(8), l2_model(), loss=mean), tolerance)


def test_what_replicas_exchange_is_of_true_examples(train: Train) -> None:
    """Sums, means and gathered rows, with a gradient through them."""

    def gathered(output: Any, batch: Any) -> Any:
        rows = ctl_core.all_gather(output)
        number = ctl_core.all_reduce(tf.cast(tf.shape(output)[0], tf.float32))
        mean = ctl_core.all_reduce(tf.reduce_sum(output, axis=0)) / number
        with tf.control_dependencies(
            [tf.debugging.assert_equal(tf.cast(tf.shape(rows)[0], tf.float32), number)]
        ):
            return output - tf.identity(mean), batch[1]

    def centred(batch: Any, output: Any) -> Any:
        centre = tf.reduce_mean(output, axis=0)
        return tf.reduce_mean(squared_error((output - centre, batch[1])))

    some = hooks(create_dataset=of_replicas(9), loss_pre=gathered)
    state = keep(train, some, virtual_devices=2)
    assert_weights(state, plain(examples(9).batch(8), l2_model(), loss=centred), 1e-5)


def test_endless_data_have_nothing_to_keep(train: Train) -> None:
    some = hooks(
        create_dataset=lambda: examples(10),
        make_batches=lambda dataset, per_replica_batch_size: dataset.batch(per_replica_batch_size),
    )
    state = keep(train, some, epochs=None, steps=4, virtual_devices=2)
    assert state.progress.examples == 32


def test_periods_of_epochs(train: Train) -> None:
    some = hooks(
        create_dataset=of_steps(10),
        create_eval_dataset=lambda per_replica_batch_size: examples(8).batch(4),
    )
    state = keep(train, some, eval_every="1epoch", ckpt_every="1epoch", batch_size=4)
    assert [line["step"] for line in state.history if line["split"] == "eval"] == [3, 6, 9]


def test_what_cannot_be_kept_is_refused(train: Train) -> None:
    def middle(per_replica_batch_size: int) -> tf.data.Dataset:
        return examples(10).batch(per_replica_batch_size).concatenate(examples(8).batch(4))

    with pytest.raises(
        ctl_core.SetupError,
        match=r"create_dataset \(.*\): 1 elements of a pass .* make them of global_batch_size",
    ):
        keep(train, hooks(create_dataset=middle), virtual_devices=2)

    def fixed(per_replica_batch_size: int) -> keras.Model:
        return l2_model()

    with pytest.raises(
        ctl_core.SetupError,
        match=r"create_model \(.*\): names per_replica_batch_size, .* of the two",
    ):
        keep(train, hooks(create_dataset=of_replicas(9), create_model=fixed), virtual_devices=2)


def test_passes_of_different_lengths_are_refused(train: Train) -> None:
    """Their last step would not be where it was counted to be."""

    def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        some = examples(40).shuffle(40, seed=1).take(20)
        return some.filter(lambda _, target: target[0] > 0.0).batch(per_replica_batch_size)

    with pytest.raises(ctl_core.RunError, match=r"create_dataset \(.*a pass is not as long as"):
        keep(train, hooks(create_dataset=create_dataset), epochs=None, steps=40, virtual_devices=2)


def test_the_message_of_what_is_left_out_names_the_cure(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(train, hooks(create_dataset=of_steps(10), update_pre=clipped), last_batch="drop")
    said = capsys.readouterr().out
    assert "leaves out 2 examples, which fill no global batch of 8; --last-batch keep " in said
    with pytest.raises(ctl_core.SetupError, match=r"fewer than one .* with --last-batch keep"):
        data = examples(4).batch(4, drop_remainder=True)
        some = hooks(create_dataset=lambda: data)
        keep(train, some, last_batch="drop", run_name="few", virtual_devices=2)
