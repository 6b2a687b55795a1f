"""WGAN-GP, after Keras' example: two objectives, one with a gradient penalty.

Noise and the points between real and made images come with the data, so that any number of devices
has the same. Critic and generator step together.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.ported.compare import BATCH, RATE, STEPS, assert_moved, numbers

FEATURES, LATENT, PENALTY = 5, 3, 10.0
RANDOM = np.random.default_rng(0)
DATA = {
    "real": RANDOM.normal(1.0, size=(40, FEATURES)).astype("float32"),
    "noise": RANDOM.normal(size=(40, LATENT)).astype("float32"),
    "between": RANDOM.uniform(size=(40, 1)).astype("float32"),
}
SETTINGS = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE}

# ---- callbacks.py -----------------------------------------------------------------------------


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(DATA).batch(per_replica_batch_size)


class GAN(keras.Model):
    """Critic and generator; as a model, what the critic says of real and made images."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        )
        self.generator = keras.Sequential(
            [keras.Input((LATENT,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(FEATURES)]
        )

    def call(self, batch: Any) -> Any:
        made = self.generator(batch["noise"])
        return self.critic(batch["real"])[:, 0], self.critic(made)[:, 0], made


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return GAN()


def create_loss() -> Any:
    return lambda output: output[1] - output[0]


def create_opt(lr: Any) -> dict[str, keras.Optimizer]:
    return {"critic": keras.optimizers.SGD(lr), "generator": keras.optimizers.SGD(lr)}


def penalty(critic: keras.Model, real: Any, made: Any, between: Any) -> Any:
    """One number per example: how far the critic's slope is from 1."""
    point = between * real + (1.0 - between) * made
    with tf.GradientTape() as tape:
        tape.watch(point)
        said = critic(point)
    slope = tf.norm(tape.gradient(said, point), axis=1)
    return PENALTY * (slope - 1.0) ** 2


def objectives(loss: Any, output: Any, batch: Any, model: GAN) -> dict[str, Any]:
    _, of_made, made = output
    steep = penalty(model.critic, batch["real"], tf.stop_gradient(made), batch["between"])
    return {"critic": loss + steep, "generator": -of_made}


def grad_pre(loss: Any, output: Any, batch: Any, train_model: Any) -> dict[str, Any]:
    found = objectives(loss, output, batch, train_model)
    return {
        name: (found[name], 0.0, getattr(train_model, name).trainable_variables) for name in found
    }


def hooks() -> SimpleNamespace:
    return SimpleNamespace(
        create_dataset=create_dataset,
        create_model=create_model,
        create_loss=create_loss,
        create_opt=create_opt,
        input_pre=lambda batch: batch,
        loss_pre=lambda output: output,
        grad_pre=grad_pre,
        update_pre=lambda gradients: (gradients, gradients),
        every_steps={},
    )


# ---- The same as a plain loop -----------------------------------------------------------------


@functools.cache
def plain() -> keras.Model:
    model, optimizers = create_model(), create_opt(RATE)
    before = numbers(model.trainable_variables)
    for batch in create_dataset(BATCH).repeat().take(STEPS):
        with tf.GradientTape(persistent=True) as tape:
            output = model(batch)
            found = objectives(create_loss()(output), output, batch, model)
            means = {name: tf.reduce_mean(each) for name, each in found.items()}
        variables = {name: getattr(model, name).trainable_variables for name in means}
        gradients = {name: tape.gradient(means[name], variables[name]) for name in means}
        for name, optimizer in optimizers.items():
            optimizer.apply_gradients(zip(gradients[name], variables[name], strict=True))
    # The last bias of a critic changes nothing it is trained by.
    still = model.critic.layers[-1].bias.path
    moved = [v for v in model.trainable_variables if v.path != still]
    assert_moved([pair for pair, v in zip(before, model.trainable_variables, strict=True)
                  if v.path != still], numbers(moved))  # fmt: skip
    return model
