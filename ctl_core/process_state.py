"""What a run changes in its process, put back at its end: in a notebook, another run may follow.

That trains as it would in a process of its own. The seeds are set anew by each run; signal
handlers are the part of cluster/signals.py, log and summaries that of run_folder.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ctl_core.compat import large_sums_whole, names_anew, op_determinism
from ctl_core.numerics.precision import policy
from ctl_core.settings import Config


@contextmanager
def process_state(config: Config) -> Iterator[None]:
    """Within, Keras' dtype policy, its names and op determinism are as the run needs them."""
    deterministic = op_determinism(config.deterministic)
    with policy(config.precision), names_anew(), large_sums_whole(), deterministic:
        yield
