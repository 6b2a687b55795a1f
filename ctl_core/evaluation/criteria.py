"""Decides which evaluation is the best, and whether training ends early."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from ctl_core.run.errors import SetupError, suggest
from ctl_core.run.settings import Config

# Words in the name of a metric that show whether lower or higher values are better.
_MINIMIZED = {"distance", "divergence", "error", "loss", "mae", "mape", "mse", "perplexity", "rmse"}
_MAXIMIZED = {"acc", "accuracy", "auc", "dice", "f1", "iou", "precision", "r2", "recall", "score"}


@dataclasses.dataclass(frozen=True)
class Criterion:
    """Compares evaluations based on a metric, for the setting ``keep_best`` or ``early_stop``.

    Attributes:
        key: the key of the best value in the progress of a run. If a setting changes the key, the
            comparison starts over
        metric: the name of the value to compare
        highest: whether the highest value is the best, rather than the lowest
        patience: the number of evaluations without a better value after which training ends; 0
            means that training never ends early
    """

    key: str
    metric: str
    highest: bool
    patience: int

    def judge(
        self, step: int, values: Mapping[str, float], best: dict[str, list[float]]
    ) -> str | None:
        """Compares an evaluation with the best one so far. NaN is never better.

        Args:
            step: the step of the evaluation
            values: the values of the evaluation by name
            best: for the key of each criterion, a list of the best value, its step, and the number
                of evaluations since that step. The entry of this criterion is updated.

        Returns:
            The reason why training ends; None if training continues.
        """
        sign = 1 if self.highest else -1
        value = values[self.metric]
        best_value, best_step, evaluations = best.get(self.key, [-sign * math.inf, -1, 0])
        if sign * value > sign * best_value:
            best_value = value
            best_step = step
            evaluations = 0
        else:
            evaluations += 1
        best[self.key] = [best_value, best_step, evaluations]
        if self.patience == 0 or evaluations < self.patience:
            return None
        return (
            f"early_stop: {self.metric} was not better than {best_value:.4g} (step "
            f"{best_step:g}) in {self.patience} evaluations."
        )


def read_criteria(config: Config, names: Sequence[str]) -> list[Criterion]:
    """Returns the criteria of the settings ``keep_best`` and ``early_stop``.

    Args:
        config: the settings of the run
        names: the names of the values of an evaluation

    Raises:
        SetupError: a setting names an unknown metric, or the setting does not say whether higher or
            lower values are better and the metric's name does not show it.
    """
    criteria = []
    if config.keep_best:
        metric, *direction = config.keep_best.split(":")
        criteria.append(_create_criterion("keep_best", metric, direction, 0, names))
    if config.early_stop:
        metric, *direction, patience = config.early_stop.split(":")
        criteria.append(_create_criterion("early_stop", metric, direction, int(patience), names))
    return criteria


def _create_criterion(
    setting: str, metric: str, direction: list[str], patience: int, names: Sequence[str]
) -> Criterion:
    """Creates a criterion. ``direction`` is empty if the setting does not specify a direction."""
    if metric not in names:
        known = ", ".join(names) or "none, without create_eval_dataset"
        raise SetupError(
            f"{setting}: there is no metric {metric!r}{suggest(metric, names)} (metrics: {known})"
        )
    mode = direction[0] if direction else _guess_mode(metric)
    if mode is None:
        raise SetupError(
            f"{setting}: it is not known whether a higher {metric} is better; write {metric}"
            f":max or {metric}:min."
        )
    return Criterion(f"{setting}={metric}:{mode}", metric, mode == "max", patience)


def _guess_mode(metric: str) -> str | None:
    """Returns "min" or "max" if a metric's name shows which one is better, and None otherwise."""
    words = set(re.split(r"[/_]", metric))
    if words & _MINIMIZED:
        return "min"
    if words & _MAXIMIZED:
        return "max"
    return None
