"""A program that pauses after each step, so that a test can kill it at a moment of its choice."""

from tests.golden import small

# With noise; ``--hparams.pause`` is the time after each step (seconds).
PAUSING = (
    small.CALLBACKS
    + """
import time

import ctl_core


def create_model():
    return small.model_with(keras.layers.Dropout(0.5))


def look(step, loss, hparams):
    ctl_core.report(step, loss=loss)
    time.sleep(hparams.get("pause", 0.0))


every_steps = {1: look}
"""
)
