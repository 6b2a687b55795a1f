"""An agent that acts within the model; the dataset only provides random numbers.

An actor starts at 2 and steps left or right on a line. It is rewarded for being near 0. A critic
estimates the future reward. Actions depend on random numbers made from a counter, so that the
episodes are the same on any number of devices.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program

EPISODES = 40
LENGTH = 8


def create_dataset(per_replica_batch_size: int) -> tf.data.Dataset:
    def draw_numbers(episode: Any) -> Any:
        return tf.random.stateless_uniform([LENGTH], seed=[episode, 7])

    return tf.data.Dataset.range(EPISODES).map(draw_numbers).batch(per_replica_batch_size)


class Agent(keras.Model):
    """Plays an episode for each row of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("actor", "critic"):
            layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
            setattr(self, name, keras.Sequential([keras.Input((1,)), *layers]))

    def call(self, numbers: Any) -> Any:
        place = tf.fill([tf.shape(numbers)[0], 1], 2.0)
        played = []
        for number in tf.unstack(numbers, axis=1):
            logit = self.actor(place)[:, 0]
            right = tf.cast(number < tf.sigmoid(logit), tf.float32)
            surprise = tf.nn.sigmoid_cross_entropy_with_logits(right, logit)
            value = self.critic(place)[:, 0]
            place += 2.0 * right[:, None] - 1.0
            played.append((surprise, value, -tf.abs(place[:, 0])))
        return [tf.stack(each, axis=1) for each in zip(*played, strict=True)]


def create_model() -> keras.Model:
    model = Agent()
    random = np.random.default_rng(1)
    model.set_weights([random.normal(scale=0.3, size=w.shape) for w in model.get_weights()])
    return model


def learn_from(output: Any) -> tf.Tensor:
    """Returns the loss of actor and critic for each episode."""
    surprise, value, reward = output
    advantage = tf.cumsum(reward, axis=1, reverse=True) - value
    return tf.reduce_sum(surprise * tf.stop_gradient(advantage) + advantage**2, axis=1)


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_model=create_model,
    create_loss=lambda: learn_from,
    input_pre=lambda batch: batch,
    loss_pre=lambda output: output,
)


PROGRAM = Program(hooks, settings={"learning_rate": 0.01})
