"""Values that replicas cannot exchange are refused in the same words on any number of devices."""

import re
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import ctl_core
from ctl_core import all_gather, all_reduce
from tests.golden import compare, engine, small
from tests.golden.reference import RATE, Reference
from tests.golden.uneven_batches import train_on


def to_ragged(inputs: Any) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_tensor(inputs)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a scalar": (lambda x: all_gather(tf.reduce_max(x)), r"all_gather .*scalar.* \[1\]"),
    "no such axis": (lambda x: all_gather(x, 2), "all_gather .*axis=2 .* 2 axes"),
    "columns of ragged rows": (lambda x: all_gather(to_ragged(x), 1), "all_gather .*axis 0 only"),
    "the mean of integers": (
        lambda x: all_reduce(tf.reduce_sum(tf.cast(x, tf.int32)), "mean"),
        "all_reduce got int32 for a mean.*float32",
    ),
    "the sum of booleans": (lambda x: all_reduce(x > 0), "all_reduce .*bool; cast it to int32"),
    "the sum of strings": (lambda x: all_reduce(tf.strings.as_string(x)), "string; use all_gather"),
    "the sum of ragged rows": (lambda x: all_reduce(to_ragged(x)), "all_reduce .*ragged tensor"),
    "a complex maximum": (
        lambda x: all_reduce(tf.cast(x, tf.complex64), "max"),
        "all_reduce got complex64 .*no order",
    ),
    "an unknown operation": (lambda x: all_reduce(x, "median"), '"median"; .*"sum", .*"min"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exchanged(train: engine.Train, name: str) -> None:
    exchange, words = REFUSED[name]

    def loss_pre(output: Any, batch: Any) -> Any:
        exchange(batch[0])
        return output, batch[1]

    messages = []
    for devices in (1, 3):
        with pytest.raises(ctl_core.SetupError) as raised:
            train_on(train, small.hooks(loss_pre=loss_pre), devices, 16, steps=1)
        messages.append(str(raised.value).partition(" [batch: ")[0])
    assert messages[0] == messages[1]
    assert len(messages[0].split()) <= 30
    pattern = rf"loss_pre \(test_exchanges.py:\d+\): .*{words}"
    assert re.match(pattern, messages[0]), messages[0]


def test_a_weight_that_depends_on_the_whole_batch(train: engine.Train) -> None:
    """The loss is that of the larger half of the errors in the batch, divided by their number."""

    def find_hard(output: Any, batch: Any) -> tuple[Any, Any]:
        errors = small.squared_error((output, batch[1]))
        in_order = tf.sort(all_gather(errors), direction="DESCENDING")
        limit = in_order[(tf.size(in_order) + 1) // 2 - 1]
        return errors, tf.stop_gradient(tf.cast(errors >= limit, tf.float32))

    def loss_pre(output: Any, batch: Any) -> Any:
        return find_hard(output, batch)

    hooks = small.hooks(
        loss_pre=loss_pre,
        create_loss=lambda: lambda pair: pair[0] * pair[1],
        batch_weight=lambda output, batch: tf.reduce_sum(find_hard(output, batch)[1]),
    )
    state = train(hooks, virtual_devices=3, **small.settings(6))
    model = small.create_model()
    for inputs, target in small.create_dataset(small.BATCH).take(6):
        with tf.GradientTape() as tape:
            errors = small.squared_error((model(inputs), target))
            loss = tf.reduce_mean(tf.math.top_k(errors, small.BATCH // 2).values)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(RATE * gradient)
    compare.assert_close(state.train_model.weights, model.weights)


def test_rows_that_are_looked_up_in_exchanged_values(train: engine.Train) -> None:
    """The gradient of ``tf.gather`` is sparse.

    A loss that sorts the rows of all replicas looks up its own rows in the result, such as the Cox
    likelihood of https://github.com/mexchy1000/DeepSurv_Keras/issues/1.
    """

    def loss_pre(output: Any, batch: Any) -> Any:
        outputs = all_gather(output)
        own = ctl_core.row_offset() + tf.range(tf.shape(output)[0])
        next_row = tf.gather(outputs, (own + 1) % tf.shape(outputs)[0])
        total = tf.gather(all_reduce(tf.reduce_sum(output, 0)), [0, 0])
        return output + 0.5 * next_row + 0.01 * tf.reduce_sum(total), batch[1]

    hooks = small.hooks(loss_pre=loss_pre)
    state = train(hooks, virtual_devices=3, **small.settings(6))
    plain = Reference(hooks).train(small.create_dataset(small.BATCH).take(6))
    compare.assert_close(state.train_model.weights, plain.parts.train_model.weights)


def exchange_in_a_branch(output: Any, batch: Any) -> Any:
    mean = tf.cond(
        tf.reduce_sum(output) > 0.0,
        lambda: all_reduce(tf.reduce_mean(output), "mean"),
        lambda: 0.0,
    )
    return output - mean, batch[1]


def exchange_in_a_function(output: Any, batch: Any) -> Any:
    mean = tf.function(lambda: tf.reduce_mean(all_gather(output)))()
    return output - mean, batch[1]


@pytest.mark.parametrize("loss_pre", [exchange_in_a_branch, exchange_in_a_function])
def test_exchanges_in_branches_train_on_one_device_only(
    train: engine.Train, loss_pre: Callable[..., Any]
) -> None:
    hooks = small.hooks(loss_pre=loss_pre)
    assert train_on(train, hooks, 1, 16, steps=1).step == 1
    message = (
        r"loss_pre \(test_exchanges.py:\d+\): exchanges .*inside a branch, a loop or a tf.func"
    )
    with pytest.raises(ctl_core.SetupError, match=message):
        train_on(train, hooks, 2, 16, steps=1, run_name="several")


class Last(keras.layers.Layer):
    """Keeps its outputs of the whole batch, which only fit if all replicas exchange their rows."""

    def build(self, shape: Any) -> None:
        self.last = self.add_weight(shape=(16, shape[-1]), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.last.assign(all_gather(tf.stop_gradient(inputs)))
        return inputs


@pytest.mark.parametrize("setting", ["accumulate_steps", "logical_replicas"])
def test_an_exchange_is_refused_before_its_result_does_not_fit(
    train: engine.Train, setting: str
) -> None:
    hooks = small.hooks(create_model=lambda: small.model_with(Last()))
    message = rf"create_model \(test_exchanges.py:\d+\): all_gather .*{setting}"
    with pytest.raises(ctl_core.SetupError, match=message):
        train(hooks, steps=1, **{setting: 2})
