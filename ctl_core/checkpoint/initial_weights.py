"""The weights that a run starts with if ``init_from`` names a run, a Keras file or a SavedModel."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl_core.checkpoint.position import UNREADABLE
from ctl_core.checkpoint.record import find_user_part
from ctl_core.checkpoint.source import is_model, read_source
from ctl_core.compat import read_object_graph
from ctl_core.hooks.hooks import Hook
from ctl_core.numerics.variables import make_trackable, name_variable
from ctl_core.run.errors import SetupError, format_error
from ctl_core.run.files import relative_path
from ctl_core.run.settings import Config
from ctl_core.types import Model


def load_initial_weights(model: Model, hook: Hook, config: Config) -> str:
    """Loads the weights that ``init_from`` names into the variables of a model.

    In a cluster, every process loads them for its own replicas.

    Args:
        model: a model whose variables exist
        hook: the hook that created the model, for messages
        config: the settings, with ``init_from``

    Returns:
        A description of the source.

    Raises:
        SetupError: the weights cannot be read, or they do not fit the model.
    """
    assert config.init_from is not None
    path = Path(config.init_from)
    if is_model(config.init_from):
        return _load_model(model, hook, path)
    return _load_run(model, hook, config.init_from, config.runs_dir)


def _load_model(model: Model, hook: Hook, path: Path) -> str:
    """Loads a ``.keras`` or ``.weights.h5`` file, or a SavedModel; returns its description."""
    source = relative_path(path)
    if not isinstance(model, keras.Model):
        raise SetupError(
            f"init_from: {source} is for a Keras model, and {hook} returns another; take a run."
        )
    # Keras' files hold a kernel with its adapter added up, and reading one makes both matrices of
    # the adapter 0, of which no gradient would ever move any.
    adapters = ("lora_kernel_", "lora_embeddings_")
    missing = [weight.path for weight in model.weights if weight.name.startswith(adapters)]
    values = None
    if path.is_dir():
        values = _read_saved_model(path)
        missing = [weight.path for weight in model.weights if weight.path not in values]
    if missing:
        wanted = len(model.weights)
        raise SetupError(
            f"init_from: {source} fits {wanted - len(missing)} of the {wanted} weights of {hook}: "
            f"{', '.join(missing[:5])} are not there. Load what fits in create_model."
        )
    try:
        if values is None:
            model.load_weights(path)
        else:
            for weight in model.weights:
                weight.assign(values[weight.path])
    except Exception as error:
        raise SetupError(
            f"init_from: {source} does not fit {hook}: {format_error(error)}"
        ) from error
    return source


def _read_saved_model(path: Path) -> dict[str, np.ndarray]:
    """Returns the values of the variables by name, except where variables of one name differ.

    Raises:
        SetupError: the SavedModel cannot be read.
    """
    try:
        loaded = tf.saved_model.load(str(path))  # kept in a variable, since a view does not hold it
        parts = tf.train.TrackableView(loaded).descendants()
        pairs = [(name_variable(p), p.numpy()) for p in parts if isinstance(p, tf.Variable)]
    except (OSError, *UNREADABLE) as error:
        raise SetupError(
            f"init_from: {relative_path(path)} cannot be read: {format_error(error)}"
        ) from error
    values = dict(pairs)
    doubtful = {name for name, value in pairs if not np.array_equal(values[name], value)}
    return {name: value for name, value in pairs if name not in doubtful}


def _load_run(model: Model, hook: Hook, text: str, runs_dir: str) -> str:
    """Loads the model in a checkpoint of a run; returns the description of the checkpoint."""
    run = read_source("init_from", text, runs_dir)
    step = run.find_steps()[0]
    source = f"{relative_path(run.run)}, step {step}"
    trackable = make_trackable(model)
    try:
        checkpoint = str(find_user_part(run.folder, step))
        name = _find_model(trackable, checkpoint, source)
        tf.train.Checkpoint(**{name: trackable}).read(checkpoint).assert_existing_objects_matched()
    except (ValueError, AssertionError, *UNREADABLE) as error:
        raise SetupError(
            f"init_from: {source} does not fit {hook}: {format_error(error)} Load what fits in "
            "create_model."
        ) from error
    return source


def _find_model(trackable: Any, checkpoint: str, source: str) -> str:
    """Returns the name under which the ``create_ckpt`` of another run saved the model.

    Raises:
        SetupError: no object or several objects of the checkpoint have the variables of the model.
    """
    objects = read_object_graph(checkpoint)
    names = sorted(name for name in objects[0] if not name.startswith("_"))
    if "train_model" in names:
        return "train_model"
    fitting = [
        name for name in names if _has_variables(trackable, objects[0][name], objects, set())
    ]
    if not fitting:
        raise SetupError(
            f"init_from: {source} holds {', '.join(names)}, of which none has the variables of "
            "train_model; load what fits in create_model."
        )
    if len(fitting) > 1:
        raise SetupError(
            f"init_from: {source} holds several models that fit: {', '.join(fitting)}; "
            "load one in create_model by tf.train.Checkpoint(NAME=model).read(...)."
        )
    return fitting[0]


def _has_variables(
    trackable: Any, position: int, objects: list[dict[str, int]], seen: set[int]
) -> bool:
    """Returns whether a saved object has, at the same paths, all the variables of another one.

    Args:
        trackable: the object with variables
        position: the position of the saved object in ``objects``
        objects: the objects of the checkpoint, see ``compat.read_object_graph``
        seen: the ids of the parts of ``trackable`` that were compared before; they are added to
    """
    saved = objects[position]
    for name, child in tf.train.TrackableView.children(trackable).items():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if name in saved:
            if not _has_variables(child, saved[name], objects, seen):
                return False
        elif any(map(_is_variable, tf.train.TrackableView(child).descendants())):
            return False
    return True


def _is_variable(part: Any) -> bool:
    return isinstance(part, tf.Variable | keras.Variable)
