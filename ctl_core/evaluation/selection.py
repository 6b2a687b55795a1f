"""What an evaluation decides: whether it is the best so far, and whether training ends early.

What is known so far is part of the run's progress, so that a resumed run decides as a whole one
does: by criterion, the best value, its step, and how many evaluations there were since.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from ctl_core.run.errors import SetupError, nearest
from ctl_core.run.settings import Config

# Words in the names of metrics of which it is plain which way is better.
_LOWER = {"loss", "error", "mse", "mae", "rmse", "mape", "perplexity", "divergence", "distance"}
_HIGHER = {"acc", "accuracy", "auc", "precision", "recall", "f1", "iou", "dice", "r2", "score"}

Best = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Criterion:
    """What is better.

    Attributes:
        key: what the progress of a run has it under; another criterion begins anew
        metric: a name of an evaluation's values
        highest: whether more is better
        patience: after how many evaluations without a better value training ends; 0: never
    """

    key: str
    metric: str
    highest: bool
    patience: int = 0

    def judge(self, step: int, values: Mapping[str, float], best: Best) -> str | None:
        """Compares the values of an evaluation with the best so far, which is changed.

        A value that is NaN is no better than any. Returns why training is to end, or None.
        """
        value = values[self.metric]
        worst = -math.inf if self.highest else math.inf
        before, at, since = best.get(self.key, [worst, -1, 0])
        if value > before if self.highest else value < before:
            before, at, since = value, step, -1
        best[self.key] = [before, at, since + 1]
        if not self.patience or since + 1 < self.patience:
            return None
        return (
            f"early_stop: {self.metric} was not better than {before:.4g} (step {at:g}) in "
            f"{self.patience} evaluations."
        )


def read_criteria(config: Config, names: Sequence[str]) -> list[Criterion]:
    """Reads ``keep_best`` and ``early_stop``; ``names`` are those of an evaluation's values.

    Raises:
        SetupError: one names no metric, or it is not clear which way is better.
    """
    criteria = []
    if config.keep_best:
        criteria.append(_read("keep_best", config.keep_best, 0, names))
    if config.early_stop:
        text, _, patience = config.early_stop.rpartition(":")
        criteria.append(_read("early_stop", text, int(patience), names))
    return criteria


def _read(setting: str, text: str, patience: int, names: Sequence[str]) -> Criterion:
    metric, _, mode = text.partition(":")
    if metric not in names:
        there = ", ".join(names) or "none, without create_eval_dataset"
        near = nearest(metric, names)
        raise SetupError(f"{setting}: no metric is called {metric!r}{near} (there: {there})")
    words = set(re.split(r"[/_]", metric))
    mode = mode or ("min" if words & _LOWER else "max" if words & _HIGHER else "")
    if not mode:
        raise SetupError(
            f"{setting}: say whether {metric} is better when it is higher or lower: {metric}:max "
            f"or {metric}:min."
        )
    return Criterion(f"{setting}={metric}:{mode}", metric, mode == "max", patience)


def best_step(best: Mapping[str, list[float]]) -> int:
    """Returns the step of the checkpoint that ``keep_best`` keeps, or -1."""
    steps = [int(step) for key, (_, step, _) in best.items() if key.startswith("keep_best=")]
    return max(steps, default=-1)
