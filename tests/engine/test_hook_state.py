"""``state`` and ``chief``, arguments of host hooks: what one remembers is there after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ctl_core
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train


def record(run: Path, step: int) -> Path:
    return run / "ckpt" / "engine" / f"ckpt-{step}.json"


def test_a_run_that_falls_back_to_an_earlier_checkpoint_has_what_that_one_holds(
    train: Train,
) -> None:
    def count(step: int, state: dict[str, Any]) -> None:
        state.setdefault("steps", []).append(step)

    hooks = make_hooks(every_steps={1: count})
    run = train(hooks, steps=9, ckpt_every=3).run_dir
    # Written in the background, while hooks went on: each holds what was there at its step.
    for step in (3, 6, 9):
        kept = json.loads(record(run, step).read_text())["progress"]["hook_state"]
        assert kept == {"steps": list(range(1, step + 1))}
    record(run, 9).write_text("{")
    assert train(hooks, steps=8).hook_state == {"steps": list(range(1, 9))}


def test_the_refusal_names_the_hook_and_the_checkpoint_before_stays(train: Train) -> None:
    def keep(step: int, loss: Any, state: dict[str, Any]) -> None:
        state["loss"] = loss if step == 4 else float(loss)

    hooks = make_hooks(every_steps={1: keep, 2: lambda step: None})
    with pytest.raises(ctl_core.RunError, match=r"every_steps\[1\] .*test_hook_state.py:\d+.*loss"):
        train(hooks, ckpt_every=2)
    assert train(make_hooks(), steps=2).hook_state.keys() == {"loss"}


def test_chief_is_an_argument_of_host_hooks_also_of_deferred_ones(train: Train) -> None:
    seen: list[Any] = []
    looks_on = ctl_core.deferred(lambda step, chief: seen.append((step, chief)))
    train(
        make_hooks(every_steps={1: looks_on}, at_step={2: lambda chief: seen.append(chief)}),
        steps=2,
    )
    assert seen == [(1, True), (2, True), True]
    with pytest.raises(ctl_core.SetupError, match="may name dev, step, chief, config, hparams"):
        train(make_hooks(every_steps={1: ctl_core.deferred(lambda state: None)}))
