"""A loss that is of a batch as a whole, not of its examples one by one: said by ``--check``.

Such are negatives out of the batch, or a product of two means that a layer adds. On several
replicas, or of micro-batches, each is of a part, and the run depends on their number unless they
exchange. Nothing tells but the values: of two batches together, and of each alone.
"""

from __future__ import annotations

from typing import Any

from ctl_core.autograph import is_default
from ctl_core.checks.sums import Losses, together, tried
from ctl_core.console import Console
from ctl_core.scratch import Alone
from ctl_core.state import State

# By how much of itself a loss may differ by rounding alone.
_ROUNDING = 1e-4


def check_wholes(state: State, console: Console) -> None:
    """Tries the losses of two batches, each alone and both together, without training.

    What cannot be tried, draws random numbers or exchanges values gives no verdict; all variables
    and the data are as before.

    Args:
        state: of the run
        console: for a warning
    """
    try:
        losses = _try(state)
    except Exception:  # the trial's own: a batch of this size may not do; training says what is
        return
    finally:
        state.renew_input()
    hooks = state.hooks
    own = [] if is_default(hooks.grad_pre.function) else [hooks.grad_pre]
    for hook, what, alone, both in _differing(losses):
        where = (own or [hooks.create_model if hook else hooks.create_loss])[0]
        console.warn(
            f"{where}: {what} is {both:.6g} of two batches together, and {alone:.6g} in the mean "
            "of both: it is of a batch as a whole, so that weights depend on the number of devices "
            "and micro-batches, unless they exchange what it is made of: "
            "ctl_core.all_reduce(x, 'mean'), or ctl_core.all_gather(x)."
        )


class _Noting(Alone):
    """One of two replicas, which notes whether it would exchange anything."""

    exchanged = False
    num_replicas_in_sync = 2

    def merge_call(self, *args: Any, **kwargs: Any) -> Any:
        """Notes it."""
        self.exchanged = True
        return super().merge_call(*args, **kwargs)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Notes it."""
        self.exchanged = True
        return super().all_reduce(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Notes it."""
        self.exchanged = True
        return super().all_gather(*args, **kwargs)


def _try(state: State) -> list[Losses]:
    """Returns the losses of a batch, of the same again, of another, and of both together."""
    one, other = (state.data.untagged(next(state.data.iterator)) for _ in range(2))
    replica = _Noting(state.strategy, state.cluster.task.index * state.data.replicas)
    losses = tried(state, [one, one, other, together(one, other)], replica)
    return [] if replica.exchanged else losses


def _differing(losses: list[Losses]) -> list[tuple[bool, str, float, float]]:
    """Returns, of what differs: whether it is an extra loss, its name, and what it is, as means."""
    if not losses:
        return []
    found = []
    one, again, other, both = losses
    for name in both:
        of = f" of {name!r}" * bool(name)
        for place, what in ((0, f"the loss{of}"), (1, f"what is added to the loss{of}")):
            first, second, third = one[name][place], other[name][place], both[name][place]
            alone = (first + second) / 2
            whole = third if place else third / 2
            largest = max(map(abs, (first, second, whole)))
            if first == again[name][place] and abs(whole - alone) > _ROUNDING * largest:
                found.append((bool(place), what, alone, whole))
    return found
