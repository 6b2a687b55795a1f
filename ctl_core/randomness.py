"""The random generators of a Keras model: saved in checkpoints, and different on each replica.

Keras keeps the state of a SeedGenerator (one in each Dropout layer, say) in a mirrored variable,
so that every replica would draw the same numbers (Keras pull request 20612), and tf.train
checkpoints do not reach it.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ctl_core.strategy import Task

# Ops that draw from a state which no checkpoint can hold.
RANDOM_OPS = {
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomShuffle",
    "RandomGammaV2",
    "RandomPoissonV2",
    "Multinomial",
    "ParameterizedTruncatedNormal",
}

# What the seeds of two neighbouring replicas differ by; any number that seeds rarely differ by.
_STRIDE = 1_000_003


def generator_states(model: Any) -> list[Any]:
    """Returns the states of a Keras model's seed generators: int64 vectors [seed, counter].

    ``variables`` holds what ``weights`` does, and seed generators and metrics besides.
    """
    if not isinstance(model, keras.Layer):
        return []
    others = {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    return [v.value for v in model.variables if id(v) not in others]


def spread(model: Any, strategy: tf.distribute.Strategy, task: Task) -> None:
    """Gives each replica seeds of its own, worked out from those of the first of all.

    Done once, after the model is made and restored: a new model has the same seeds everywhere,
    and a checkpoint holds those of the chief's first replica; the counters are the same on all.
    """
    for state in generator_states(model):
        own = strategy.experimental_local_results(state)
        first = own[0].numpy()
        for index, replica in enumerate(own, start=task.index * len(own)):
            replica.assign(first + tf.constant([index * _STRIDE, 0], replica.dtype))
