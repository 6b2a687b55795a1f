"""The model card of an export: what is true of it, from the run's own record."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ctl_core import __version__
from ctl_core.hooks import describe
from ctl_core.nested import described, input_names, output_names
from ctl_core.raw_inputs import element_of
from ctl_core.run_state.record import Record
from ctl_core.serving import Serving
from ctl_core.settings import Config
from ctl_core.state import State
from ctl_core.summary import Summary

# Of where a run was made, not of what it is.
_NOT_OF_THE_MODEL = ("run_name", "runs_dir", "debug", "callbacks")


def model_card(
    state: State,
    config: Config,
    record: Record,
    serving: Serving,
    kind: str,
    signatures: Sequence[str] = (),
) -> str:
    """Returns the card as Markdown: model, metrics, data, signature, settings, origin.

    Args:
        state: of the run
        config: its settings, as it was trained
        record: of the checkpoint
        serving: what was exported
        kind: the format
        signatures: of a SavedModel
    """
    env, hooks = _env(state), state.hooks
    lines = [
        f"# {config.run_name}, step {record.step}",
        "",
        f"- Format: {kind}" + (f", signatures {', '.join(signatures)}" if signatures else ""),
        f"- Model: {Summary(state.train_model, state.train_loss).total()}, as trained; exported is "
        f"what {serving.hook} returned",
        f"- Trained for {record.step} steps of {record.batch_size} examples, "
        f"{record.examples} examples in all, on {record.replicas} "
        f"replica{'s' * (record.replicas > 1)}",
        f"- Exported {time.strftime('%Y-%m-%d')} by ctl_core {__version__}",
        "",
        "## Metrics",
        "",
    ]
    if record.metrics:
        lines += [f"On the evaluation data, after step {record.evaluated}:", ""]
        lines += _table(("metric", "value"), ((n, f"{v:.6g}") for n, v in record.metrics.items()))
    else:
        lines += ["The run has evaluated nothing before this checkpoint."]
    lines += ["", "## Data", ""]
    lines += [f"- Trained on: {hooks.create_dataset}, batches of {_batch(state.data.element_spec)}"]
    if hooks.create_eval_dataset is not None:
        lines += [
            f"- Evaluated on: {hooks.create_eval_dataset}, batches of {_batch(element_of(state))}"
        ]
    lines += ["", "## Input and output", ""]
    ends = (
        ("input", input_names(serving.input_spec)),
        ("output", output_names(serving.output_spec)),
    )
    rows = [(end, name, described(part)) for end, parts in ends for name, part in parts.items()]
    lines += _table(("", "name", "what"), rows)
    lines += ["", "The first dimension is the number of examples."]
    if serving.note:
        lines += ["", serving.note]
    lines += ["", "## Settings", "", "Those that are not the defaults:", ""]
    lines += _table(("setting", "value"), _settings(config))
    lines += ["", "## Origin", ""]
    commit = env.get("commit")
    if commit:
        lines += [f"- Commit: {commit}" + ", with changes that are not in it" * bool(env["dirty"])]
    else:
        lines += ["- Commit: none is known"]
    lines += [
        f"- Trained with: {name} {version}" for name, version in env.get("versions", {}).items()
    ]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Writes a table; without rows, a line."""
    lines = [
        f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows
    ]
    if not lines:
        return ["None."]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]


def _settings(config: Config) -> list[tuple[str, str]]:
    standard = dataclasses.asdict(Config())
    return [
        (name, json.dumps(value, ensure_ascii=False))
        for name, value in dataclasses.asdict(config).items()
        if name not in _NOT_OF_THE_MODEL and value != standard[name]
    ]


def _batch(spec: Any) -> str:
    try:
        return describe(spec)
    except ValueError:  # of unknown rank
        return str(spec)


def _env(state: State) -> dict[str, Any]:
    """Returns what the run wrote down of where it was trained; {} of an earlier engine's."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((state.run_dir / "env.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
