"""The hooks that docs/hooks.md shows are trained with, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.helpers.cases import make_hooks, regression_data, sliced, small_model
from tests.helpers.fixtures import Train
from tests.helpers.steered import Followed

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_shown_trains(train: Train, tmp_path: Path, block: str) -> None:
    file = tmp_path / "shown.py"
    file.write_text(block)
    shown: dict[str, Any] = {"keras": keras, "tf": tf}
    exec(compile(block, str(file), "exec"), shown)
    hooks = {name: value for name, value in shown.items() if callable(value)}
    assert hooks
    own = make_hooks(
        create_model=small_model if "clone_model" in block else Followed,
        create_eval_dataset=sliced(regression_data()),
        **{name: value for name, value in hooks.items() if name not in ("keras", "tf")},
    )
    state = train(own, steps=12, eval_every=2, log_every=4, learning_rate=1e-12)
    if "after_eval" in hooks:
        assert float(state.lr) < 1e-12  # it had learnt nothing, four times
    if "update_post" in hooks:
        assert state.step == 12
    if "create_train_metrics" in hooks:
        assert "mean_loss" in (state.run_dir / "metrics.jsonl").read_text()


def test_there_are_some() -> None:
    assert len(BLOCKS) >= 3
