"""Steps that are watched: all for ``detect_anomaly``, some for ``stats_every`` and the like.

A watched step is one graph call of its own, as any step is that a host hook looks at; what it may
have to be compared with, or taken again from, is copied before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ctl_core.console import Console
from ctl_core.debugging.anomalies import LOOKED_AT, Anomalies
from ctl_core.debugging.statistics import Statistics
from ctl_core.graph import StepFunctions
from ctl_core.hooks import Hook
from ctl_core.run_folder import Run
from ctl_core.state import State


def step_functions(state: State, console: Console, run: Run) -> StepFunctions:
    """Returns the graph functions of a run, which are watched where its settings ask for that.

    What they need of a step is then named by host hooks of the engine's, after those of the run.
    """
    summaries, config = run.graph_writer("train"), state.config
    if not (config.detect_anomaly or config.stats_every or config.histograms_every):
        return StepFunctions(state, console, summaries)
    return WatchedSteps(state, console, summaries)


class WatchedSteps(StepFunctions):
    """The graph functions of a run whose steps are watched."""

    def __init__(self, state: State, console: Console, summaries: tf.summary.SummaryWriter) -> None:
        super().__init__(state, console, summaries)
        self._anomalies = Anomalies(state) if state.config.detect_anomaly else None
        self._statistics = Statistics(state, console)
        self._trained: dict[Any, dict[str, list[Any]]] = {}
        hooks = list(self._statistics.hooks)
        if self._anomalies is not None:
            hooks.append((1, Hook("detect_anomaly", _nothing, LOOKED_AT, {}, _nothing)))
        every = dict(state.hooks.every_steps)
        for number, hook in hooks:
            every[number] = (*every.get(number, ()), hook)
        state.hooks = dataclasses.replace(state.hooks, every_steps=every)

    def graph(self, fetches: frozenset[str] | None) -> Any:
        """Returns the function, and notes when it is traced which variables it trains."""
        function = super().graph(fetches)
        trained = self._state.context.trained
        self._trained.setdefault(
            (self.frozen, fetches), {name: list(several) for name, several in trained.items()}
        )
        return function

    def train_step(
        self, fetches: frozenset[str], due: Sequence[Hook] = (), steps: int = 1
    ) -> dict[str, Any]:
        """Takes a step, and measures it if that is due."""
        if "gradients" in fetches:
            taken = fetches | {"batch"} if self._looks_at(fetches) else fetches
            self.graph(taken)
            self._statistics.begins(due, self._trained[self.frozen, taken])
        values = super().train_step(fetches, due, steps)
        if "gradients" in fetches:
            self._statistics.ends(values["gradients"])
        return values

    def take(self, fetches: frozenset[str], steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Takes a step, and looks at it."""
        if self._anomalies is None or not self._looks_at(fetches):
            return super().take(fetches, steps)
        wanted = fetches | {"batch"}
        self._anomalies.before(self.graph(wanted).graph)
        pieces, found = super().take(wanted, steps)
        self._anomalies.after(found, pieces["batch"], self.frozen)
        return {name: several for name, several in pieces.items() if name in fetches}, found

    def _looks_at(self, fetches: frozenset[str]) -> bool:
        return self._anomalies is not None and fetches.issuperset(LOOKED_AT)


def _nothing(**_: Any) -> None:
    """Is a host hook only for what it names, which steps then return."""
