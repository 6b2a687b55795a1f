"""overfit_batches: the first global batches of a pass, over and over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.golden import small
from tests.helpers.cases import (
    FEATURES,
    assert_weights,
    regression_data,
    sliced,
    small_model,
)
from tests.helpers.fixtures import Train


def examples() -> tf.data.Dataset:
    """Shuffled anew in each pass."""
    return tf.data.Dataset.from_tensor_slices(regression_data()).shuffle(100, seed=3)


def shuffled(global_batch_size: int) -> tf.data.Dataset:
    return examples().batch(global_batch_size, drop_remainder=True)


def noisy(global_batch_size: int) -> tf.data.Dataset:
    """The same with other noise in each pass; its position cannot be saved exactly."""
    data = tf.data.Dataset.zip(examples(), tf.data.Dataset.random(seed=4).batch(2))

    def change(pair: Any, seed: Any) -> Any:
        noise = tf.random.stateless_normal([FEATURES], tf.cast(seed, tf.int64))
        return pair[0] + noise * 0.1, pair[1]

    return data.map(change).batch(global_batch_size, drop_remainder=True)


def plain_loop(batches: list[Any], steps: int) -> keras.Model:
    model, optimizer = small_model(), keras.optimizers.Adam(0.01)
    for step in range(steps):
        inputs, target = batches[step % len(batches)]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - target) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    return model


def adam_hooks(**more: Any) -> Any:
    own = {"create_dataset": shuffled, "create_opt": lambda lr: keras.optimizers.Adam(lr)}
    return small.hooks(**{**own, **more})


@pytest.mark.parametrize(("replicas", "data"), [(1, shuffled), (2, shuffled), (2, noisy)])
@pytest.mark.slow
def test_the_same_batches_come_again_in_each_pass(
    train: Train, replicas: int, data: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    keras.utils.set_random_seed(0)
    first, own = list(data(16).take(3)), adam_hooks(create_dataset=data)
    whole = train(own, steps=20, overfit_batches=3, virtual_devices=replicas)
    assert (
        "only the first 3 global batches are trained on, over and over." in capsys.readouterr().out
    )
    assert_weights(whole, plain_loop(first, 20), rtol=2e-4)
    for steps in (2, 3, 11, 20):  # while the batches are read first, just then, and later
        parts = train(
            own, steps=steps, overfit_batches=3, virtual_devices=replicas, run_name="parts"
        )
    assert_weights(parts, whole, rtol=0)
    record = json.loads((Path(parts.run_dir) / "ckpt/engine/ckpt-20.json").read_text())
    saved = data is shuffled
    assert (record["input_saved"], record["overfit_batches"]) == (saved, 3)
    assert ("reading and dropping" in capsys.readouterr().out) is not saved


def test_one_and_several_replicas_micro_batches_and_per_replica_batches_see_the_same(
    train: Train,
) -> None:
    own = adam_hooks(create_dataset=sliced(regression_data()))
    shared = {"virtual_devices": 2, "accumulate_steps": 2}
    one = train(own, steps=9, overfit_batches=2, run_name="one")
    several = train(own, steps=9, overfit_batches=2, run_name="several", **shared)
    assert_weights(several, one, rtol=2e-4)


def test_more_than_there_are_goes_on_into_the_next_pass(train: Train) -> None:
    state = train(adam_hooks(create_dataset=sliced(regression_data())), steps=14, overfit_batches=7)
    pass_of = list(sliced(regression_data())(16).take(6))
    assert_weights(state, plain_loop([*pass_of, pass_of[0]], 14), rtol=2e-4)
