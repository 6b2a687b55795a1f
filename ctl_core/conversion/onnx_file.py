"""Converts a function to a file of ONNX, with tf2onnx."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.conversion.file_function import FileFunction, NotConvertible
from ctl_core.conversion.ops import describe_ops
from ctl_core.hooks.hooks import Hooks
from ctl_core.run.errors import format_error
from ctl_core.run.output import silence_stderr
from ctl_core.serving import name_entries


def convert_to_onnx(function: FileFunction, hooks: Hooks, opset: int) -> bytes:
    """Returns the content of an ONNX file, which takes any number of examples.

    Args:
        function: what the file computes
        hooks: the hooks of the run, for messages
        opset: the version of ONNX's operators

    Raises:
        NotConvertible: ONNX lacks an op, or tf2onnx cannot convert it.
    """
    tf2onnx: Any = importlib.import_module("tf2onnx")
    named = name_entries(function.function, function.spec)

    # tf2onnx would name the entries of a dict after the dict, too.
    def compute(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        return named.function(dict(zip(named.spec, tensors, strict=True)))

    traced = tf.function(compute, autograph=False)
    graph = traced.get_concrete_function(*named.spec.values()).graph
    with _silence_logs(), silence_stderr():
        try:
            model, _ = tf2onnx.convert.from_function(
                traced,
                input_signature=list(named.spec.values()),
                opset=opset,
                custom_op_handlers={"Erfc": (_convert_erfc, [])},
            )
        except Exception as error:
            raise NotConvertible(f"tf2onnx fails: {format_error(error)}") from error
    missing = sorted(set(_list_unknown_ops(model.graph, opset)))
    if missing:
        raise NotConvertible(f"ONNX cannot express {describe_ops(missing, graph, hooks)}")
    content: bytes = model.SerializeToString()
    return content


def _convert_erfc(context: Any, node: Any, name: str, _: Any) -> None:
    """Replaces Erfc, which the exact ``gelu`` uses and ONNX lacks: it is 1 - Erf."""
    helper: Any = importlib.import_module("tf2onnx.utils")
    dtype = helper.map_onnx_to_numpy_type(context.get_dtype(node.output[0]))
    one = context.make_const(helper.make_name(name), np.ones((), dtype))
    erf = context.make_node("Erf", [node.input[0]])
    shape, kind = context.get_shape(node.output[0]), context.get_dtype(node.output[0])
    context.copy_shape(node.output[0], erf.output[0])
    context.set_dtype(erf.output[0], kind)
    context.remove_node(node.name)
    context.make_node(
        "Sub", [one.output[0], erf.output[0]], outputs=node.output, name=name, shapes=[shape],
        dtypes=[kind],
    )  # fmt: skip


def _list_unknown_ops(graph: Any, opset: int) -> Iterator[str]:
    """Yields the types of a graph's nodes that are no operators of ONNX.

    tf2onnx keeps ops that it cannot convert, under their name in TensorFlow.
    """
    onnx: Any = importlib.import_module("onnx")
    for node in graph.node:
        is_known = node.domain == "ai.onnx.ml"
        if node.domain in ("", "ai.onnx"):
            is_known = onnx.defs.has(node.op_type, opset, "")
        if not is_known:
            yield node.op_type
        for attribute in node.attribute:
            if attribute.HasField("g"):  # the body of a loop or a condition
                yield from _list_unknown_ops(attribute.g, opset)


@contextmanager
def _silence_logs() -> Iterator[None]:
    """Drops all log messages: tf2onnx warns of what the file shows, also by the root logger."""
    handlers = list(logging.root.handlers)
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)
        logging.root.handlers[:] = handlers  # ``logging.warning`` adds one
