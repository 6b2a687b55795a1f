"""The weights that a run begins with, where ``init_from`` says which."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from ctl_core.checkpoint.position import UNREADABLE
from ctl_core.checkpoint.record import find_user_part
from ctl_core.checkpoint.source import is_model, read_source
from ctl_core.model.state import State
from ctl_core.numerics.replicas import ReplicaCopies
from ctl_core.numerics.variables import name_variable
from ctl_core.run.console import Console
from ctl_core.run.errors import SetupError, format_error
from ctl_core.run.files import relative_path


def load_initial_weights(state: State, console: Console) -> None:
    """Gives the model of a run that begins the weights of ``init_from``, as they were trained.

    Raises:
        SetupError: they cannot be read, or are not those of the model.
    """
    path = state.config.init_from
    if path is None:
        return
    # Random numbers are of this run's seed.
    with ReplicaCopies(state.strategy, state.recording.generators).put_back_after():
        what = _load_model(state, Path(path)) if is_model(path) else _load_run(state, path)
    if state.average:
        state.average.begin()
    console.say(f"init_from: the weights are those of {what}.")


def _load_model(state: State, path: Path) -> str:
    """Reads a ``.keras`` or ``.weights.h5`` file, or a SavedModel; returns what it is called."""
    model, hook, what = state.train_model, state.hooks.create_model, relative_path(path)
    if not isinstance(model, keras.Model):
        raise SetupError(
            f"init_from: {what} is for a Keras model, and {hook} returns another; take a run."
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
            f"init_from: {what} fits {wanted - len(missing)} of the {wanted} weights of {hook}: "
            f"{', '.join(missing[:5])} are not there. Load what fits in create_model."
        )
    try:
        if values is None:
            model.load_weights(path)
        else:
            for weight in model.weights:
                weight.assign(values[weight.path])
    except Exception as error:
        raise SetupError(f"init_from: {what} does not fit {hook}: {format_error(error)}") from error
    return what


def _read_saved_model(path: Path) -> dict[str, np.ndarray]:
    """Returns what variables hold by name, without names that several have who differ."""
    loaded = tf.saved_model.load(str(path))  # which a view does not hold
    parts = tf.train.TrackableView(loaded).descendants()
    pairs = [(name_variable(p), p.numpy()) for p in parts if isinstance(p, tf.Variable)]
    values = dict(pairs)
    doubtful = {name for name, value in pairs if not np.array_equal(values[name], value)}
    return {name: value for name, value in pairs if name not in doubtful}


def _load_run(state: State, text: str) -> str:
    """Reads the weights of a run's checkpoint, by their place there; returns what it is called."""
    hook = state.hooks.create_model
    source = read_source("init_from", text, state.config.runs_dir)
    step = source.find_steps()[0]
    what = f"{relative_path(source.run)}, step {step}"
    children = tf.train.TrackableView.children(state.ckpt).items()
    model = {n: part for n, part in children if part is state.train_model or n == "train_model"}
    if not model:
        raise SetupError(f"init_from: {state.hooks.create_ckpt} returns no ckpt with train_model.")
    try:
        path = str(find_user_part(source.folder, step))
        tf.train.Checkpoint(**model).read(path).assert_existing_objects_matched()
    except (ValueError, AssertionError, *UNREADABLE) as error:
        raise SetupError(
            f"init_from: {what} does not fit {hook}: {format_error(error)} Load what fits in "
            "create_model."
        ) from error
    return what
