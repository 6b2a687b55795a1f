"""``state`` and ``chief``, arguments of host hooks: what one remembers is there after a resume."""

from __future__ import annotations

from typing import Any

import pytest

import ctl_core
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train

CYCLE: list[Any] = []
CYCLE.append(CYCLE)


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
