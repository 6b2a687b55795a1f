"""Objectives in turns: several updates a step on one batch; and parts of a loss by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.golden.programs import wgan_gp
from tests.helpers.cases import assert_weights
from tests.helpers.fixtures import Train

STEPS, BATCH, RATE = 7, 8, 0.1
TURNS = ["critic", "generator"]


def of_objective(loss: Any, train_model: Any, objective: str) -> Any:
    return loss, 0.0, getattr(train_model, objective).trainable_variables


def gan_hooks(**more: Any) -> SimpleNamespace:
    """The golden program of a GAN, with one turn of the critic and no penalty."""
    own = {
        "turns": TURNS,
        "create_opt": lambda lr: {name: keras.optimizers.SGD(lr, momentum=0.5) for name in TURNS},
        "input_pre": lambda batch, turn: wgan_gp.input_pre(batch, turn or 0),
        "grad_pre": of_objective,
    }
    return SimpleNamespace(**{**vars(wgan_gp.hooks()), **own, **more})


def loop(steps: int = STEPS, clip: float = 9.0) -> tuple[keras.Model, list[list[float]]]:
    """The same as a plain loop, with the critic's weights clipped, and the losses of the turns."""
    model, optimizers, seen = wgan_gp.create_model(), gan_hooks().create_opt(RATE), []
    for batch in wgan_gp.create_dataset(BATCH).repeat().take(steps):
        losses = []
        for turn, name in enumerate(TURNS):
            variables = getattr(model, name).trainable_variables
            with tf.GradientTape() as tape:
                output = model(wgan_gp.input_pre(batch, turn))
                loss = tf.reduce_mean(wgan_gp.create_loss()((output, name)))
            optimizers[name].apply(tape.gradient(loss, variables), variables)
            for variable in variables if name == "critic" else []:
                variable.assign(tf.clip_by_value(variable, -clip, clip))
            losses.append(float(loss))
        seen.append(losses)
    return model, seen


@pytest.mark.parametrize("replicas", [1, 2])
def test_update_post_follows_each_turn_and_the_average_the_step(
    train: Train, replicas: int
) -> None:
    """WGAN clips its critic's weights after each of its updates."""
    clip, losses = 0.3, []

    def update_post(train_model: Any, objective: str, turn: int) -> None:
        assert turn == TURNS.index(objective)
        if objective == "critic":
            for variable in train_model.critic.trainable_variables:
                variable.assign(tf.clip_by_value(variable, -clip, clip))

    def look(loss: Any) -> None:
        losses.append([float(loss[name]) for name in TURNS])

    own = gan_hooks(update_post=update_post, every_steps={1: look})
    settings = {"batch_size": BATCH, "learning_rate": RATE, "virtual_devices": replicas}
    state = train(own, steps=STEPS, ema=0.9, **settings)
    model, seen = loop(clip=clip)
    assert_weights(state, model, rtol=2e-5)
    np.testing.assert_allclose(losses, seen, rtol=1e-4, atol=1e-6)
    average = [weight.numpy() for weight in wgan_gp.create_model().trainable_variables]
    for step in range(1, STEPS + 1):
        new = loop(step, clip)[0].trainable_variables
        average = [0.9 * old + 0.1 * one.numpy() for old, one in zip(average, new, strict=True)]
    with state.average.in_place_of_weights():  # type: ignore[union-attr]
        for ours, theirs in zip(state.train_model.trainable_variables, average, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, 2e-5, 2e-6)


def test_metrics_of_a_turn(train: Train) -> None:
    """A metric counts in the turns for which there is something."""

    def arguments(loss: Any, objective: str) -> Any:
        return {objective: loss}

    own = gan_hooks(
        create_train_metrics=lambda: {name: keras.metrics.Mean() for name in TURNS},
        train_metric_pre=arguments,
    )
    state = train(own, steps=1, batch_size=BATCH, learning_rate=RATE, log_every=1)
    (line,) = (line for line in state.history if line["split"] == "train")
    np.testing.assert_allclose([line[name] for name in TURNS], loop(1)[1][0], rtol=1e-5)
