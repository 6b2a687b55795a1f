"""Gradients are summed over micro-batches and replicas, once, whatever applies them."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import small
from tests.golden.programs import basics
from tests.helpers.cases import make_hooks, regression_data
from tests.helpers.fixtures import Train

STEPS, BATCH, RATE = 12, 16, 0.02


def test_gradients_are_summed_once_an_update(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of micro-batches: it is what several devices cost."""
    sums: list[int] = []
    reduce = tf.distribute.ReplicaContext.all_reduce

    def count(self: Any, *args: Any, **options: Any) -> Any:
        sums.append(1)
        return reduce(self, *args, **options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", count)
    train(small.hooks(), steps=6, virtual_devices=2, accumulate_steps=4)
    assert len(sums) == 2, "one for all gradients, on each replica"


def test_micro_batches_run_one_after_the_other(train: Train) -> None:
    """Side by side they would need the memory of the whole batch."""
    events: list[str] = []

    def noted(tensor: tf.Tensor, event: str) -> tf.Tensor:
        def note(value: np.ndarray) -> np.ndarray:
            events.append(f"{event} begins")
            time.sleep(0.03 * (event == "backward"))
            events.append(f"{event} ends")
            return value

        # Not stateful: TensorFlow keeps stateful ops in order by itself.
        return tf.ensure_shape(
            tf.numpy_function(note, [tensor], tensor.dtype, stateful=False), tensor.shape
        )

    @tf.custom_gradient
    def watched(tensor: tf.Tensor) -> Any:
        return noted(tensor, "forward"), lambda gradient: noted(gradient, "backward")

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = tf.Variable([0.5]), tf.Variable(tf.ones([small.FEATURES, 1]))

        def __call__(self, inputs: Any) -> Any:
            return watched(inputs * self.first) @ self.second

    train(make_hooks(create_model=Model), steps=2, accumulate_steps=4)
    one = ["forward begins", "forward ends", "backward begins", "backward ends"]
    assert events == one * 8


def test_an_update_by_one_replicas_batch_is_found_and_named(train: Train, tmp_path: Path) -> None:
    """At a checkpoint, which is not written then."""

    def by_own_batch(gradients: Any, batch: Any) -> Any:
        scale = tf.reduce_mean(tf.abs(batch[0]))
        return [gradients[0] * scale, *gradients[1:]], gradients

    hooks = make_hooks(update_pre=by_own_batch)
    train(hooks, steps=4, ckpt_every=2)  # on one replica, that is as good as any
    with pytest.raises(ctl_core.RunError, match=r"after step 6, .*/hidden/kernel .*replica 1"):
        train(hooks, steps=9, ckpt_every=2, virtual_devices=2)
    records = sorted(path.name for path in tmp_path.glob("runs/run/ckpt/engine/*.json"))
    assert records == ["ckpt-2.json", "ckpt-4.json"]


# ---- Optimizers that hooks apply ---------------------------------------------------------------


def applying(made: SimpleNamespace) -> SimpleNamespace:
    """Hooks of which ``grad_pre`` applies an optimizer of its own to ``made.scale``."""

    def create_model() -> keras.Model:
        made.scale, made.optimizer = keras.Variable([1.0]), keras.optimizers.SGD(0.1)
        made.optimizer.build([made.scale])
        return small.create_model()

    def grad_pre(loss: Any, batch: Any, train_model: Any) -> Any:
        gradient = tf.reduce_sum(batch[1])[None] / BATCH
        made.optimizer.apply_gradients([(gradient, made.scale)])
        return loss, 0.0, train_model.trainable_variables

    return make_hooks(create_model=create_model, grad_pre=grad_pre)


def test_an_optimizer_that_a_hook_applies_gets_the_sum_over_the_replicas(train: Train) -> None:
    """In ``grad_pre`` nothing is summed yet: Keras' own sum is what a critic needs there."""
    made = SimpleNamespace()
    train(applying(made), steps=1, virtual_devices=2)
    expected = 1.0 - 0.1 * regression_data()[1][:BATCH].mean()
    np.testing.assert_allclose(made.scale.numpy(), [expected], rtol=1e-5)


def test_an_optimizer_that_a_hook_applies_to_each_micro_batch_is_refused(train: Train) -> None:
    made = SimpleNamespace()
    with pytest.raises(ctl_core.SetupError, match="grad_pre: applies an optimizer by itself"):
        train(applying(made), steps=1, accumulate_steps=2)
    assert made.scale.numpy() == [1.0]


# ---- What Keras' optimizers do; with rows of an embedding that come more than once ---------------

OPTIONS: list[tuple[dict[str, Any], int]] = [
    ({"global_clipnorm": 0.05}, 2),
    ({"weight_decay": 0.1}, 2),
    ({"use_ema": True, "ema_momentum": 0.8}, 2),
    ({"gradient_accumulation_steps": 3}, 1),
]
create_dataset = small.slices(basics.WORDS, drop_remainder=True)


def with_options(**options: Any) -> SimpleNamespace:
    return small.hooks(
        create_dataset=create_dataset,
        create_model=basics.embed_words,
        create_opt=lambda lr: keras.optimizers.SGD(lr, momentum=0.5, **options),
    )


def by_keras(**options: Any) -> list[np.ndarray]:
    """The weights of a plain loop, whose gradients are dense, and what the optimizer keeps."""
    optimizer = with_options(**options).create_opt(RATE)
    how = {"model": basics.embed_words(), "batches": create_dataset(BATCH)}
    model = small.plain(STEPS, optimizer=optimizer, **how)
    others = (v.numpy() for v in optimizer.variables if not v.path.endswith("learning_rate"))
    return [*model.get_weights(), *others]


@pytest.mark.parametrize(("options", "replicas"), OPTIONS, ids=str)
def test_an_option_of_a_keras_optimizer_does_what_it_does_in_a_plain_loop(
    train: Train, options: dict[str, Any], replicas: int
) -> None:
    expected = by_keras(**options)
    assert np.abs(expected[0] - by_keras()[0]).max() > 1e-3 or "use_ema" in options
    settings = {"steps": STEPS, "learning_rate": RATE, "virtual_devices": replicas}
    state = train(with_options(**options), **settings)
    found = [*state.train_model.get_weights(), *(v.numpy() for v in state.optimizer.variables)]
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)
