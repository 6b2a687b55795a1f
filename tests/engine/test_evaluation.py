"""Several sets of evaluation data, what a batch of them weighs, and a model of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.cases import (
    assert_weights,
    dropout_model,
    eval_hooks,
    evaluated_by_hand,
    make_hooks,
    regression_data,
    sgd,
    sliced,
    small_model,
)
from tests.helpers.fixtures import Train
from tests.helpers.project import EVALUATED, Cli, refused

Make = Callable[[int], tf.data.Dataset]


def first(size: int, dtype: str = "float32") -> Make:
    """Returns a hook for the first examples."""
    inputs, target = (part[:size] for part in regression_data())
    data = inputs.astype(dtype), target
    return lambda batch: tf.data.Dataset.from_tensor_slices(data).batch(batch)


def sets_hooks(sets: dict[str, Make], **more: Any) -> Any:
    """Evaluates several sets, with the metrics of ``eval_hooks``."""
    hooks = eval_hooks(1, **more)
    hooks.create_eval_dataset = lambda per_replica_batch_size: {
        name: make(per_replica_batch_size) for name, make in sets.items()
    }
    return hooks


@pytest.mark.parametrize("replicas", [1, 3])
def test_each_set_equals_numpy(train: Train, replicas: int) -> None:
    """Each has metrics of its own, and elements of its own kind."""
    hooks = sets_hooks({"a": first(7), "b": first(25, "float64")})
    hooks.input_pre = lambda batch: tf.cast(batch[0], tf.float32)
    seen: list[Any] = []
    hooks.after_eval = lambda metrics: seen.append(metrics)
    state = train(hooks, steps=0, batch_size=24, virtual_devices=replicas)
    by_hand = {f"a/{name}": value for name, value in evaluated_by_hand(7).items()}
    by_hand |= {f"b/{name}": value for name, value in evaluated_by_hand(25).items()}
    assert list(state.metrics) == list(by_hand)
    assert state.metrics == pytest.approx(by_hand, rel=1e-5)
    assert state.history == [{"step": 0, "split": "eval", **state.metrics}]
    assert seen == [state.metrics]


def test_training_goes_on_as_without_and_graphs_are_traced_once(train: Train) -> None:
    hooks = sets_hooks({"a": first(23), "b": first(7)}, create_model=dropout_model)
    state = train(hooks, steps=10, eval_every=3, run_name="with", virtual_devices=2)
    assert state.evaluation is not None
    for one in state.evaluation.sets.values():
        assert one.run_steps.experimental_get_tracing_count() == 1
    plain = make_hooks(create_model=dropout_model)
    assert_weights(state, train(plain, steps=10, run_name="without", virtual_devices=2), rtol=0)


def test_the_values_of_a_set_decide(train: Train) -> None:
    hooks = sets_hooks({"a": first(50), "b": first(9)})
    settings = {"eval_every": 5, "learning_rate": 0.3, "ckpt_every": 0}
    state = train(hooks, steps=40, keep_best="b/loss", early_stop="a/error:max:2", **settings)
    best = min(state.history, key=lambda line: line["b/loss"])["step"]
    assert state.ended and (state.run_dir / f"ckpt/best/engine/ckpt-{best}.json").exists()


def test_eval_pre_says_what_the_loss_is(train: Train) -> None:
    hooks = eval_hooks(23)
    hooks.eval_pre = lambda loss: (3 * loss, 0.5)
    state = train(hooks, steps=0, virtual_devices=2)
    assert state.metrics["loss"] == pytest.approx(3 * evaluated_by_hand(23)["loss"] + 0.5, rel=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_evaluation_may_take_more_at_once_than_a_step(train: Train, replicas: int) -> None:
    sizes: list[int] = []

    def create_eval_dataset(per_replica_batch_size: int) -> Any:
        sizes.append(per_replica_batch_size)
        return first(100)(per_replica_batch_size)

    hooks = make_hooks(create_eval_dataset=create_eval_dataset)
    settings = {"steps": 2, "accumulate_steps": 2, "virtual_devices": replicas}
    plain = train(hooks, run_name="plain", **settings)
    state = train(hooks, eval_batch_size=64, **settings)
    assert sizes == [8 // replicas, 64 // replicas]
    assert state.metrics == pytest.approx(plain.metrics, rel=1e-6)


CHOOSING = (
    EVALUATED
    + """

