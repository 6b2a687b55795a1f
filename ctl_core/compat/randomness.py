"""Wraps private APIs for random numbers, determinism, and the names of Keras objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
from keras.src.backend.common import global_state
from tensorflow.python.eager import context
from tensorflow.python.util import _pywrap_determinism

from ctl_core.compat.patches import Scope, set_attributes


def is_op_determinism_enabled() -> bool:
    """Returns whether ops are deterministic."""
    return bool(_pywrap_determinism.is_enabled())


@contextlib.contextmanager
def keep_op_determinism() -> Iterator[None]:
    """Restores, when the context ends, whether ops are deterministic.

    The public API of TensorFlow can only enable determinism, and cannot disable it again.
    """
    before = is_op_determinism_enabled()
    try:
        yield
    finally:
        _pywrap_determinism.enable(before)


def get_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the default generator of ``keras.random``, which is used when no seed is passed.

    Returns None if ``keras.random`` has not used the generator yet.
    """
    generator: keras.random.SeedGenerator | None
    generator = global_state.get_global_attribute("global_seed_generator")
    return generator


def draw_from(generator: keras.random.SeedGenerator | None) -> Scope:
    """Makes ``keras.random`` in this thread draw from a generator if no seed is passed."""
    return set_attributes(global_state.GLOBAL_STATE_TRACKER, global_seed_generator=generator)


def keep_op_seed() -> Scope:
    """Undoes ``tf.random.set_seed`` when the context ends.

    Eager random ops then continue as if the function had not been called.
    """
    process_context = context.context()
    generator = getattr(process_context, "_rng", None)
    return set_attributes(process_context, _seed=process_context._seed, _rng=generator)


def is_keras_generator(name: str) -> bool:
    """Returns whether a variable of this name is the state of a ``keras.random.SeedGenerator``."""
    return name.split(":")[0].endswith("seed_generator_state")


def is_tf_generator(name: str) -> bool:
    """Returns whether a variable of this name is the state of a ``tf.random.Generator``.

    Args:
        name: the name of the variable in a ``Recording``, such as ``create_model/StateVar``
    """
    return "/StateVar" in name


def name_anew() -> Scope:
    """Makes Keras name objects as in a new process. Afterwards, the earlier numbering continues.

    This does not call ``keras.utils.clear_session``, because it would reset more than the names.
    """
    return set_attributes(global_state.GLOBAL_STATE_TRACKER, object_name_uids=None)
