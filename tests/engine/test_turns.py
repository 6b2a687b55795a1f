"""Objectives in turns: several updates a step on one batch; and parts of a loss by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from tests.helpers.cases import make_hooks, set_weights, sliced
from tests.helpers.fixtures import Train
from tests.helpers.resume import assert_resumes

STEPS, BATCH, RATE = 7, 8, 0.1
RANDOM = np.random.default_rng(3)
DATA = {
    "real": RANDOM.normal(1.0, size=(40, 5)).astype("float32"),
    "noise": RANDOM.normal(size=(40, 2, 3)).astype("float32"),
}
BCE = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


class GAN(keras.Model):
    """As Keras' example of a train_step for a GAN has it: a discriminator and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(8, "tanh"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
        set_weights(self)
        self.discriminator.layers[1].moving_variance.assign(tf.ones(8))

    def call(self, batch: Any, training: bool = False) -> Any:
        made = self.generator(batch["noise"], training=training)
        if "real" not in batch:
            return self.discriminator(made, training=training)
        return self.discriminator(tf.concat([made, batch["real"]], 0), training=training)


def input_pre(batch: Any, objective: str | None, turn: int | None) -> Any:
    noise = batch["noise"][:, turn or 0]
    return {"noise": noise} if objective == "generator" else {**batch, "noise": noise}


