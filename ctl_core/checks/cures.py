"""What is sure to help where a hook raised, said behind what it raised.

Each mistake is told by the words of the exception, and of a loss by the function that raised it;
where those change, the message is the exception's own.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ctl_core.errors import brief
from ctl_core.settings import nearest
from ctl_core.table import DATA_HOOKS

# As many names of a dict are listed.
_MOST = 12


def with_cure(hook: str, error: BaseException) -> str:
    """Returns an exception of a hook in one line, and what helps if that is sure."""
    text = brief(error)
    cure = _in_the_graph(hook, text) or _of_labels(text, error)
    if "A KerasTensor cannot be used" in text or "A KerasTensor is symbolic" in text:
        cure = "use functions of keras.ops, such as keras.ops.sqrt, or a layer of your own"
    return f"{text.rstrip('.')}; {cure}" if cure else text


def names_there(error: BaseException, values: Mapping[str, Any], named: Iterable[str]) -> str:
    """Says what the dicts hold that a hook was given, where it asked for a name that is not there.

    Args:
        error: what the hook raised
        values: by name of the argument
        named: those that the hook names; the batch is described elsewhere

    Returns:
        What to put behind the message, or nothing.
    """
    dicts = {name: values[name] for name in named if name != "batch"}
    dicts = {name: value for name, value in dicts.items() if isinstance(value, dict)}
    if found := re.fullmatch(r"'dict' object has no attribute '(\w+)'", str(error)):
        written = [name for name, value in dicts.items() if found[1] in value]
        return f"; {written[0]} is a dict: {written[0]}['{found[1]}']" if written else ""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    stack = traceback.extract_tb(error.__traceback__)
    if not isinstance(key, str) or "site-packages" in stack[-1].filename:
        return ""
    said = ""
    for name, value in dicts.items():
        if key not in value:
            names = [str(one) for one in value]
            there = ", ".join(names[:_MOST]) + ", …" * (len(names) > _MOST)
            said += f"; {name} has {there}" if names else f"; {name} is empty"
            said += nearest(key, names)
    return said


# What asks Python for a value that a graph does not have yet, and what to do in its place.
_OF_TENSORFLOW = "use functions of TensorFlow, such as tf.reduce_mean or tf.print"
_WITHOUT_VALUES = {
    "symbolic `tf.Tensor` as a Python `bool`": "use tf.where or tf.cond in place of Python's if",
    "Iterating over a symbolic": "use functions of whole tensors, or tf.unstack",
    "Cannot convert a symbolic tf.Tensor": _OF_TENSORFLOW,
    "to SymbolicTensor.__format__": _OF_TENSORFLOW,
}
_NO_ATTRIBUTE = re.compile(r"'SymbolicTensor' object has no attribute '(\w+)'")
# Hooks of the graph in whose place one of the host can do.
_ON_HOST_TOO = {"input_pre", "loss_pre", "grad_pre", "update_pre", "update_post"}


def _in_the_graph(hook: str, text: str) -> str | None:
    """Says what to do in place of Python that asks for a value which a graph does not have yet."""
    cure = next((cure for words, cure in _WITHOUT_VALUES.items() if words in text), None)
    if cure is None and (found := _NO_ATTRIBUTE.search(text)):
        of_arrays = found[1] == "numpy" or hasattr(np.ndarray, found[1])
        cure = _OF_TENSORFLOW if of_arrays else None
    if cure is None:
        return None
    if hook in DATA_HOOKS:
        return f"a function of Dataset.map is part of a graph, which has no values yet: {cure}"
    host = ", or a hook of every_steps, which gets values" * (hook in _ON_HOST_TOO)
    return f"this is part of the graph, which has no values yet: {cure}{host}"


# Shapes in what a loss says of its labels.
_SHAPES = re.compile(r"(?:target|labels)\.shape=\((.*?)\).*(?:output|logits)\.shape=\((.*?)\)")
_SIGMOID = re.compile(r"must have the same shape, received \(\((.*?)\) vs \((.*?)\)\)")
# tf.nn.softmax_cross_entropy_with_logits takes a vector of labels for one row of them.
_SOFTMAX = re.compile(
    r"(?:SoftmaxCrossEntropyWithLogits with input shapes: |logits_size=)\[[^\]]*?(\d+)\],? "
    r"(?:labels_size=)?\[1,(\d+|\?)\]"
)
_ONE_SHAPE = "give both one shape, with labels[:, None] or tf.squeeze(output, -1)"
_EACH = (
    "it takes a label for each output; where an example has one class of several, use "
    "SparseCategoricalCrossentropy"
)


def _of_labels(text: str, error: BaseException) -> str | None:
    """Says which loss takes such labels, where one refuses them."""
    names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if found := _SOFTMAX.search(text):
        return numbers_for_softmax(found[1])
    if "categorical_focal_crossentropy" in names and "Dimensions must be equal" in text:
        return "it takes one-hot labels; make them so, with tf.one_hot(labels, CLASSES)"
    if "'labels' has DataType" in text and "not in list of allowed values: int32, int64" in text:
        return "it takes numbers of classes as integers: tf.cast(labels, tf.int32)"
    if found := _SIGMOID.search(text):
        output = re.findall(r"\w+", found[1])
        return _ONE_SHAPE if output[-1:] == ["1"] else _EACH
    if (found := _SHAPES.search(text)) is None:
        return None
    labels, output = (re.findall(r"\w+", shape) for shape in found.groups())
    to_numbers = "or make them numbers, with tf.argmax(labels, -1)"
    if len(labels) == len(output) and labels[-1:] == output[-1:]:
        if "must have rank (ndim) `target.ndim - 1`" in text:
            return f"one-hot labels are for CategoricalCrossentropy; {to_numbers}"
        if "must equal `logits.shape.rank - 1`" in text:
            loss = "tf.nn.softmax_cross_entropy_with_logits"
            return f"one-hot labels are for {loss}; {to_numbers}"
    if "must equal `logits.shape.rank - 1`" in text and labels[-1:] == ["1"]:
        return "take off the labels' last axis, with tf.squeeze(labels, -1)"
    numbers = len(labels) == len(output) - 1 or (labels[-1:] == ["1"] != output[-1:])
    if "must have the same" not in text or not numbers:
        return None
    if "categorical_crossentropy" in names:
        return (
            "labels that are numbers of classes are for SparseCategoricalCrossentropy; or make "
            f"them one-hot, with tf.one_hot(labels, {output[-1]})"
        )
    if "binary_crossentropy" in names and output[-1] == "1":
        return _ONE_SHAPE
    if "binary_crossentropy" in names:
        return _EACH
    return None


def numbers_for_softmax(classes: object) -> str:
    """Says what helps where ``tf.nn.softmax_cross_entropy_with_logits`` gets numbers of classes."""
    return (
        "labels that are numbers of classes are for "
        "tf.nn.sparse_softmax_cross_entropy_with_logits; or make them one-hot, with "
        f"tf.one_hot(labels, {classes})"
    )
