"""WGAN-GP, after Keras' example: three turns of the critic, then one of the generator.

The dataset contains the noise, and the weights for interpolating between real and generated images.
Each turn has its own, so that they do not depend on the number of devices.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program, whole_batches
from tests.golden.reference import RATE

FEATURES = 5
LATENT = 3
PENALTY = 10.0
RANDOM = np.random.default_rng(0)
DATA = {
    "real": RANDOM.normal(1.0, size=(40, FEATURES)).astype("float32"),
    "noise": RANDOM.normal(size=(40, 4, LATENT)).astype("float32"),
    "between": RANDOM.uniform(size=(40, 4, 1)).astype("float32"),
}

turns = 3 * ["critic"] + ["generator"]
create_dataset = small.slices(DATA)


class GAN(keras.Model):
    """A critic and a generator. When called, it returns the scores of real and generated images."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(8, "tanh"),
                keras.layers.Dense(1, name="said"),
            ]
        )
        self.generator = keras.Sequential(
            [keras.Input((LATENT,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(FEATURES)]
        )

    def call(self, batch: Any) -> Any:
        fake = self.generator(batch["noise"])
        return self.critic(batch["real"])[:, 0], self.critic(fake)[:, 0], fake


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return GAN()


def create_loss() -> Any:
    def loss(loss_input: Any) -> Any:
        (of_real, of_made, _), objective = loss_input
        return of_made - of_real if objective == "critic" else -of_made

    return loss


def create_opt(lr: Any) -> dict[str, keras.Optimizer]:
    return {name: keras.optimizers.Adam(lr, 0.5, 0.9, 0.01) for name in ("critic", "generator")}


def penalty(critic: keras.Model, real: Any, fake: Any, between: Any) -> Any:
    """Returns the penalty of each example, which grows with the distance of the slope from 1."""
    point = between * real + (1.0 - between) * fake
    with tf.GradientTape() as tape:
        tape.watch(point)
        scores = critic(point)
    slope = tf.norm(tape.gradient(scores, point), axis=1)
    return PENALTY * (slope - 1.0) ** 2


def input_pre(batch: Any, turn: int) -> Any:
    return {"real": batch["real"], "noise": batch["noise"][:, turn]}


def grad_pre(
    loss: Any, output: Any, batch: Any, train_model: Any, objective: str, turn: int
) -> Any:
    variables = getattr(train_model, objective).trainable_variables
    if objective == "generator":
        return loss, 0.0, variables
    steep = penalty(train_model.critic, batch["real"], output[2], batch["between"][:, turn])
    return loss + steep, 0.0, variables, {"penalty": steep}


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_model=create_model,
    create_loss=create_loss,
    create_opt=create_opt,
    turns=turns,
    input_pre=input_pre,
    loss_pre=lambda output, objective: (output, objective),
    grad_pre=grad_pre,
)


@functools.cache
def train_plainly() -> tuple[keras.Model, list[float]]:
    """Returns the model, and the mean penalty of each step."""
    model = create_model()
    optimizers = create_opt(RATE)
    penalties = []
    critic = model.critic
    generator = model.generator
    for batch in whole_batches(create_dataset):
        values = []
        for turn in range(3):
            with tf.GradientTape() as tape:
                fake = generator(batch["noise"][:, turn])
                cost = tf.reduce_mean(critic(fake)) - tf.reduce_mean(critic(batch["real"]))
                steep = penalty(critic, batch["real"], fake, batch["between"][:, turn])
                loss = cost + tf.reduce_mean(steep)
            gradients = tape.gradient(loss, critic.trainable_variables)
            optimizers["critic"].apply(gradients, critic.trainable_variables)
            values.append(float(tf.reduce_mean(steep)))
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(generator(batch["noise"][:, 3])))
        gradients = tape.gradient(loss, generator.trainable_variables)
        optimizers["generator"].apply(gradients, generator.trainable_variables)
        penalties.append(sum(values) / len(values))
    return model, penalties


# The engine refuses to combine micro-batches with turns. The critic's last bias cancels in its
# loss, so that it does not change.
PROGRAM = Program(
    hooks, lambda: (train_plainly()[0].weights, {}), accumulates=False, frozen="said/bias"
)