def loss_pre(output: Any, objective: str | None) -> Any:
    """Of made and real images there are two for each example."""
    if objective == "generator":
        return tf.zeros_like(output), output
    half = tf.zeros_like(output[: len(output) // 2])
    return tf.concat([half + 1.0, half], 0), output


def create_loss() -> Any:
    def loss(pair: Any) -> Any:
        each = BCE(*pair)
        return each

    return loss


def grad_pre(loss: Any, batch: Any, train_model: Any, objective: str) -> Any:
    if objective == "generator":
        return loss, 0.0, train_model.generator.trainable_variables
    made, real = tf.split(loss, 2)
    parts = {"real": real, "made": tf.reduce_mean(made)}
    return (made + real) / 2, 0.0, train_model.discriminator.trainable_variables, parts


def gan_hooks(**more: Any) -> SimpleNamespace:
    own = {
        "create_dataset": sliced(DATA),
        "create_model": GAN,
        "create_loss": create_loss,
        "create_opt": lambda lr: {
            name: keras.optimizers.SGD(lr, momentum=0.5) for name in ("discriminator", "generator")
        },
        "turns": ["discriminator", "generator"],
        "input_pre": input_pre,
        "loss_pre": loss_pre,
        "grad_pre": grad_pre,
        "update_pre": lambda gradients: (gradients, gradients),
        "every_steps": {},
    }
    return make_hooks(**{**own, **more})


def loop(steps: int = STEPS, clip: float = 9.0) -> tuple[GAN, list[list[float]]]:
    """The alternating GAN of Keras' example, as a plain loop; with the weights clipped."""
    model, seen = GAN(), []
    optimizers = [keras.optimizers.SGD(RATE, momentum=0.5) for _ in range(2)]
    for batch in sliced(DATA)(BATCH).repeat().take(steps):
        with tf.GradientTape() as tape:
            made = model.generator(batch["noise"][:, 0], training=True)
            said = model.discriminator(tf.concat([made, batch["real"]], 0), training=True)
            labels = tf.concat([tf.ones([BATCH, 1]), tf.zeros([BATCH, 1])], 0)
            each = BCE(labels, said)
            loss = tf.reduce_mean(each)
        variables = model.discriminator.trainable_variables
        optimizers[0].apply(tape.gradient(loss, variables), variables)
        for variable in variables:
            variable.assign(tf.clip_by_value(variable, -clip, clip))
        with tf.GradientTape() as tape:
            said = model.discriminator(model.generator(batch["noise"][:, 1]), training=True)
            other = tf.reduce_mean(BCE(tf.zeros([BATCH, 1]), said))
        variables = model.generator.trainable_variables
        optimizers[1].apply(tape.gradient(other, variables), variables)
        of_parts = [float(tf.reduce_mean(part)) for part in (each[BATCH:], each[:BATCH])]
        seen.append([float(loss), float(other), *of_parts])
    return model, seen


def assert_equal(model: Any, other: Any) -> None:
    for ours, theirs in zip(model.weights, other.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), 2e-5, 2e-6, err_msg=ours.path)


@pytest.mark.parametrize("settings", [{}, {"virtual_devices": 2}, {"virtual_devices": 4}], ids=str)
def test_an_alternating_gan_is_that_of_the_plain_loop(train: Train, settings: Any) -> None:
    """Also what is seen of it: each objective's loss, and the parts of one, by name."""
    losses: list[Any] = []
    own = gan_hooks(every_steps={1: lambda loss, gradients: losses.append(loss)})
    state = train(own, steps=STEPS, batch_size=BATCH, learning_rate=RATE, log_every=1, **settings)
    model, seen = loop()
    assert_equal(state.train_model, model)
    names = ("discriminator", "generator")
    found = [[float(one[name]) for name in names] for one in losses]
    lines = [line for line in state.history if line["split"] == "train"]
    found = [[*two, line["real"], line["made"]] for two, line in zip(found, lines, strict=True)]
    np.testing.assert_allclose(found, seen, rtol=1e-4)
    assert state.functions.trace_counts() == [1, 1]


def test_many_steps_in_one_call_and_compiled(train: Train) -> None:
    def sync_less(**settings: Any) -> Any:
        own = gan_hooks(turns=["discriminator", "generator"])
        return train(own, steps=STEPS, batch_size=BATCH, learning_rate=RATE, **settings)

    assert_equal(sync_less().train_model, loop()[0])
    assert_equal(sync_less(jit_compile=True, run_name="compiled").train_model, loop()[0])


def test_update_post_follows_each_turn_and_the_average_the_step(train: Train) -> None:
    """WGAN clips its critic's weights after each of its updates."""
    clip = 0.3

    def update_post(train_model: Any, objective: str, turn: int) -> None:
        assert turn == ["discriminator", "generator"].index(objective)
        if objective == "discriminator":
            for variable in train_model.discriminator.trainable_variables:
                variable.assign(tf.clip_by_value(variable, -clip, clip))

    own = gan_hooks(update_post=update_post)
    state = train(own, steps=STEPS, batch_size=BATCH, learning_rate=RATE, ema=0.9)
    assert_equal(state.train_model, loop(clip=clip)[0])
    average: Any = [weight.numpy() for weight in GAN().trainable_variables]
    for step in range(1, STEPS + 1):
        new = loop(step, clip)[0].trainable_variables
        average = [0.9 * old + 0.1 * one.numpy() for old, one in zip(average, new, strict=True)]
    with state.context.average.in_place_of_weights():  # type: ignore[union-attr]
        for ours, theirs in zip(state.train_model.trainable_variables, average, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, 2e-5, 2e-6)


@pytest.mark.parametrize("settings", [{}, {"precision": "float16"}], ids=str)
@pytest.mark.slow
def test_a_resumed_run_is_the_whole_run(train: Train, settings: Any) -> None:
    def freeze(train_model: Any) -> None:
        train_model.discriminator.trainable = False

    def program() -> SimpleNamespace:
        return gan_hooks(at_step={3: freeze})

    assert_resumes(train, program, replicas=2, batch_size=BATCH, log_every=1, **settings)


def test_metrics_of_a_turn(train: Train) -> None:
    """A metric counts in the turns for which there is something; one for which nothing ever is."""

    def arguments(loss: Any, objective: str) -> Any:
        return {objective: loss}

    names = ["discriminator", "generator"]
    own = gan_hooks(
        create_train_metrics=lambda: {name: keras.metrics.Mean() for name in names},
        train_metric_pre=arguments,
    )
    state = train(own, steps=1, batch_size=BATCH, learning_rate=RATE, log_every=1)
    (line,) = (line for line in state.history if line["split"] == "train")
    np.testing.assert_allclose([line[name] for name in names], loop(1)[1][0][:2], rtol=1e-5)
    own = gan_hooks(
        create_train_metrics=lambda: {"critic": keras.metrics.Mean()}, train_metric_pre=lambda: {}
    )
    with pytest.raises(ctl_core.SetupError, match=r"^train_metric_pre .*'critic' in any turn\.$"):
        train(own, run_name="other")


def test_an_evaluation_is_nobodys_turn(train: Train) -> None:
    own = gan_hooks(
        create_eval_dataset=sliced(DATA),
        eval_pre=lambda loss: (tf.reduce_sum(loss) / 2, 0.0),
    )
    state = train(own, steps=STEPS, batch_size=BATCH, learning_rate=RATE)
    model = loop()[0]
    batch = {"real": DATA["real"], "noise": DATA["noise"][:, 0]}
    labels = np.repeat([[1.0], [0.0]], 40, 0)
    np.testing.assert_allclose(state.metrics["loss"], np.mean(BCE(labels, model(batch))), 1e-4)


def of_objective(loss: Any, train_model: Any, objective: str) -> Any:
    return loss, 0.0, getattr(train_model, objective).trainable_variables


def test_a_mean_is_refused_whatever_is_evaluated(train: Train) -> None:
    """It is tried with the model that is trained, not with that of create_eval_model."""
    own = gan_hooks(
        create_loss=lambda: lambda pair: tf.reduce_mean(BCE(*pair)),
        grad_pre=of_objective,
        create_eval_model=lambda train_model: lambda batch: train_model.generator(batch["noise"]),
    )
    with pytest.raises(ctl_core.SetupError, match=r"so it is a mean over the batch"):
        train(own, batch_size=BATCH, steps=2)


def test_micro_batches_are_refused(train: Train) -> None:
    with pytest.raises(ctl_core.SetupError, match=r"^accumulate_steps: 2 micro-batches cannot go"):
        train(gan_hooks(), batch_size=BATCH, accumulate_steps=2)


@pytest.mark.parametrize("settings", [{}, {"virtual_devices": 2}, {"accumulate_steps": 2}], ids=str)
def test_parts_of_a_loss_without_turns(train: Train, settings: Any) -> None:
    """The mean over all examples since the last line: of vectors, and of scalars of a batch."""

    def grad_pre(loss: Any, output: Any, train_model: Any) -> Any:
        regular = 0.1 * tf.reduce_sum(train_model.layers[0].kernel ** 2)
        parts = {"squared": loss, "l2": regular, "size": tf.reduce_mean(output)}
        return loss, regular, train_model.trainable_variables, parts

    seen: list[Any] = []
    state = train(
        make_hooks(
            grad_pre=grad_pre,
            every_steps={1: lambda loss, output, batch: seen.append((output, batch[1]))},
            create_opt=lambda lr: keras.optimizers.SGD(lr),
        ),
        steps=5,
        log_every=2,
        learning_rate=0.01,
        **settings,
    )
    lines = [line for line in state.history if line["split"] == "train"]
    assert [line["step"] for line in lines] == [2, 4, 5]
    for line, some in zip(lines, (seen[:2], seen[2:4], seen[4:]), strict=True):
        outputs, targets = (np.concatenate(each) for each in zip(*some, strict=True))
        np.testing.assert_allclose(line["squared"], np.mean((outputs - targets) ** 2), 1e-5)
        np.testing.assert_allclose(line["size"], np.mean(outputs), 1e-4, 1e-6)
        assert line["l2"] > 0
