"""What a sweep has found: the best settings as a file, a table, two pictures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ctl_core.errors import one_line
from ctl_core.files import from_here, written_whole
from ctl_core.metric_values import worded
from ctl_core.settings import shown
from ctl_core.sweep.plan import Plan, nested
from ctl_core.sweep.study import SETTINGS, Sweep, load_optuna, number_of
from ctl_core.tools.columns import Column, print_table

# Lines of the table; the journal has all.
_MOST = 20


def report(sweep: Sweep, plan: Plan) -> None:
    """Prints the table, and writes best.yaml and the pictures if there is anything to show."""
    last = sweep.last_of()
    complete = {run: trial for run, trial in last.items() if trial.state.name == "COMPLETE"}
    sign = -1 if plan.highest else 1
    ranked = sorted(complete, key=lambda run: sign * complete[run].value)
    rest = sorted(run for run in last if run not in complete)
    listed = (ranked + rest)[:_MOST]
    trials = [last[run] for run in listed]
    values = ["" if t.value is None else worded({"": t.value}).strip() for t in trials]
    print_table(
        [
            Column("run", listed),
            Column("state", [trial.state.name.lower() for trial in trials]),
            Column(plan.metric, values),
            Column("settings", [words_of(trial.params) for trial in trials], least=20),
        ]
    )
    if (left := len(last) - _MOST) > 0:
        print(f"and {left} more")
    if not ranked:
        return
    best = sweep.folder / "best.yaml"
    with written_whole(best) as beside:
        text = yaml.safe_dump(nested(complete[ranked[0]].user_attrs[SETTINGS]), sort_keys=False)
        beside.write_text(f"# {ranked[0]}: {plan.metric} {complete[ranked[0]].value}\n{text}")
    print(
        f"best: {ranked[0]}. Its settings: {from_here(best)}, for --config config.yaml --config "
        f"{from_here(best)}"
    )
    _pictures(sweep, plan, complete, ranked[0])


def words_of(settings: Any) -> str:
    """Returns settings as a line."""
    return ", ".join(
        f"{name} {format(value, '.6g') if isinstance(value, float) else shown(value, 20)}"
        for name, value in settings.items()
    )


def _pictures(sweep: Sweep, plan: Plan, complete: Mapping[str, Any], best_run: str) -> None:
    """Draws by the numbers of the runs: Optuna counts each start of a run as a trial."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ModuleNotFoundError:
        print("pictures need matplotlib, which is not installed.")
        return
    runs = {number_of(run): run for run in complete}
    numbers = sorted(runs)
    values = [complete[runs[number]].value for number in numbers]
    better, so_far, best = (max if plan.highest else min), [], values[0]
    for value in values:
        best = better(best, value)
        so_far.append(best)
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    panel = figure.subplots()
    panel.plot(numbers, values, "o", label="run")
    panel.plot(number_of(best_run), complete[best_run].value, "*", ms=14, label=best_run)
    panel.step(numbers, so_far, where="post", label="best so far")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:04.0f}" if x >= 0 else ""))
    panel.set_xlabel(f"run, {sweep.name}-...")
    panel.set_ylabel(plan.metric)
    panel.legend()
    _write(figure, sweep.folder / "history.png")
    importance = _importance(sweep)
    if importance:
        figure = Figure(figsize=(6.4, 1 + 0.4 * len(importance)), layout="constrained")
        panel = figure.subplots()
        panel.barh([*importance][::-1], [*importance.values()][::-1])
        panel.set_xlabel(f"importance for {plan.metric}")
        _write(figure, sweep.folder / "importance.png")


def _importance(sweep: Sweep) -> dict[str, float]:
    """Returns how much of what was seen each setting explains, if that can be told yet."""
    optuna = load_optuna()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = optuna.importance.get_param_importances(
                sweep.study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
            )
    except (RuntimeError, ValueError, ModuleNotFoundError) as error:
        print(f"importance: not to be told yet: {one_line(error, 100)}")
        return {}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _write(figure: Any, path: Path) -> None:
    with written_whole(path) as beside:
        figure.savefig(beside, format="png", dpi=120)
    print(f"wrote {from_here(path)}")
