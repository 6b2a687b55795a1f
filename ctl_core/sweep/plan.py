"""sweep.yaml: what is searched, by which metric; checked before anything starts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ctl_core.errors import SetupError, brief
from ctl_core.files import from_here
from ctl_core.layers import checked, flat, load_yaml, read_file
from ctl_core.selection import is_highest, metric_in
from ctl_core.settings import SETTINGS, kind_of, nearest, shown

_KEYS = ("metric", "space", "settings", "hook")
_RANGE = ("min", "max", "log", "step")
# What says which run it is; a trial has its own.
_OWN = ("run_name", "runs_dir", "fork")


@dataclasses.dataclass(frozen=True)
class Dimension:
    """The values of one setting: a list of choices, or a range.

    Attributes:
        choices: the values; empty for a range
        low, high: the ends of a range, which belong to it
        log: whether factors count, not differences
        step: between two values of a range, or None
        whole: whether the values of a range are whole numbers
    """

    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False

    def suggest(self, trial: Any, name: str) -> Any:
        """Asks an Optuna trial for a value."""
        if self.choices:
            return trial.suggest_categorical(name, list(self.choices))
        if self.whole:
            step = int(self.step or 1)
            return trial.suggest_int(name, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)

    def grid(self) -> list[Any] | None:
        """Returns all values, or None of a range that has no steps."""
        if self.choices:
            return list(self.choices)
        step = self.step or (1 if self.whole and not self.log else None)
        if step is None:
            return None
        count = int((self.high - self.low) / step + 1e-9) + 1
        values = [self.low + number * step for number in range(count)]
        return [int(value) for value in values] if self.whole else values


@dataclasses.dataclass(frozen=True)
class Plan:
    """What sweep.yaml says.

    Attributes:
        metric: a name of an evaluation's values
        highest: whether more of it is better
        space: by the name of the setting, ``hparams.width`` say
        settings: what all trials have, by name
        hook: ``sweep_space(trial)``, which returns more settings by name; or None
    """

    metric: str
    highest: bool
    space: dict[str, Dimension]
    settings: dict[str, Any]
    hook: Callable[[Any], Any] | None

    def settings_of(self, trial: Any) -> dict[str, Any]:
        """Returns a trial's settings by name.

        Raises:
            SetupError: the hook fails, or returns something else.
        """
        found = {name: one.suggest(trial, name) for name, one in self.space.items()}
        if self.hook is not None:
            try:
                more = self.hook(trial)
            except Exception as error:
                raise SetupError(f"sweep_space: {brief(error)}") from error
            if not isinstance(more, dict):
                raise SetupError(
                    f"sweep_space: returned {shown(more)}, expected a dict of settings by name."
                )
            found |= more
            _check(self.settings | found, "sweep_space")
        return self.settings | found

    def grid(self) -> list[dict[str, Any]]:
        """Returns every combination of the values.

        Raises:
            SetupError: a range has no steps, or a hook has a say.
        """
        values = {name: one.grid() for name, one in self.space.items()}
        if endless := [name for name, several in values.items() if several is None]:
            raise SetupError(
                f"sampler: grid needs values to go through, but {endless[0]} is a range; give it a "
                "step, or a list of values."
            )
        if self.hook is not None:
            raise SetupError("sampler: grid cannot know what sweep_space asks for; take random.")
        rows = itertools.product(*(several or () for several in values.values()))
        return [dict(zip(values, row, strict=True)) for row in rows]

    def digest(self) -> str:
        """Returns what must not change in a sweep that goes on."""
        space = {name: dataclasses.asdict(one) for name, one in self.space.items()}
        return json.dumps([self.metric, self.highest, space, self.settings], sort_keys=True)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as a file has them: ``hparams.width`` within ``hparams``."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        *above, last = name.split(".")
        inner = found
        for each in above:
            inner = inner.setdefault(each, {})
        inner[last] = value
    return found


def read_plan(path: Path) -> Plan:
    """Reads sweep.yaml and checks every name and value in it.

    Raises:
        SetupError: it cannot be read, or a name or value in it cannot be.
    """
    where = from_here(path)
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SetupError(f"{where}: cannot be read: {why}.") from error
    if not isinstance(content, dict):
        raise SetupError(f"{where}: expected names with values: {', '.join(_KEYS)}.")
    if others := [name for name in content if name not in _KEYS]:
        hint = nearest(str(others[0]), _KEYS) or f"; expected one of {', '.join(_KEYS)}."
        raise SetupError(f"{where}: unknown name {shown(others[0])}{hint}")
    if not isinstance(content.get("metric"), str):
        got = f"got {shown(content['metric'])}" if "metric" in content else "which is missing"
        raise SetupError(f"{where}: metric: expected a name such as accuracy, {got}.")
    metric, mode = metric_in(content["metric"])
    for part in ("space", "settings"):
        if not isinstance(content.get(part) or {}, dict):
            raise SetupError(f"{where}: {part}: expected settings by name.")
    fixed = flat(content.get("settings") or {})
    _check(fixed, f"{where}: settings")
    ranges = content.get("space") or {}
    space = {
        name: _dimension(f"{where}: space: {name}", name, ranges[name]) for name in map(str, ranges)
    }
    hook = _hook(path, content.get("hook"))
    if not space and hook is None:
        raise SetupError(f"{where}: space: is empty; name a setting, with a list or min and max.")
    for name, one in space.items():
        for value in one.choices or (one.low, one.high):
            value = int(value) if one.whole and not one.choices else value
            _check(fixed | {name: value}, f"{where}: space")
    return Plan(metric, is_highest(f"{where}: metric", metric, mode), space, fixed, hook)


def _dimension(where: str, name: str, said: Any) -> Dimension:
    """Reads the values of one setting.

    Raises:
        SetupError: they are no list and no range, or none at all.
    """
    if isinstance(said, list):
        if not said:
            raise SetupError(f"{where}: is empty; expected values to choose from.")
        if bad := [v for v in said if not isinstance(v, bool | int | float | str | None)]:
            raise SetupError(f"{where}: expected numbers and texts, got {shown(bad[0])}.")
        return Dimension(choices=tuple(said))
    if not isinstance(said, dict) or not {"min", "max"} <= said.keys():
        raise SetupError(f"{where}: expected a list of values, or min and max, got {shown(said)}.")
    if others := [key for key in said if key not in _RANGE]:
        hint = nearest(str(others[0]), _RANGE) or f"; expected {', '.join(_RANGE)}."
        raise SetupError(f"{where}: unknown name {shown(others[0])}{hint}")
    numbers: list[Any] = [said.get(key) for key in _RANGE]
    low, high, log, step = numbers
    for key, value in (("min", low), ("max", high), ("step", 1 if step is None else step)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SetupError(f"{where}: {key}: expected a number, got {shown(value)}.")
    if not isinstance(log, bool | None):
        raise SetupError(f"{where}: log: expected true or false, got {shown(log)}.")
    if low >= high:
        raise SetupError(f"{where}: is empty: min {low} is not below max {high}.")
    if step is not None and step <= 0:
        raise SetupError(f"{where}: step: expected a number above 0, got {step}.")
    if log and (low <= 0 or step is not None):
        raise SetupError(f"{where}: log needs a min above 0, and no step.")
    setting = SETTINGS.get(name)
    real = setting is not None and kind_of(setting) is float
    whole = not real and all(isinstance(value, int) for value in (low, high, step or 1))
    return Dimension((), low, high, bool(log), step, whole)


def _check(settings: Mapping[str, Any], where: str) -> None:
    """Refuses names that no setting has, and values that it cannot have.

    Raises:
        SetupError: as said.
    """
    known = flat({name: value for name, (_, value) in _project().items()})
    hparams = [name for name in known if name.startswith("hparams.")]
    for name in settings:
        if name in _OWN:
            raise SetupError(f"{where}: {name}: each trial has its own; leave it out.")
        near = [*SETTINGS, *hparams]
        if not (name in SETTINGS or name.startswith("hparams.")) or (
            hparams and name.startswith("hparams.") and name not in hparams
        ):
            why = "is not among the hparams of config.yaml" if "." in name else "is no setting"
            raise SetupError(f"{where}: {name}: {why}{nearest(name, near) or '.'}")
    checked({name: (f"{where}: {name}", value) for name, value in nested(settings).items()})


def _project() -> Mapping[str, Any]:
    return read_file(Path("config.yaml"), required=False)


def _hook(path: Path, said: Any) -> Callable[[Any], Any] | None:
    """Returns ``sweep_space`` of the Python file that is named.

    Raises:
        SetupError: there is none.
    """
    if said is None:
        return None
    file = path.parent / str(said)
    if not file.is_file():
        raise SetupError(f"{from_here(path)}: hook: there is no file {from_here(file)}.")
    try:
        found = runpy.run_path(str(file)).get("sweep_space")
    except Exception as error:
        raise SetupError(f"{from_here(path)}: hook: {from_here(file)}: {brief(error)}") from error
    if not callable(found):
        raise SetupError(
            f"{from_here(path)}: hook: {from_here(file)} has no function sweep_space(trial)."
        )
    return found  # type: ignore[no-any-return]
