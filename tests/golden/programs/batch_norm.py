"""Batch normalisation over the batch of all replicas, and its moving statistics."""

from __future__ import annotations

import functools

import keras

from tests.golden import small
from tests.golden.catalogue import Program

INPUTS, TARGET = small.data(44)
create_dataset = small.slices((2.0 * INPUTS + 1.0, TARGET))


def create_model() -> keras.Model:
    return small.model_with(keras.layers.BatchNormalization(momentum=0.9, synchronized=True))


hooks = functools.partial(
    small.hooks,
    create_dataset=create_dataset,
    create_eval_dataset=create_dataset,
    create_model=create_model,
)


# Statistics of micro-batches are others.
PROGRAM = Program(hooks, accumulates=False)
