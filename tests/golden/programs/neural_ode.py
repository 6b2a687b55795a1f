"""A neural ODE whose gradient is computed by the adjoint method, after Chen et al. 2018.

The gradient function solves another equation backward in time, and returns the gradients of the
variables that TensorFlow passes to it. See https://github.com/titu1994/tfdiffeq/pull/3.
"""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program, Trained, whole_batches
from tests.golden.reference import RATE

FEATURES = 3
ROUNDS = 4
WIDTH = 1.0 / ROUNDS
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(44, FEATURES)).astype("float32")
LABELS = (np.sin(INPUTS).sum(axis=1) > 0).astype("int64")
create_dataset = small.slices((INPUTS, LABELS))


class Flow(keras.layers.Layer):
    """Moves each row along the direction that a small network computes from place and time."""

    def build(self, shape: Any) -> None:
        self.network = keras.Sequential(
            [keras.layers.Dense(6, "tanh"), keras.layers.Dense(FEATURES)]
        )
        self.network.build((None, FEATURES + 1))

    def find_direction(self, index: Any, place: Any) -> Any:
        time = tf.cast(index, tf.float32) * WIDTH
        return self.network(tf.concat([place, tf.ones_like(place[:, :1]) * time], axis=1))

    def move(self, index: Any, place: Any) -> Any:
        """Takes a step of the midpoint method."""
        middle = place + 0.5 * WIDTH * self.find_direction(index, place)
        half = tf.cast(index, tf.float32) + 0.5
        return place + WIDTH * self.find_direction(half, middle)

    def call(self, inputs: Any) -> Any:
        return self.solve(inputs)

    def solve(self, start: Any) -> Any:
        @tf.custom_gradient
        def integrate(start: Any) -> Any:
            _, end = tf.while_loop(
                lambda index, _: index < ROUNDS,
                lambda index, place: (index + 1, self.move(index, place)),
                (0, start),
            )

            def solve_backward(upstream: Any, variables: Any) -> Any:
                def go_back(index: Any, place: Any, adjoint: Any, *sums: Any) -> Any:
                    direction, of_place, *gradients = self.differentiate(
                        index, place, adjoint, variables
                    )
                    totals = [
                        total + WIDTH * gradient
                        for total, gradient in zip(sums, gradients, strict=True)
                    ]
                    moved = place - WIDTH * direction
                    return index - 1, moved, adjoint + WIDTH * of_place, *totals

                zeros = [tf.zeros(variable.shape) for variable in variables]
                _, _, adjoint, *sums = tf.while_loop(
                    lambda index, *_: index > 0,
                    go_back,
                    (ROUNDS, end, upstream, *zeros),
                )
                return adjoint, sums

            return end, solve_backward

        return integrate(start)

    def differentiate(self, index: Any, place: Any, adjoint: Any, variables: Any) -> Any:
        """Returns the direction, and its gradients with respect to the place and variables."""
        with tf.GradientTape() as tape:
            tape.watch(place)
            direction = self.find_direction(index, place)
        return direction, *tape.gradient(direction, [place, *variables], adjoint)


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(FEATURES, "tanh"), Flow(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_model=create_model,
    create_loss=lambda: small.crossentropy,
)


def train_plainly() -> Trained:
    """Trains with the same adjoint method, without a gradient function or a loop in a graph."""
    model: Any = create_model()
    first, flow, last = model.layers
    for inputs, labels in whole_batches(create_dataset):
        with tf.GradientTape() as first_tape:
            start = first(inputs)
        place = start
        for index in range(ROUNDS):
            place = flow.move(index, place)
        with tf.GradientTape() as last_tape:
            last_tape.watch(place)
            loss = tf.reduce_mean(small.crossentropy((last(place), labels)))
        adjoint, *of_last = last_tape.gradient(loss, [place, *last.weights])
        of_flow = [tf.zeros(variable.shape) for variable in flow.weights]
        for index in range(ROUNDS, 0, -1):
            direction, of_place, *gradients = flow.differentiate(
                index, place, adjoint, flow.trainable_variables
            )
            place -= WIDTH * direction
            adjoint += WIDTH * of_place
            of_flow = [
                total + WIDTH * gradient for total, gradient in zip(of_flow, gradients, strict=True)
            ]
        of_first = first_tape.gradient(start, first.weights, adjoint)
        small.create_opt(RATE).apply([*of_first, *of_flow, *of_last], model.weights)
    return model.weights, {}


PROGRAM = Program(hooks, train_plainly)
