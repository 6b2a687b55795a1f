"""Private names of random numbers, of determinism and of the names that Keras gives."""

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
    """Restores afterwards whether ops are deterministic: TensorFlow itself only switches it on."""
    before = is_op_determinism_enabled()
    try:
        yield
    finally:
        _pywrap_determinism.enable(before)


def get_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the generator that ``keras.random`` draws from without a seed, if it has drawn."""
    return global_state.get_global_attribute("global_seed_generator")


def draw_from(generator: keras.random.SeedGenerator | None) -> Scope:
    """Makes ``keras.random`` draw from a generator, in this thread, where it gets no seed."""
    return set_attributes(global_state.GLOBAL_STATE_TRACKER, global_seed_generator=generator)


def keep_op_seed() -> Scope:
    """Undoes ``tf.random.set_seed`` afterwards: eager random ops continue as without it."""
    process_context = context.context()
    generator = getattr(process_context, "_rng", None)
    return set_attributes(process_context, _seed=process_context._seed, _rng=generator)


def is_keras_generator(name: str) -> bool:
    """Returns whether a variable of this name is the state of a ``keras.random.SeedGenerator``."""
    return name.split(":")[0].endswith("seed_generator_state")


def is_tf_generator(name: str) -> bool:
    """Returns whether a variable of this name is the state of a ``tf.random.Generator``.

    The name is that of a recording, such as ``create_model/StateVar``.
    """
    return "/StateVar" in name


def name_anew() -> Scope:
    """Makes Keras name objects as in a new process; afterwards, names continue as without it.

    ``keras.utils.clear_session`` would reset more than names.
    """
    return set_attributes(global_state.GLOBAL_STATE_TRACKER, object_name_uids=None)
