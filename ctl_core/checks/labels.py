"""Labels that a metric of classes takes for something else: refused before training.

``CategoricalAccuracy`` of labels that are numbers is a number between 0 and 1 all the same.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ctl_core.hooks import Hook

# Metrics of one-hot labels, and those that take numbers of classes in their place.
_OF_ONE_HOT: dict[type, str] = {
    keras.metrics.CategoricalAccuracy: "SparseCategoricalAccuracy",
    keras.metrics.TopKCategoricalAccuracy: "SparseTopKCategoricalAccuracy",
}
_OF_NUMBERS: dict[type, str] = {
    keras.metrics.SparseCategoricalAccuracy: "CategoricalAccuracy",
    keras.metrics.SparseTopKCategoricalAccuracy: "TopKCategoricalAccuracy",
}
# Those that compare each output with a label of its own.
_OF_EACH = (keras.metrics.Accuracy, keras.metrics.BinaryAccuracy)


def check_labels(made_by: Hook, name: str, metric: keras.Metric, arguments: Any) -> None:
    """Refuses labels whose shape only fits another metric.

    Args:
        made_by: the hook that made the metric
        name: of the metric
        metric: it is told by its class; those of a user's own are let be
        arguments: of its ``update_state``

    Raises:
        SetupError: numbers of classes for a metric of one-hot labels, or the other way round.
    """
    if not isinstance(arguments, tuple | list) or len(arguments) < 2:
        return
    if not all(tf.is_tensor(value) for value in arguments[:2]):
        return
    labels, output = (value.shape for value in arguments[:2])
    if labels.rank is None or not output.rank or (output[-1] or 0) < 2:
        return
    kind = type(metric)
    fewer, alike = labels.rank == output.rank - 1, labels.rank == output.rank
    if kind in _OF_ONE_HOT and (fewer or (alike and labels[-1] == 1)):
        takes, got, other = "one-hot labels", "numbers of classes", _OF_ONE_HOT[kind]
    elif kind in _OF_NUMBERS and alike and labels[-1] == output[-1]:
        takes, got, other = "numbers of classes", "one-hot labels", _OF_NUMBERS[kind]
    elif kind in _OF_EACH and fewer and labels.rank and labels[-1] != output[-1]:
        takes, got = "a label for each output", "numbers of classes"
        other = "SparseCategoricalAccuracy"
    else:
        return
    raise made_by.reject(
        f"'{name}' is a keras.metrics.{kind.__name__}, which takes {takes}, but gets {got}: labels "
        f"of shape {labels} for outputs of shape {output}; use keras.metrics.{other}."
    )
