"""What a run changes in its process, put back at its end: in a notebook, another run may follow.

That trains as it would in a process of its own. The seeds are set anew by each run; signal
handlers are the part of cluster/signals.py, log and summaries that of run/.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ctl_core.compat import (
    drawing_from,
    global_seed_generator,
    large_sums_whole,
    losses_apart,
    names_anew,
    op_determinism,
    seed_of_ops_kept,
)
from ctl_core.numerics.precision import policy
from ctl_core.settings import Config


@contextmanager
def process_state(config: Config) -> Iterator[None]:
    """Within, Keras' dtype policy, its names and op determinism are as the run needs them."""
    deterministic = op_determinism(config.deterministic)
    with policy(config.precision), names_anew(), losses_apart(), large_sums_whole(), deterministic:
        yield


@contextmanager
def seeds_kept() -> Iterator[None]:
    """Afterwards, what Python, NumPy, TensorFlow and Keras draw is as if nothing were done within.

    That may set other seeds, and has to, if it draws from TensorFlow or Keras.
    """
    before = random.getstate(), np.random.get_state()
    try:
        with drawing_from(global_seed_generator()), seed_of_ops_kept():
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