def create_eval_dataset():
    data = tf.data.Dataset.from_tensor_slices(small.data())
    return {"val": data.take(37).batch(8), "test": data.skip(37).batch(8)}
"""
)


def test_evaluate_and_predict_with_several_sets(cli: Cli) -> None:
    assert "eval: val/loss " in cli(CHOOSING, "--limit-eval", "1").out
    assert "  test/error " in cli(None, command=("evaluate",)).out
    assert cli(None, "--dataset", "test", command=("predict",)).code == 0
    with np.load("runs/a/predictions-test.npz") as file:
        assert file["output"].shape == (63, 1)  # whatever limit_eval says
    for flags in ([], ["--dataset", "tset"]):
        refused(cli(None, *flags, command=("predict",)), "dataset: expected one of val, test")


# ---- create_eval_model -------------------------------------------------------------------------


def test_shared_weights_and_elements_that_only_the_evaluation_has(train: Train) -> None:
    """A network of pairs, of which single examples are evaluated; built lazily."""

    class Pairs(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = keras.layers.Dense(3, kernel_initializer="ones")

        def call(self, pair: Any) -> Any:
            return tf.reduce_sum((self.encoder(pair[0]) - self.encoder(pair[1])) ** 2, 1)

    def create_eval_model(train_model: Any) -> Any:
        assert train_model.encoder.built
        return lambda one: tf.reduce_sum(train_model.encoder(one), 1)

    inputs, target = regression_data()
    examples = tf.data.Dataset.from_tensor_slices({"x": inputs[:50], "y": target[:50, 0]})
    hooks = make_hooks(
        create_dataset=sliced(((inputs, inputs[::-1].copy()), target[:, 0])),
        create_eval_dataset=lambda: examples.batch(7),
        create_model=Pairs,
        create_eval_model=create_eval_model,
        create_loss=lambda: lambda pair: (pair[0] - pair[1]) ** 2,
        input_pre=lambda batch, training: batch[0] if training else batch["x"],
        loss_pre=lambda output, batch, training: (output, batch[1] if training else batch["y"]),
        create_opt=sgd,
    )
    state = train(hooks, steps=5, learning_rate=1e-4, virtual_devices=2)
    kernel, bias = state.train_model.get_weights()
    by_hand = (((inputs[:50] @ kernel + bias).sum(1) - target[:50, 0]) ** 2).mean()
    assert state.metrics["loss"] == pytest.approx(by_hand, rel=1e-5)


AVERAGED = """

def create_eval_model(train_model):
    copy = keras.models.clone_model(train_model)
    copy.set_weights(train_model.get_weights())
    return copy


def update_post(train_model, eval_model):
    for average, weight in zip(eval_model.variables, train_model.variables):
        average.assign(0.9 * average + 0.1 * weight)
"""


def test_predict_and_export_use_it(cli: Cli) -> None:
    assert cli(EVALUATED + AVERAGED, "--batch-size", "16").code == 0
    for command in ("predict", "export"):
        assert cli(None, command=(command,)).code == 0
    inputs = regression_data()[0]
    with np.load("runs/a/predictions.npz") as file:
        predicted = file["output"]
    exported = tf.saved_model.load("runs/a/export/1")
    np.testing.assert_allclose(exported.serve(inputs[-37:]), predicted, rtol=1e-5, atol=1e-6)
    model = small_model()
    tf.train.Checkpoint(train_model=model).read("runs/a/ckpt/ckpt-10").expect_partial()
    assert abs(predicted - model(inputs[-37:]).numpy()).max() > 1e-3
