"""Whether all replicas still have the same variables; asked before each checkpoint.

Each replica works out its own update from the summed gradients, so that all take the same step.
An update that depends on one replica's output or batch lets them drift apart, and a checkpoint
would hold one replica's opinion.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ctl_core.model.state import State
from ctl_core.numerics.variables import variable_name
from ctl_core.run.errors import RunError

_ODD = 0x5851F42D4C957F2D  # any large odd number; spreads neighbouring positions
_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # by size in bytes


class Divergence:
    """Compares the variables over all replicas and processes.

    Costs one pass over the variables and one all-reduce; nothing with a single replica.
    """

    def __init__(self, state: State, variables: Iterable[Any]) -> None:
        """``variables`` must be the same everywhere; those that are numbers are compared."""
        mirrored = [v for v in variables if isinstance(v, tf.distribute.DistributedValues)]
        numbers = [v for v in mirrored if v.dtype.is_floating or v.dtype.is_integer]
        compared = numbers if state.strategy.num_replicas_in_sync > 1 else []
        self._names = [variable_name(variable) for variable in compared]
        self._cluster = state.cluster
        copies = [state.strategy.experimental_local_results(variable) for variable in compared]

        @tf.function(autograph=False)
        def compute_digests() -> list[tf.Tensor]:
            """Returns int64[variables] for each replica of this process."""
            return [tf.stack(list(map(_digest, parts))) for parts in zip(*copies, strict=True)]

        self._compute_digests = compute_digests

    def check(self, step: int) -> None:
        """Raises a RunError that names a variable that is not the same everywhere."""
        if not self._names:
            return
        own = np.array([digests.numpy() for digests in self._compute_digests()])
        everywhere = self._cluster.gather(own.ravel().tolist())
        table = everywhere.reshape(-1, len(self._names))  # [replicas, variables]
        differs = table != table[0]
        if not differs.any():
            return
        raise RunError(
            f"after step {step}, {self._names[differs.any(axis=0).argmax()]} is no longer the same "
            f"on all replicas (replica {differs.any(axis=1).argmax()} differs from replica 0): "
            "something changed it by what only one replica sees, such as output or batch in "
            "update_pre or in an assign of a layer's (use the summed gradients and loss, or "
            "all_reduce it first), or devices of different kinds round differently. Earlier "
            "checkpoints are kept."
        )


def _digest(variable: Any) -> tf.Tensor:
    """Sums up a variable's bits, each element times an odd number of its position, mod 2**64."""
    with tf.device(variable.device):
        value = variable.read_value()
        bits = tf.reshape(tf.cast(tf.bitcast(value, _BITS[value.dtype.size]), tf.int64), [-1])
        factors = tf.range(tf.size(bits, tf.int64)) * _ODD * 2 + 1
        return tf.reduce_sum(bits * factors)
