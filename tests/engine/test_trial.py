"""A mean over the batch is refused where a sum is expected, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import (
    dropout_model,
    make_hooks,
    regression_data,
    squared_error,
)
from tests.helpers.fixtures import Train


def mean(loss_input: Any) -> Any:
    return tf.reduce_mean((loss_input[0] - loss_input[1]) ** 2)


def total(loss_input: Any) -> Any:
    return tf.reduce_sum((loss_input[0] - loss_input[1]) ** 2)


def shuffled(per_replica_batch_size: int) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices(regression_data()).shuffle(50, seed=2)
    return data.batch(per_replica_batch_size, drop_remainder=True)


def test_a_mean_in_the_loss_is_refused(train: Train) -> None:
    hooks = make_hooks(create_loss=lambda: mean, create_model=dropout_model)
    with pytest.raises(ctl_core.SetupError, match=r"create_loss \(test_trial.py:\d+\): the loss"):
        train(hooks, steps=1)

    def grad_pre(loss: Any, train_model: Any) -> Any:
        return tf.reduce_mean(loss), 0.0, train_model.trainable_variables

    with pytest.raises(ctl_core.SetupError, match=r"grad_pre .* as a mean over the batch is"):
        train(make_hooks(grad_pre=grad_pre), steps=1, virtual_devices=2)


def test_the_trial_changes_no_bit_of_a_run(train: Train) -> None:
    """The sum as one number trains as one number per example does, Dropout and shuffle included."""
    trained = []
    for name, loss in (("sum", total), ("each", squared_error)):
        hooks = make_hooks(
            create_dataset=shuffled, create_loss=lambda one=loss: one, create_model=dropout_model
        )
        state = train(hooks, steps=9, run_name=name, virtual_devices=2)
        trained.append([np.array(v) for v in state.train_model.variables])
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def contrastive(loss_input: Any) -> Any:
    """Depends on the other examples of the batch: neither a sum nor a mean."""
    output, _ = loss_input
    return -tf.reduce_mean(tf.linalg.diag_part(tf.nn.log_softmax(output @ tf.transpose(output))))


NO_VERDICT: dict[str, Callable[[Any], Any]] = {
    "contrastive": contrastive,
    "zero": lambda loss_input: 0.0 * mean(loss_input),
    "only this batch size": lambda loss_input: mean((tf.ensure_shape(loss_input[0], [16, 1]),
                                                     loss_input[1])),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_VERDICT)
def test_what_the_trial_cannot_tell_trains(train: Train, name: str) -> None:
    assert train(make_hooks(create_loss=lambda: NO_VERDICT[name]), steps=2).step == 2
