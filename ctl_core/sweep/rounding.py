"""Values that Optuna draws, rounded: a table of runs can be read, and a run typed in again.

They are rounded within the sampler, so that what is trained is what Optuna knows and best.yaml has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Significant digits; more where a range is so narrow that it would have few values.
_DIGITS = 4


def rounding(kind: Any) -> Any:
    """Returns a kind of Optuna sampler whose floats are rounded."""

    class Rounding(kind):  # type: ignore[misc]
        def sample_independent(
            self, study: Any, trial: Any, param_name: str, param_distribution: Any
        ) -> Any:
            value = super().sample_independent(study, trial, param_name, param_distribution)
            return rounded(value, param_distribution)

        def sample_relative(
            self, study: Any, trial: Any, search_space: Mapping[str, Any]
        ) -> dict[str, Any]:
            found = super().sample_relative(study, trial, search_space)
            return {name: rounded(value, search_space[name]) for name, value in found.items()}

    return Rounding


def rounded(value: Any, distribution: Any) -> Any:
    """Returns a float of a range without steps rounded, and within the range; else the value."""
    if not isinstance(value, float) or getattr(distribution, "step", 1) is not None:
        return value
    low, high = distribution.low, distribution.high
    if not low < high:
        return value
    narrow = math.log10(max(abs(low), abs(high)) / (high - low))
    digits = _DIGITS + max(0, math.floor(narrow))
    return min(max(float(f"{value:.{digits}g}"), low), high)
