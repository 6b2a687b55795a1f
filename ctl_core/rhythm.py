"""How often something is due, and for how long: in steps, epochs or time on the clock."""

from __future__ import annotations

import re
import time

from ctl_core.errors import SetupError
from ctl_core.settings import EPOCHS, Config, seconds_in


def in_steps(setting: str, value: int | str, steps_per_epoch: int | None) -> int:
    """Returns a period in steps; 0 for one of time, and for none.

    Args:
        setting: whose value it is, for a message
        value: steps, ``2epochs`` or ``10min``
        steps_per_epoch: None if the data have no end

    Raises:
        SetupError: there are no epochs.
    """
    if isinstance(value, int):
        return value
    if not (epochs := re.fullmatch(EPOCHS, value)):
        return 0
    if steps_per_epoch is None:
        raise SetupError(
            f"{setting}: create_dataset or make_batches gives an endless dataset, which has no "
            "epochs; say how many steps, or how many minutes."
        )
    return int(epochs[1]) * steps_per_epoch


class Deadlines:
    """When the clock says that a checkpoint is due, or the end of training."""

    def __init__(self, config: Config) -> None:
        self._period = seconds_in(config.ckpt_every)
        self._end = seconds_in(config.max_time)
        self._start = self._saved = time.monotonic()

    def save_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self._period is not None and time.monotonic() - self._saved >= self._period

    def saved(self) -> None:
        """Begins the next period."""
        self._saved = time.monotonic()

    def over(self) -> bool:
        """Whether it is time to end."""
        return self._end is not None and time.monotonic() - self._start >= self._end
