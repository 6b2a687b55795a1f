"""What an evaluation decides: whether it is the best so far, and whether training ends early.

Both follow one metric. What they know of it (its best value, at which step that was, and how many
evaluations ago) is part of the run's progress, so that a resumed run decides as a whole one does.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from ctl_core.errors import SetupError
from ctl_core.settings import Config, nearest

KEEP_BEST, EARLY_STOP = "keep_best", "early_stop"
# Names of metrics of which it is plain which way is better.
_LOWER = re.compile(r"(^|_)(loss|error|mse|mae|rmse|mape|perplexity|divergence|distance)($|_)")
_HIGHER = re.compile(
    r"(^|_)(acc|accuracy|auc|precision|recall|f1|iou|dice|r2|score|map|ndcg|psnr|ssim|bleu)($|_|\d)"
)


@dataclasses.dataclass(frozen=True)
class Criterion:
    """What is better.

    Attributes:
        setting: the setting that says so
        metric: a name of an evaluation's values
        highest: whether more is better
        patience: after how many evaluations without a better value training ends; 0: never
    """

    setting: str
    metric: str
    highest: bool
    patience: int = 0

    @property
    def key(self) -> str:
        """What the progress of a run has it under; another criterion begins anew."""
        return f"{self.setting}={self.metric}:{'max' if self.highest else 'min'}"


class Selection:
    """The criteria of a run."""

    def __init__(self, config: Config, names: list[str] | None) -> None:
        """Reads the settings.

        Args:
            config: of the run
            names: of an evaluation's values; None if there is no evaluation

        Raises:
            SetupError: a setting names no metric, or it is not clear which way is better.
        """
        settings = {KEEP_BEST: config.keep_best, EARLY_STOP: config.early_stop}
        self._criteria = [
            _criterion(setting, text, names) for setting, text in settings.items() if text
        ]

    def judge(
        self, step: int, values: Mapping[str, float], best: dict[str, list[float]]
    ) -> str | None:
        """Compares an evaluation with the best so far.

        Args:
            step: it was made after
            values: by metric; one that is NaN is no better than any
            best: by ``Criterion.key``, the best value, its step, and how many evaluations there
                were since; changed here

        Returns:
            Why training is to end, or None.
        """
        why = None
        for criterion in self._criteria:
            value, (before, at, since) = (
                values[criterion.metric],
                best.get(criterion.key, [-math.inf if criterion.highest else math.inf, -1, 0]),
            )
            better = value > before if criterion.highest else value < before
            best[criterion.key] = [value, step, 0] if better else [before, at, since + 1]
            if criterion.patience and best[criterion.key][2] >= criterion.patience:
                known = f"{before:.4g} of step {at}" if at >= 0 else "there is none yet"
                why = (
                    f"early_stop: {criterion.metric} was not better than {known} in "
                    f"{criterion.patience} evaluation{'s' * (criterion.patience > 1)}."
                )
        return why

    def go_on(self, best: dict[str, list[float]]) -> None:
        """Forgets how long ago the best values were: training goes on after an early stop."""
        for criterion in self._criteria:
            if criterion.patience and criterion.key in best:
                best[criterion.key][2] = 0


def best_step(best: Mapping[str, list[float]]) -> int:
    """Returns the step of the checkpoint that ``keep_best`` keeps, or -1."""
    steps = [int(step) for key, (_, step, _) in best.items() if key.startswith(f"{KEEP_BEST}=")]
    return max(steps, default=-1)


def _criterion(setting: str, text: str, names: list[str] | None) -> Criterion:
    if names is None:
        raise SetupError(f"{setting}: needs an evaluation; write create_eval_dataset.")
    patience = 0
    if setting == EARLY_STOP:
        text, _, number = text.rpartition(":")
        patience = int(number)
    said = text.endswith((":max", ":min"))
    metric, _, mode = text.rpartition(":") if said else (text, "", "")
    # Of several sets of evaluation data, values are called NAME/loss.
    meant = [name for name in names if name.partition("/")[2] == metric]
    if metric not in names and len(meant) > 1:
        raise SetupError(
            f"{setting}: {metric!r} is measured on several sets, so name one of {', '.join(meant)}."
        )
    metric = meant[0] if metric not in names and meant else metric
    if metric not in names:
        raise SetupError(
            f"{setting}: no metric is called {metric!r}{nearest(metric, names)} (there: "
            f"{', '.join(names)})"
        )
    return Criterion(setting, metric, _is_highest(setting, metric, mode), patience)


def _is_highest(setting: str, metric: str, mode: str) -> bool:
    """Whether more of a metric is better, as ``mode`` or its name says.

    Raises:
        SetupError: neither does.
    """
    if not mode:
        plain = metric.rpartition("/")[2]
        mode = "min" if _LOWER.search(plain) else "max" if _HIGHER.search(plain) else ""
    if not mode:
        raise SetupError(
            f"{setting}: say whether {metric} is better when it is higher or lower: {metric}:max "
            f"or {metric}:min."
        )
    return mode == "max"
