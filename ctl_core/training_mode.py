"""Whether layers run as in training: those of the model, and those that hooks call.

A Keras layer that is called from outside of any other, and is not told, runs as its own ``call``
has it: Dropout and batch normalisation as in inference, random augmentation as in training. Here it
runs as the model does.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import keras

from ctl_core.compat import layers_run


def inference() -> contextlib.AbstractContextManager[None]:
    """Within, layers run with ``training=False`` unless told otherwise."""
    return layers_run(training=False)


def call_model(model: Any, inputs: Any, training: bool) -> Any:
    """Calls the model; with ``training`` run also layers that it is a function around."""
    with layers_run(training):
        return call(model, inputs, training)


def call(function: Any, inputs: Any, training: bool) -> Any:
    """Calls a model, or a loss, with ``training`` where it takes that argument."""
    if isinstance(function, keras.Layer) or "training" in _parameters(function):
        return function(inputs, training=training)
    return function(inputs)


def _parameters(function: Any) -> Any:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin has none to read
        return ()
