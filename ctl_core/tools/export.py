"""Exporting the model: a SavedModel that serves without this engine or the hooks."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core.step import call_model
from ctl_core.types import Model


def export_model(model: Model, reached: list[Any], input_spec: Any, folder: Path) -> None:
    """Writes the model as a SavedModel, whole or not at all.

    The signature ``serve`` (and ``serving_default``) takes what ``train_model`` takes, any number
    of examples at once, and runs it with ``training=False``.

    Args:
        model: a Keras model, a tf.Module or another callable
        reached: the variables and lookup tables that it reaches
        input_spec: the specification of the model's input while training
        folder: where to write; an earlier export there is replaced
    """
    if isinstance(input_spec, dict):  # the signature's arguments get the names of the inputs
        spec = {name: _any_number(part, name) for name, part in input_spec.items()}
    else:
        spec = tf.nest.map_structure(_any_number, input_spec)
    beside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    if isinstance(model, keras.Layer):
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint(
            "serve", lambda inputs: call_model(model, inputs, training=False), [spec]
        )
        with contextlib.redirect_stdout(io.StringIO()):  # Keras prints its endpoints
            archive.write_out(str(beside), verbose=False)
    else:
        served = tf.Module()  # of its own, with what TensorFlow would not find in the model
        served.reached_by_model = reached
        served.serve = tf.function(
            lambda inputs: call_model(model, inputs, training=False), input_signature=[spec]
        )
        signatures = {"serve": served.serve, "serving_default": served.serve}
        tf.saved_model.save(served, str(beside), signatures)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def _any_number(spec: Any, name: str | None = None) -> Any:
    """Leaves the number of examples open."""
    shape = spec.shape.as_list()
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec([None, *shape[1:]], spec.dtype, spec.ragged_rank)
    return tf.TensorSpec([None, *shape[1:]], spec.dtype, name)
