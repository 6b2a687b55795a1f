"""Graph hooks that exchange values with the other replicas, in training and in evaluation."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers import cases
from tests.helpers.cases import FEATURES, assert_weights, make_hooks, set_weights, sgd
from tests.helpers.fixtures import Train

BATCH, STEPS, RATE = 24, 6, 0.02


def assert_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "replicas", "accumulate"),
    [("sum", 1, 1), ("sum", 2, 1), ("merge", 2, 1), ("gather", 2, 2), ("name", 2, 2)],
)
def test_weights_are_those_of_the_plain_loop(
    train: Train, kind: str, replicas: int, accumulate: int
) -> None:
    """With micro-batches, a mean is that over the micro-batches of all replicas."""
    settings = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE}
    hooks = cases.exchange_hooks(kind)
    if accumulate == 1:
        expected = cases.exchange_by_hand(STEPS, BATCH, RATE)
    else:  # one step: the mean of two gradients, each of half a batch
        settings["steps"] = 1
        hooks.update_pre = lambda gradients: (gradients, gradients)
        expected = half_by_half()
    state = train(hooks, virtual_devices=replicas, accumulate_steps=accumulate, **settings)
    assert_weights(state, expected, rtol=1e-5)


def half_by_half() -> keras.Model:
    model, hooks = cases.small_model(), cases.exchange_hooks()
    halves = list(cases.sliced(cases.regression_data())(BATCH // 2).take(2))
    with tf.GradientTape() as tape:
        totals = []
        for batch in halves:
            each = hooks.create_loss()((model(hooks.input_pre(batch)), batch[1]))
            totals.append(tf.reduce_mean(hooks.grad_pre(each, batch, model)[0]))
        total = tf.add_n(totals) / 2
    gradients = tape.gradient(total, model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(RATE * gradient)
    return model


@pytest.mark.parametrize(
    ("size", "replicas", "kind"),
    [(25, 1, "gather"), (25, 2, "name"), (7, 2, "sum"), (1, 2, "merge"), (25, 3, "gather")],
)
def test_evaluation_exchanges_true_examples_only(
    train: Train, size: int, replicas: int, kind: str
) -> None:
    hooks = cases.exchange_hooks(kind, size)
    state = train(hooks, steps=0, batch_size=BATCH, virtual_devices=replicas)
    expected = cases.exchange_evaluated_by_hand(cases.small_model(), size, BATCH)
    assert_metrics(state.metrics, expected)


def test_a_stand_in_of_ragged_and_sparse_rows_counts_nowhere(train: Train) -> None:
    """Nine examples in batches of four, on two replicas: the last has none in the second step."""
    numbers = np.arange(1, 73, dtype="float32").reshape(9, 8) / 72
    ragged = tf.RaggedTensor.from_row_lengths(numbers.ravel(), [8 - i % 3 for i in range(8)] + [15])
    sparse = tf.sparse.from_dense(numbers * (numbers > 0.4))

    def create_eval_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
        rows = {"dense": numbers, "ragged": ragged, "sparse": sparse}
        dataset = tf.data.Dataset.from_tensor_slices(rows).batch(per_replica_batch_size)
        return dataset.map(lambda row: {**row, "scale": tf.constant(2.0)})

    def features(batch: dict[str, Any]) -> Any:
        sums = [tf.reduce_sum(batch["dense"], 1), tf.reduce_sum(batch["ragged"], 1)]
        sums.append(tf.reshape(tf.sparse.reduce_sum(batch["sparse"], 1), [-1]))
        return batch["scale"] * tf.stack(sums, 1)

    def create_model() -> keras.Model:
        return set_weights(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))

    hooks = make_hooks(
        create_dataset=create_eval_dataset,
        create_eval_dataset=create_eval_dataset,
        create_model=create_model,
        create_loss=lambda: lambda output: output[:, 0] - cases.mean_by_gather(output[:, 0]),
        input_pre=features,
        loss_pre=lambda output: output,
        count_examples=lambda batch: tf.shape(batch["dense"])[0],
        # Means over what a replica has itself: of nothing, they are no numbers.
        eval_pre=lambda loss: (loss + tf.reduce_mean(loss), 0.0),
        create_metrics=lambda: {"largest": keras.metrics.Mean()},
        metric_pre=lambda output: tf.reduce_mean(output),
    )
    state = train(hooks, steps=0, batch_size=8, virtual_devices=2)
    outputs = create_model()(features(next(iter(create_eval_dataset(9))))).numpy()[:, 0]
    parts = [outputs[:4], outputs[4:8], outputs[8:]]
    losses = [part - whole for part, whole in
              zip(parts, [outputs[:8].mean()] * 2 + [outputs[8]], strict=True)]  # fmt: skip
    expected = np.concatenate([loss + loss.mean() for loss in losses]).mean()
    np.testing.assert_allclose(state.metrics["loss"], expected, rtol=1e-4, atol=1e-6)
    means = np.mean([part.mean() for part in parts])
    np.testing.assert_allclose(state.metrics["largest"], means, rtol=1e-5)


def in_function(batch: Any) -> Any:
    return tf.function(lambda values: values - cases.mean_by_gather(values))(batch[0])


def in_branch(batch: Any) -> Any:
    inputs = batch[0]
    if tf.reduce_sum(inputs) > 0.0:
        inputs = inputs - cases.mean_by_sum(inputs)
    return inputs


def in_body(batch: Any) -> Any:
    return batch[0] - cases.mean_by_sum(batch[0])


@pytest.mark.parametrize(
    ("hook", "jit_compile"), [(in_function, False), (in_branch, False), (in_body, True)]
)
def test_an_exchange_where_replicas_cannot_meet_is_refused(
    train: Train, hook: Any, jit_compile: bool
) -> None:
    said = (
        r"^input_pre \(\w+.py:\d+\): RuntimeError: exchanges values with the other replicas inside "
        "of a tf.function, a branch or a loop of the graph, .* without jit_compile"
    )
    with pytest.raises(ctl_core.SetupError, match=said):
        train(make_hooks(input_pre=hook), steps=1, virtual_devices=2, jit_compile=jit_compile)


@pytest.mark.parametrize("hook", [in_function, in_branch, in_body])
def test_one_replica_meets_itself_anywhere(train: Train, hook: Any) -> None:
    state = train(make_hooks(input_pre=hook), steps=2, jit_compile=True)
    assert state.step == 2


def norm_model() -> keras.Model:
    """The mean square of the first layer's output adds to the loss."""
    norm = keras.layers.BatchNormalization(synchronized=True, momentum=0.8)
    first = keras.layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.1))
    layers = [first, norm, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    random = np.random.default_rng(1)
    model.set_weights([random.uniform(0.2, 1.0, w.shape) for w in model.get_weights()])
    return model


def norm_by_hand(steps: int) -> keras.Model:
    model, optimizer = norm_model(), keras.optimizers.SGD(RATE)
    for inputs, target in cases.sliced(cases.regression_data())(BATCH).repeat().take(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(cases.squared_error((model(inputs, training=True), target)))
            loss += sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_layer_adds_a_loss_before_replicas_meet(train: Train, replicas: int) -> None:
    """Both replicas have called the layer when the first one's loss is read off the model."""
    expected, seen = norm_by_hand(STEPS), []
    hooks = cases.eval_hooks(
        BATCH,
        create_model=norm_model,
        create_opt=sgd,
        update_pre=cases.unclipped,
        every_steps={STEPS: lambda loss: seen.append(float(loss))},
    )
    settings = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE}
    state = train(hooks, virtual_devices=replicas, **settings)
    assert_weights(state, expected, rtol=1e-5)
    before = norm_by_hand(STEPS - 1)
    batches = list(cases.sliced(cases.regression_data())(BATCH).repeat().take(STEPS))
    for model, (inputs, target), training, found in (
        (before, batches[-1], True, seen[0]),
        (expected, batches[0], False, state.metrics["loss"]),
    ):
        error = cases.squared_error((model(inputs, training=training), target))
        np.testing.assert_allclose(found, tf.reduce_mean(error) + sum(model.losses), rtol=1e-5)
