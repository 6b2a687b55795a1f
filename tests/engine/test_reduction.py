"""Tests of sums of gradients over micro-batches and replicas, and of the scale of losses."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.golden import small
from tests.golden.compare import assert_close
from tests.golden.programs import basics
from tests.helpers.cases import (
    assert_weights,
    dropout_model,
    make_hooks,
    regression_data,
    sgd,
    sliced,
)
from tests.helpers.project import Train

STEPS, BATCH, RATE = 12, 16, 0.02


def test_gradients_are_summed_once_an_update(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas exchange gradients once per update, whatever the number of micro-batches is.

    The exchange is the main cost of training on several devices.
    """
    sums: list[int] = []
    reduce = tf.distribute.ReplicaContext.all_reduce

    def count(self: Any, *args: Any, **options: Any) -> Any:
        sums.append(1)
        return reduce(self, *args, **options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", count)
    train(small.hooks(), steps=6, virtual_devices=2, accumulate_steps=4)
    assert len(sums) == 2, "one for all gradients, on each replica"


def test_more_micro_batches_than_examples_are_refused(train: Train) -> None:
    text = "^accumulate_steps: a batch of 16 cannot be split into 100000 micro-batches"
    with pytest.raises(ctl_core.SetupError, match=text):
        train(small.hooks(), accumulate_steps=100_000)


def test_micro_batches_run_one_after_the_other(train: Train) -> None:
    """Micro-batches run in sequence. In parallel, they would need the memory of the whole batch."""
    events: list[str] = []

    def noted(tensor: tf.Tensor, event: str) -> tf.Tensor:
        def note(value: np.ndarray) -> np.ndarray:
            events.append(f"{event} begins")
            time.sleep(0.03 * (event == "backward"))
            events.append(f"{event} ends")
            return value

        # The op must not be stateful, because TensorFlow runs stateful ops in order anyway.
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
    micro_batch = ["forward begins", "forward ends", "backward begins", "backward ends"]
    assert events == micro_batch * 8


def test_an_update_by_one_replicas_batch_is_found_and_named(train: Train, tmp_path: Path) -> None:
    """Replicas that differ are an error when a checkpoint is due, and no checkpoint is written."""

    def by_own_batch(gradients: Any, batch: Any) -> Any:
        scale = tf.reduce_mean(tf.abs(batch[0]))
        return [gradients[0] * scale, *gradients[1:]], gradients

    hooks = make_hooks(update_pre=by_own_batch)
    train(hooks, steps=4, ckpt_every=2)  # With a single replica, the hook is correct.
    with pytest.raises(ctl_core.RunError, match=r"after step 6, .*/hidden/kernel .*s 0 and 1"):
        train(hooks, steps=9, ckpt_every=2, virtual_devices=2)
    records = sorted(path.name for path in tmp_path.glob("runs/run/ckpt/engine/*.json"))
    assert records == ["ckpt-2.json", "ckpt-4.json"]


@pytest.mark.parametrize(
    "dtype", small.slow_but("complex128", "string", of=["bool", "complex128", "string", "float16"])
)
def test_a_variable_of_any_dtype_that_differs_is_found(train: Train, dtype: str) -> None:
    noted: list[tf.Variable] = []

    def create_model() -> keras.Model:
        noted[:] = [tf.Variable(convert(0), trainable=False, name="noted")]
        return small.create_model()

    def convert(number: Any) -> tf.Tensor:
        return tf.as_string(number) if dtype == "string" else tf.cast(number, dtype)

    def by_replica(gradients: Any) -> Any:
        noted[0].assign(convert(ctl_core.replica_id()))
        return gradients, gradients

    hooks = make_hooks(create_model=create_model, update_pre=by_replica)
    with pytest.raises(ctl_core.RunError, match=r"after step 2, noted differs .* 0 and 1"):
        train(hooks, steps=2, virtual_devices=2)


# ---- Optimizers that hooks apply ---------------------------------------------------------------


def test_an_optimizer_that_a_hook_applies_gets_the_sum_over_the_replicas(train: Train) -> None:
    """An optimizer that ``grad_pre`` applies, such as a critic's, sums gradients over replicas.

    With micro-batches, the optimizer is refused before it takes a step.
    """
    created = SimpleNamespace()

    def create_model() -> keras.Model:
        created.scale, created.optimizer = keras.Variable([1.0]), keras.optimizers.SGD(0.1)
        created.optimizer.build([created.scale])
        return small.create_model()

    def grad_pre(loss: Any, batch: Any, train_model: Any) -> Any:
        gradient = tf.reduce_sum(batch[1])[None] / BATCH
        created.optimizer.apply_gradients([(gradient, created.scale)])
        return loss, 0.0, train_model.trainable_variables

    hooks = make_hooks(create_model=create_model, grad_pre=grad_pre)
    train(hooks, steps=1, virtual_devices=2)
    expected = 1.0 - 0.1 * regression_data()[1][:BATCH].mean()
    np.testing.assert_allclose(created.scale.numpy(), [expected], rtol=1e-5)
    with pytest.raises(ctl_core.SetupError, match="grad_pre: applies an optimizer itself"):
        train(hooks, steps=1, accumulate_steps=2, run_name="refused")
    assert created.scale.numpy() == [1.0]


# ---- Options of Keras' optimizers, with rows of an embedding that occur several times ------------

OPTIONS = [
    ({"global_clipnorm": 0.05}, {"virtual_devices": 2}),
    ({"global_clipnorm": 0.05}, {"jit_compile": True, "accumulate_steps": 2}),
    ({"global_clipnorm": 0.05}, {"jit_compile": True, "virtual_devices": 2}),
    (
        {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 4},
        {"virtual_devices": 2, "accumulate_steps": 2},
    ),
    ({"gradient_accumulation_steps": 3, "weight_decay": 0.1}, {"virtual_devices": 2}),
    *small.slow_but(
        of=[
            ({"weight_decay": 0.1}, {"virtual_devices": 2}),
            ({"use_ema": True, "ema_momentum": 0.8}, {"virtual_devices": 2}),
            ({"gradient_accumulation_steps": 3}, {}),
            (
                {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 4},
                {"virtual_devices": 3, "jit_compile": True, "accumulate_steps": 2},
            ),
        ]
    ),
]
create_dataset = small.slices(basics.WORDS, drop_remainder=True)


def with_options(**options: Any) -> SimpleNamespace:
    return small.hooks(
        create_dataset=create_dataset,
        create_model=basics.embed_words,
        create_opt=lambda lr: keras.optimizers.SGD(lr, momentum=0.5, **options),
    )


def by_keras(**options: Any) -> list[np.ndarray]:
    """Returns the weights and the optimizer's variables after a plain loop."""
    optimizer = with_options(**options).create_opt(RATE)
    how: dict[str, Any] = {"model": basics.embed_words(), "batches": create_dataset(BATCH)}
    model = small.plain(STEPS, optimizer=optimizer, **how)
    others = (v.numpy() for v in optimizer.variables if not v.path.endswith("learning_rate"))
    return [*model.get_weights(), *others]


@pytest.mark.parametrize(("options", "settings"), OPTIONS, ids=str)
def test_an_option_of_a_keras_optimizer_does_what_it_does_in_a_plain_loop(
    train: Train, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected = by_keras(**options)
    assert np.abs(expected[0] - by_keras()[0]).max() > 1e-3 or "use_ema" in options
    state = train(with_options(**options), steps=STEPS, learning_rate=RATE, **settings)
    trained = [*state.train_model.get_weights(), *(v.numpy() for v in state.optimizer.variables)]
    for value, other in zip(trained, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


def test_rows_of_a_branch_are_added_up_like_others(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of an embedding in a branch are summed, although they have no static shape."""
    expected, look_up = by_keras(global_clipnorm=0.05), keras.layers.Embedding.call

    def branch(layer: Any, words: Any) -> Any:
        known = tf.reduce_all(words < 7)
        return tf.cond(known, lambda: look_up(layer, words), lambda: -look_up(layer, words))

    monkeypatch.setattr(keras.layers.Embedding, "call", branch)
    settings = {"steps": STEPS, "learning_rate": RATE, "jit_compile": True, "accumulate_steps": 2}
    weights = train(with_options(global_clipnorm=0.05), **settings).train_model.weights
    assert_close(weights, expected[: len(weights)])


# ---- Losses with one value per batch or one value per example ------------------------------------


Loss = Callable[[Any], Any]


class Noisy(keras.Model):
    """Draws random numbers in each call, like a VAE, even outside of training."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.seeds = keras.layers.Dense(5), keras.random.SeedGenerator(3)

    def call(self, inputs: Any) -> Any:
        mean = self.mean(inputs)
        return mean + 0.3 * keras.random.normal(tf.shape(mean), seed=self.seeds), mean


def vae_loss(loss_input: Any) -> Any:
    (image, mean), inputs = loss_input
    return tf.reduce_mean(tf.reduce_sum((image - inputs) ** 2, 1) + 0.5 * tf.reduce_sum(mean**2, 1))


def mean_error(pair: Any) -> Any:
    return tf.reduce_mean((pair[0] - pair[1]) ** 2)


def sum_error(pair: Any) -> Any:
    return tf.reduce_sum((pair[0] - pair[1]) ** 2)


def signed(pair: Any) -> Any:
    return tf.reduce_mean(pair[0] * tf.sign(pair[1])) - 0.01


@pytest.mark.parametrize(("loss", "replicas"), [(vae_loss, 1), (mean_error, 3), (signed, 1)])
def test_loss_that_is_a_mean_is_refused(train: Train, loss: Loss, replicas: int) -> None:
    more: dict[str, Any] = {}
    if loss is vae_loss:
        more = {"create_model": Noisy, "loss_pre": lambda output, batch: (output, batch[0])}
    hooks = make_hooks(create_loss=lambda: loss, **more)
    with pytest.raises(
        ctl_core.SetupError, match=r"^create_loss \(test_reduction.py:\d+\): .*mean"
    ):
        train(hooks, steps=1, virtual_devices=replicas)


def barlow(pair: Any) -> Any:
    """Returns the squared correlations of random features, which decrease with more examples."""
    features = tf.random.stateless_normal([tf.shape(pair[0])[0], 20], [1, 2]) + 0.0 * pair[0]
    size = tf.cast(tf.shape(features)[0], tf.float32)
    correlation = tf.matmul(features, features, transpose_a=True) / size
    return tf.reduce_sum((correlation - tf.linalg.diag(tf.linalg.diag_part(correlation))) ** 2)


TRAINS: dict[str, Loss] = {
    "a sum": sum_error,
    "a sum and a constant": lambda pair: sum_error(pair) + 1e4,
    "a root": lambda pair: tf.sqrt(sum_error(pair)),
    "correlations": barlow,
    "zero": lambda pair: 0.0 * sum_error(pair),
    "of this batch size": lambda pair: mean_error((tf.ensure_shape(pair[0], [16, 1]), pair[1])),
}


@pytest.mark.parametrize("name", TRAINS)
def test_losses_that_are_no_means_train(
    train: Train, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(make_hooks(create_loss=lambda: TRAINS[name]), steps=1).step == 1
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == (name == "a root"), warnings
    for warning in warnings:
        assert "create_loss (test_reduction.py" in warning
        assert "the whole batch" in warning
        assert "divided by the global batch size, 16" in warning
        assert "one number per example" in warning
        assert "all_gather" in warning


def test_search_for_means_changes_nothing(train: Train) -> None:
    """The search affects neither the order of the data, nor random numbers, nor variables."""

    def hooks(loss: Loss) -> Any:
        data = tf.data.Dataset.from_tensor_slices(small.data())
        return make_hooks(
            create_dataset=lambda: data.shuffle(64, seed=1).batch(8),
            create_model=dropout_model,
            create_loss=lambda: loss,
        )

    tried = train(hooks(sum_error), steps=5, run_name="tried")
    state = train(hooks(small.squared_error), steps=5, run_name="not")
    assert_weights(tried, state, rtol=1e-5)


# ---- Weights of batches, and sample weights as in Keras ------------------------------------------


def test_a_step_that_weighs_nothing_changes_nothing(train: Train) -> None:
    inputs, target = (array.copy() for array in regression_data())
    target[40:48] = 99.0  # These are the examples of the sixth step.
    hooks = make_hooks(
        create_dataset=sliced((inputs, target)),
        create_opt=sgd,
        batch_weight=lambda batch: tf.reduce_sum(tf.where(batch[1] > 50.0, 0.0, 1.0)),
    )
    settings = {"batch_size": 8, "virtual_devices": 2}
    five, six = (train(hooks, steps=n, run_name=str(n), **settings) for n in (5, 6))
    assert_weights(six, five, rtol=0)


def test_a_negative_weight_makes_the_loss_nan(train: Train) -> None:
    hooks = make_hooks(batch_weight=lambda batch: -tf.size(batch[1]))
    with pytest.raises(ctl_core.RunError, match="the loss of step 1 is not finite"):
        train(hooks, steps=2, batch_size=8, on_nan="stop")


WEIGHTS = np.random.default_rng(5).uniform(0.0, 3.0, 48)  # NumPy's default dtype is float64.


def weighted_hooks(weight: Any = WEIGHTS, **hooks: Any) -> SimpleNamespace:
    arrays = *small.data(48), weight
    return small.hooks(
        create_dataset=small.slices(arrays),
        create_eval_dataset=small.slices(tuple(array[:23] for array in arrays)),
        create_metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        **hooks,
    )


@pytest.mark.parametrize(("weight", "devices"), [(WEIGHTS, 1), (WEIGHTS[:, None], 2)])
def test_sample_weights_are_those_of_keras_fit(train: Train, weight: Any, devices: int) -> None:
    settings = {"batch_size": 8, "learning_rate": 0.1, "virtual_devices": devices}
    state = train(weighted_hooks(weight), steps=6, **settings)
    inputs, target = small.data(48)
    model, error = small.create_model(), keras.metrics.MeanAbsoluteError()
    model.compile(keras.optimizers.SGD(0.1), "mse", weighted_metrics=[error])
    model.fit(inputs, target, 8, sample_weight=WEIGHTS, shuffle=False, verbose=0)
    assert_weights(state, model, rtol=1e-5)
    values = model.evaluate(inputs[:23], target[:23], 8, sample_weight=WEIGHTS[:23], verbose=0)
    np.testing.assert_allclose([state.metrics["loss"], state.metrics["error"]], values, rtol=1e-5)


NO_WEIGHTS: dict[str, SimpleNamespace] = {
    r"^batch_weight \(test_reduction.py:\d+\): returned float32\[8\], expected the weight of": (
        make_hooks(batch_weight=lambda batch: tf.ones_like(batch[1][:, 0]))
    ),
    "^input_pre .*or .inputs, targets, weights., with weights of shape .b. or": (
        weighted_hooks(np.arange(48))  # These are indices of examples instead of weights.
    ),
    "^input_pre .*for other batches write input_pre, loss_pre, metric_pre": (
        make_hooks(create_dataset=sliced((*regression_data(), *regression_data())))
    ),
    "^grad_pre .*sample weights need one loss per example, not one number for the whole": (
        weighted_hooks(WEIGHTS, create_loss=lambda: sum_error)
    ),
}


@pytest.mark.parametrize("message", NO_WEIGHTS)
def test_wrong_sample_weights_are_refused(train: Train, message: str) -> None:
    with pytest.raises(ctl_core.SetupError, match=message):
        train(NO_WEIGHTS[message], steps=1, batch_size=8)
