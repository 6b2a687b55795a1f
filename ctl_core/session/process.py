"""Sets the global state of TensorFlow and Keras for a run, and restores it afterwards."""

import contextlib
import linecache
from collections.abc import Iterator

import keras
import tensorflow as tf

from ctl_core import compat
from ctl_core.cluster.collectives import count_logical_replicas
from ctl_core.cluster.exchange import decode_sum, encode_for_sum
from ctl_core.hooks.recording import record_nothing
from ctl_core.numerics.randomness import keep_seeds
from ctl_core.run.settings import Config

# Keras' dtype policy outside the run that is being built or trained; None if there is no run.
_policy_outside: keras.DTypePolicy | None = None


@contextlib.contextmanager
def leave_run() -> Iterator[None]:
    """Lets a hook use another run as if the hook's own run did not exist.

    Inside the context, Keras has the same dtype policy as outside any run and names objects as in a
    new process. No variable or layer is recorded. When the context ends, the following are
    restored:

    - the dtype policy, the names of objects, and the generator of ``keras.random``
    - the state of the random numbers of Python, NumPy and TensorFlow
    - whether ops are deterministic, and whether a GPU may round float32 matrices to TF32 before it
      multiplies them
    - the recording of variables, of layers, and of layers that importing callbacks.py creates

    Graphs that were traced inside the context are deleted when nothing uses them any more, even if
    they use a ``tf.custom_gradient``.

    ``session.run.open_session`` restores the console and the step of summaries. ``Signals``
    restores the signal handlers.
    """
    global _policy_outside
    # AutoGraph reads the source of functions from this cache, which may have an older content of a
    # file that was changed since then, for example in a notebook.
    linecache.checkcache()
    policy = keras.config.dtype_policy()
    outside = _policy_outside
    if outside is not None:
        keras.config.set_dtype_policy(outside)
    _policy_outside = None
    try:
        with (
            keep_seeds(),
            compat.draw_from(None),
            compat.name_anew(),
            compat.keep_op_determinism(),
            compat.release_custom_gradients(),
            keep_tensor_float_32(),
            record_nothing(),
            count_logical_replicas(None),
        ):
            yield
    finally:
        _policy_outside = outside
        keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def keep_tensor_float_32() -> Iterator[None]:
    """Restores, when the context ends, whether a GPU may use TF32 for matrix products."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


@contextlib.contextmanager
def prepare_process(config: Config) -> Iterator[None]:
    """Sets up Keras and TensorFlow for a run, so that the run trains as in a new process.

    When the context ends, the state of Keras and TensorFlow is restored, even if a hook has set
    another dtype policy. See ``leave_run`` for a list.
    """
    global _policy_outside
    with leave_run():
        _policy_outside = keras.config.dtype_policy()
        if config.precision != "float32":
            keras.config.set_dtype_policy(f"mixed_{config.precision}")
        compat.keep_large_sums_whole()
        if config.deterministic or config.logical_replicas is not None:
            tf.config.experimental.enable_op_determinism()
        if config.logical_replicas is not None:
            # With TF32, a GPU may choose another kernel for the same shapes, which rounds
            # differently.
            tf.config.experimental.enable_tensor_float_32_execution(False)
        with (
            compat.separate_losses(),
            compat.note_interleave_order(),
            compat.convert_variables(),
            compat.broadcast_any_dtype(encode_for_sum, decode_sum),
            compat.let_sizes_vary(),
            count_logical_replicas(config.logical_replicas),
        ):
            yield
