"""Exporting the model: a SavedModel that serves without this engine or the hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.hooks.recording import find_tables
from ctl_core.input.batches import with_rows
from ctl_core.run.errors import SetupError, brief
from ctl_core.serving.inference import LoadedModel, input_names, pack_inputs
from ctl_core.serving.predict import make_dense


def next_version(base: Path) -> Path:
    """Returns the folder of the next version, as TensorFlow Serving counts them: 1, 2, ..."""
    names = [path.name for path in base.iterdir()] if base.is_dir() else []
    return base / str(1 + max((int(name) for name in names if name.isdecimal()), default=0))


def save_model(model: LoadedModel, folder: Path) -> None:
    """Writes a SavedModel, from what a client sends to the output.

    The function ``serve`` takes it in its structure; the signature ``serving_default`` takes it by
    the names of ``input_names`` and returns the output by those that ``predict`` writes.

    Raises:
        SetupError: the model uses something that cannot be saved.
        OSError, tf.errors.OpError: it cannot be written.
    """
    names = input_names(model.input_spec)
    spec = {name: with_rows(part, name=name) for name, part in names.items()}

    @tf.function(autograph=False, input_signature=[spec])
    def by_name(inputs: dict[str, Any]) -> dict[str, Any]:
        return make_dense(model.function(pack_inputs(model.input_spec, inputs)))

    @tf.function(autograph=False, input_signature=[model.input_spec])
    def serve(inputs: Any) -> Any:
        return model.function(inputs)

    module = tf.Module()
    module.variables_of_run = list(model.function.graph.variables)
    module.tables_of_run = find_tables(model.function.graph)
    module.serve = serve
    try:  # Keras' TFSMLayer looks for the second name
        tf.saved_model.save(module, str(folder), {"serving_default": by_name, "serve": by_name})
    except AssertionError as error:
        raise SetupError(
            f"the model uses an object that cannot be saved: {brief(error)}"
        ) from error
