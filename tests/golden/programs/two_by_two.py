"""Two inputs and two outputs, in dicts, for which the loss of each example is a sum of two.

The loss does not depend on one of the layers, which stays as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np

from tests.golden import small
from tests.golden.catalogue import Program

RANDOM = np.random.default_rng(0)
INPUTS = {name: RANDOM.normal(size=(44, 5)).astype("float32") for name in ("left", "right")}
SUM = INPUTS["left"].sum(axis=1, keepdims=True) + 0.5
TARGET = {"sum": SUM, "product": np.concatenate([SUM, INPUTS["right"][:, :1]], axis=1)}
create_dataset = small.slices((INPUTS, TARGET))


def create_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
    both = keras.layers.Concatenate()([left, right])
    hidden = keras.layers.Dense(6, activation="tanh")(both)
    outputs = {name: keras.layers.Dense(size, name=name)(hidden) for name, size in
               (("sum", 1), ("product", 2), ("unused", 1))}  # fmt: skip
    return keras.Model({"left": left, "right": right}, outputs)


def squared_errors(loss_input: Any) -> Any:
    output, target = loss_input
    errors = {name: small.squared_error((output[name], target[name])) for name in target}
    return errors["sum"] + 0.5 * errors["product"]


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_model=create_model,
    create_loss=lambda: squared_errors,
)


PROGRAM = Program(hooks, frozen="unused")
