"""Weights that are regularised, by the engine's default optimizer, with clipped gradients."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tests.golden import small
from tests.golden.catalogue import Program

CLIP = 0.05
INPUTS, TARGET = small.data(44)
create_dataset = small.slices((INPUTS, TARGET))


def create_model() -> keras.Model:
    model = small.create_model()
    for layer in model.layers:
        layer.kernel.regularizer = keras.regularizers.L2(0.01)
    return model


def create_opt(lr: Any) -> keras.Optimizer:
    return keras.optimizers.Nadam(learning_rate=lr, epsilon=0.001)


def update_pre(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, CLIP)[0], gradients


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_eval_dataset=create_dataset,
    create_model=create_model,
    create_opt=create_opt,
    update_pre=update_pre,
)


PROGRAM = Program(hooks)
