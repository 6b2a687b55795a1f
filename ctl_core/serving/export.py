"""Exporting the model: a SavedModel that serves without this engine or the hooks."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.compat import with_called
from ctl_core.errors import SetupError
from ctl_core.nested import any_number, input_names, structured
from ctl_core.serving.inference import Inference
from ctl_core.serving.predict import make_dense
from ctl_core.source_lines import frames_of


def next_version(base: Path) -> Path:
    """Returns the folder of the next version, as TensorFlow Serving counts them: 1, 2, ..."""
    names = [path.name for path in base.iterdir()] if base.is_dir() else []
    versions = [int(name) for name in names if re.fullmatch("[0-9]{1,18}", name)]
    return base / str(max(versions, default=0) + 1)


def save_model(inference: Inference, folder: Path) -> None:
    """Writes a SavedModel, from what a client sends to the output.

    The function ``serve`` takes it in its structure; the signature ``serving_default`` takes it by
    the names of ``input_names`` and returns the output by those that ``predict`` writes.

    Raises:
        SetupError: the model uses something that cannot be saved.
        OSError, tf.errors.OpError: it cannot be written.
    """
    names = input_names(inference.input_spec)
    spec = {name: any_number(part, name) for name, part in names.items()}

    @tf.function(autograph=False, input_signature=[spec])
    def by_name(inputs: dict[str, Any]) -> dict[str, Any]:
        return make_dense(inference.run(structured(inference.input_spec, inputs)))

    module = tf.Module()
    module.variables_of_run = list(inference.run.graph.variables)
    module.tables_of_run = find_tables(inference.run.graph)
    module.serve = tf.function(
        lambda inputs: inference.run(inputs),
        autograph=False,
        input_signature=[inference.input_spec],
    )
    try:
        signatures = {"serving_default": by_name, "serve": by_name}
        tf.saved_model.save(module, str(folder), signatures)
    except AssertionError as error:  # a resource of another kind
        raise SetupError(describe_resource(inference)) from error


def find_tables(graph: Any) -> list[Any]:
    """Returns the tables that a graph captures, wherever hooks, or their file, have made them."""
    captured = {id(outer) for outer, _ in graph.captures}
    kind = tf.saved_model.experimental.TrackableResource
    tables = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    return [one for one in tables if id(one.resource_handle) in captured]


def describe_resource(inference: Inference) -> str:
    """Says which hook uses something that no SavedModel can hold, by the op that takes it."""
    for op in with_called(inference.run.graph.get_operations()):
        held = op.type.startswith(("ReadVariable", "Lookup", "ResourceGather"))
        if not held and any(one.dtype == tf.resource for one in op.inputs):
            frames = frames_of(op)
            if made := inference.parts.hooks.made(frames):
                return (
                    f"{made}: {op.type} uses an object that cannot be saved; leave it out, or make "
                    "it a variable, a table or a layer."
                )
    return f"{inference.hook}: uses an object that cannot be saved."
