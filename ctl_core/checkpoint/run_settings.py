"""Reads the settings of a run from its config.yaml, or from the copy in its newest checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ctl_core.checkpoint.record import read_complete_records
from ctl_core.run.errors import SetupError, make_line
from ctl_core.run.files import relative_path
from ctl_core.run.layers import Layer, parse_settings, read_file
from ctl_core.run.settings import SETTINGS, SettingValue

CONFIG_FILE = "config.yaml"


def read_run_settings(run: Path) -> Layer:
    """Reads the settings of a run from its config.yaml; without this file, from a checkpoint.

    If a value in config.yaml was edited, the edited value is used. If a setting is missing, the
    file counts as damaged. Otherwise, the run would continue with the default value and train
    different weights.

    Args:
        run: the folder of the run

    Raises:
        SetupError: the file cannot be read, the file lacks a setting that the newest checkpoint
            has, or there is neither this file nor a checkpoint with settings.
    """
    path = run / CONFIG_FILE
    where = relative_path(path)
    recorded = _read_recorded(run)
    if recorded is None:
        return read_file(path)
    if not path.exists():
        return recorded
    cure = (
        f"remove the file; the run then takes its settings from its newest checkpoint: rm {where}"
    )
    try:
        saved = read_file(path)
    except SetupError as error:
        raise SetupError(f"{error} To repair it, {cure}") from error
    missing = _find_missing(recorded.values, saved.values)
    if missing:
        raise SetupError(
            f"{where}: the run's {make_line(', '.join(missing), 60)} is missing, so the file "
            f"is damaged; {cure}"
        )
    return saved


def has_settings(run: Path) -> bool:
    """Returns True if a folder contains a run with a config.yaml or with saved settings."""
    return (run / CONFIG_FILE).is_file() or _read_recorded(run) is not None


def _find_missing(
    recorded: dict[str, SettingValue], saved: dict[str, SettingValue], above: str = ""
) -> list[str]:
    """Returns the settings, including nested ones, that the checkpoint has and the file lacks."""
    missing = []
    for name, value in recorded.items():
        is_cut = bool(value) and isinstance(value, dict) and saved.get(name) is None
        if name not in saved or is_cut:
            missing.append(above + name)
        elif isinstance(value, dict) and isinstance(saved[name], dict):
            missing += _find_missing(value, saved[name], f"{above}{name}.")
    return missing


def _read_recorded(run: Path) -> Layer | None:
    """Returns the settings in the newest complete checkpoint; None if there are none."""
    folder = run / "ckpt"
    record = None
    with contextlib.suppress(SetupError):  # an incompatible engine wrote the record
        record = next(read_complete_records(folder), None)
    if record is None or not record.settings:
        return None
    where = relative_path(folder / "engine" / f"ckpt-{record.step}.json")
    values = parse_settings(record.settings, where)
    known = {name: value for name, value in values.items() if name in SETTINGS}
    return Layer(known, f"{where}: ")
