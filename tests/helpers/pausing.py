"""A program that pauses after each step, so that a test can kill it at a chosen moment."""

from tests.golden import small

# The model has noise. The hyperparameter "pause" is the number of seconds to wait after each step.
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
