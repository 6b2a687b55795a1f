"""``stats_every`` and ``histograms_every``: norms and histograms of gradients and weights.

Norms over all variables are metrics of the run, as the loss is. What belongs to one variable goes
to TensorBoard, and norms and the like to stats.jsonl, a line for each variable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl_core.console import Console
from ctl_core.debugging.looks import traced
from ctl_core.errors import RunError, reason
from ctl_core.files import from_here, written_whole
from ctl_core.hooks import Hook
from ctl_core.metric_values import parse_metrics, storable
from ctl_core.run_state.tracking import plain_variable, variable_name
from ctl_core.state import State

# What is known of a variable, in the order in which a graph returns it.
STATISTICS = ("weight_norm", "weight_mean", "weight_std", "grad_norm", "update_ratio", "zero_grads")
FILE = "stats.jsonl"

Trained = Mapping[str, list[Any]]


class Statistics:
    """Measures steps for which ``stats_every`` or ``histograms_every`` is due, and writes it down.

    Attributes:
        hooks: the host hooks that write, by the number of steps
    """

    def __init__(self, state: State, console: Console) -> None:
        self._state, self._console = state, console
        self._trained: Trained = {}
        self._looks: dict[int, Any] = {}
        self._measured: Any = None
        self._begun = False
        self._stats = _hook("stats_every", self._write)
        self._histograms = _hook("histograms_every", self._write_histograms)
        config = state.config
        every = ((config.stats_every, self._stats), (config.histograms_every, self._histograms))
        self.hooks = [(number, hook) for number, hook in every if number]

    def begins(self, due: Any, trained: Trained) -> None:
        """Keeps the weights as they are before a step, if its statistics are due.

        Args:
            due: the host hooks that are due after it
            trained: the variables that the step trains, by objective
        """
        self._trained, self._before = trained, None
        if any(hook is self._stats for hook in due):
            self._before = self._weights()

    def ends(self, gradients: Any) -> None:
        """Measures what the step has done, before hooks may change anything."""
        if self._before is None:
            return
        values = (self._before, self._weights(), _by_objective(gradients))
        key = id(self._trained)
        if key not in self._looks:
            self._looks[key] = traced(_measure, values)
        self._measured = self._looks[key](*values)

    def _weights(self) -> dict[str, list[tf.Tensor]]:
        """Returns the values of the trained variables, of this process's first replica."""
        results = self._state.strategy.experimental_local_results
        return {
            name: [results(plain_variable(one))[0].read_value() for one in several]
            for name, several in self._trained.items()
        }

    def _names(self) -> dict[str, list[str]]:
        """Returns names of the trained variables, each once; with its objective among several."""
        found: dict[str, list[str]] = {}
        taken: dict[str, int] = {}
        for objective, several in self._trained.items():
            for variable in several:
                name = f"{objective}/" * bool(objective) + variable_name(variable)
                taken[name] = number = taken.get(name, 0) + 1
                found.setdefault(objective, []).append(f"{name}_{number}" if number > 1 else name)
        return found

    def _write(self, step: int, chief: bool, **_: Any) -> None:
        """Writes what was measured."""
        rows, norms = tf.nest.map_structure(lambda one: one.numpy().tolist(), self._measured)
        values: dict[str, Any] = {}
        for kind in ("grad_norm", "update_norm", "weight_norm"):
            of_kind = {name: one[kind] for name, one in norms.items()}
            values[kind] = of_kind.get("", of_kind)
        self._console.values(step, "train", values)
        if not chief:
            return
        lines = []
        for objective, names in self._names().items():
            for name, row in zip(names, rows[objective], strict=True):
                measured = dict(zip(STATISTICS, row, strict=True))
                lines.append({"step": step, "variable": name, **storable(measured)})
                for kind, value in measured.items():
                    tf.summary.scalar(f"{kind}/{name}", value)
        self._append(step, lines)

    def _append(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Adds lines to stats.jsonl, of which those that are taken again are taken out first."""
        path = Path(self._state.run_dir) / FILE
        try:
            if not self._begun and path.is_file():
                kept = [one for one in parse_metrics(path.read_text("utf-8")) if one["step"] < step]
                with written_whole(path) as beside:
                    beside.write_text("".join(json.dumps(one) + "\n" for one in kept), "utf-8")
            self._begun = True
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(one) + "\n" for one in lines))
        except OSError as error:
            raise RunError(f"{from_here(path)}: cannot be written: {reason(error)}.") from error

    def _write_histograms(self, step: int, chief: bool, gradients: Any) -> None:
        """Writes histograms of weights and gradients; of sparse ones, of their rows."""
        if not chief:
            return
        weights, by_objective = self._weights(), _by_objective(gradients)
        for objective, names in self._names().items():
            triples = zip(names, weights[objective], by_objective[objective], strict=True)
            for name, weight, gradient in triples:
                for kind, values in (("weights", weight), ("gradients", _values(gradient))):
                    finite = tf.boolean_mask(values, tf.math.is_finite(values))
                    tf.summary.histogram(f"{kind}/{name}", finite, step=step)


def _hook(name: str, function: Any) -> Hook:
    return Hook(name, function, ("step", "chief", "gradients"), {}, function)


def _by_objective(gradients: Any) -> dict[str, list[Any]]:
    return gradients if isinstance(gradients, dict) else {"": gradients}


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _measure(before: Any, after: Any, gradients: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns by objective the statistics of each variable, a row of numbers; and norms over all.

    Args:
        before: the weights before the step, by objective
        after: those after it
        gradients: summed over the replicas, without a loss scale, before ``update_pre``
    """
    rows, norms = {}, {}
    for name, several in gradients.items():
        found, squares = [], []
        for old, new, gradient in zip(before[name], after[name], several, strict=True):
            old, new, values = (tf.cast(x, tf.float32) for x in (old, new, _values(gradient)))
            of_weight, of_update, of_gradient = map(tf.norm, (new, new - old, values))
            size = tf.cast(tf.size(new), tf.float32)
            not_zero = tf.cast(tf.math.count_nonzero(values), tf.float32)
            ratio = tf.math.divide_no_nan(of_update, tf.norm(old))
            mean, spread = tf.reduce_mean(new), tf.math.reduce_std(new)
            row = [of_weight, mean, spread, of_gradient, ratio, 1.0 - not_zero / size]
            found.append(tf.stack(row))
            squares.append(tf.stack([of_gradient, of_update, of_weight]) ** 2)
        rows[name] = tf.stack(found) if found else tf.zeros([0, len(STATISTICS)])
        total = tf.sqrt(tf.add_n(squares)) if squares else tf.zeros([3])
        norms[name] = dict(
            zip(("grad_norm", "update_norm", "weight_norm"), tf.unstack(total), strict=True)
        )
    return rows, norms
