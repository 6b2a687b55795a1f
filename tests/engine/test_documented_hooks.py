"""The hooks that docs/hooks.md and docs/recipes.md show are trained with, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ctl_core
from ctl_core.hooks.table import SPECS
from tests.helpers.cases import Followed, make_hooks, regression_data, sliced, small_model
from tests.helpers.fixtures import Train

PAGES = Path(__file__).parents[2] / "docs"


def read_blocks(name: str) -> list[str]:
    text = (PAGES / name).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


BLOCKS = read_blocks("hooks.md") + [b for b in read_blocks("recipes.md") if "every_steps" in b]
SMALL = {"steps": 12, "eval_every": 2, "log_every": 4}


def hooks_of(block: str, folder: Path) -> dict[str, Any]:
    """The hooks that a block defines."""
    file = folder / "shown.py"
    file.write_text(block)
    shown: dict[str, Any] = {"keras": keras, "tf": tf, "ctl_core": ctl_core}
    exec(compile(block, str(file), "exec"), shown)
    return {name: shown[name] for name in SPECS if name in shown}


@pytest.mark.parametrize("block", [b for b in BLOCKS if "turns" not in b and "Agent" not in b])
def test_what_is_shown_trains(train: Train, tmp_path: Path, block: str) -> None:
    hooks = hooks_of(block, tmp_path)
    assert hooks
    base = {
        "create_model": small_model if "clone_model" in block else Followed,
        "create_eval_dataset": sliced(regression_data()),
    }
    state = train(make_hooks(**{**base, **hooks}), learning_rate=1e-12, **SMALL)
    if "after_eval" in hooks:
        assert float(state.lr) < 1e-12  # it had learnt nothing, four times
    names = {name for line in state.history for name in line}
    shown = {"mean_loss", "grad_norm", "error", "size"}
    assert {name for name in shown if f'"{name}"' in block or f"{name}=" in block} <= names
    if "grad_norm" in block:
        events = b"".join(path.read_bytes() for path in (state.run_dir / "tb/train").iterdir())
        assert b"weights/" in events and b"gradients/" in events


class Images(keras.Model):
    """What is needed for the GAN that is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])

    def call(self, inputs: Any) -> Any:
        images, noise = inputs
        made = self.generator(noise)
        return self.critic(images)[:, 0], self.critic(made)[:, 0], made


def test_the_gan_that_is_shown_trains(train: Train, tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if "turns" in block)
    images = regression_data()[0]
    data = sliced((images, np.random.default_rng(0).normal(size=(len(images), 4, 3))))
    own = {"create_dataset": data, "create_eval_dataset": data, "create_model": Images}
    own |= {"create_loss": lambda: lambda loss: loss, **hooks_of(block, tmp_path)}
    state = train(make_hooks(**own), **SMALL)
    (line,) = (x for x in state.history if x["split"] == "train" and x["step"] == 12)
    assert line["penalty"] > 0


@pytest.mark.slow
def test_the_agent_that_is_shown_learns(train: Train, tmp_path: Path) -> None:
    """Also in two parts, and on two replicas."""
    (block,) = (block for block in BLOCKS if "Agent" in block)
    hooks = make_hooks(**hooks_of(block, tmp_path), create_opt=lambda lr: keras.optimizers.Adam(lr))
    settings = {"virtual_devices": 2, "learning_rate": 0.02, "log_every": 5}
    for steps in (5, 30):
        state = train(hooks, steps=steps, **settings)
    rewards = [line["reward"] for line in state.history if "reward" in line]
    assert len(rewards) == 6 and rewards[-1] > rewards[0] + 1.0
