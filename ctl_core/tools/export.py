"""Exporting the model: a SavedModel that serves without this engine or the hooks."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ctl_core.errors import SetupError
from ctl_core.files import from_here, written_whole
from ctl_core.settings import shown
from ctl_core.step import call_model
from ctl_core.types import Model

# What a SavedModel is made of.
_PARTS = {"saved_model.pb", "fingerprint.pb", "variables", "assets", "assets.extra"}


def export_model(model: Model, reached: list[Any], input_spec: Any, folder: Path) -> None:
    """Writes the model as a SavedModel, whole or not at all.

    The signature ``serve`` (and ``serving_default``) takes what ``train_model`` takes, any number
    of examples at once, and runs it with ``training=False``.

    Args:
        model: a Keras model, a tf.Module or another callable
        reached: the variables and lookup tables that it reaches
        input_spec: the specification of the model's input while training
        folder: where to write; an earlier export there is replaced

    Raises:
        OSError, tf.errors.OpError: it cannot be written.
    """
    if isinstance(input_spec, dict):  # the signature's arguments get the names of the inputs
        spec = {name: _any_number(part, name) for name, part in input_spec.items()}
    else:
        spec = tf.nest.map_structure(_any_number, input_spec)
    with written_whole(folder, folder=True) as beside:
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


def check_replaceable(folder: Path) -> None:
    """Refuses to replace what is there unless it is an export, or an empty folder.

    Raises:
        SetupError: it is something else.
    """
    if folder.is_symlink() or not folder.exists():  # a link is replaced, not what it leads to
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    others = sorted(names - _PARTS)
    if others:
        raise SetupError(
            f"output: {from_here(folder)} holds what is no export ({shown(others[0])}) and would "
            "be lost; name another folder by --output."
        )


def _any_number(spec: Any, name: str | None = None) -> Any:
    """Leaves the number of examples open."""
    shape = spec.shape.as_list()
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec([None, *shape[1:]], spec.dtype, spec.ragged_rank)
    return tf.TensorSpec([None, *shape[1:]], spec.dtype, name)
