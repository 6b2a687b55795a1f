"""Tests that the code of docs/fine-tuning.md builds and freezes models as the page says."""

import functools
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ctl_core.hooks.optimizer_groups import OptimizerGroups
from tests.helpers.rendering import ROOT

PAGE = ROOT / "docs" / "fine-tuning.md"


class _Rate(keras.optimizers.schedules.LearningRateSchedule):
    """Replaces the engine's ``lr``, a schedule that can be multiplied and assigned."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, step: Any) -> float:
        return self.value

    def __mul__(self, factor: float) -> "_Rate":
        return _Rate(self.value * factor)

    def assign(self, rate: "_Rate") -> None:
        self.value = rate.value


def read_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_a_frozen_base_is_unfrozen_and_has_a_rate_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_base = functools.partial(keras.applications.MobileNetV2, alpha=0.35)

    def create_untrained(weights: str, **values: Any) -> keras.Model:
        assert weights == "imagenet"  # Keras would download these weights.
        return create_base(weights=None, **values)

    monkeypatch.setattr(keras.applications, "MobileNetV2", create_untrained)
    shown: dict[str, Any] = {}
    frozen, reset, groups, *_ = read_blocks()
    for block in (frozen, reset, groups):
        exec(block, shown)
    model = shown["create_model"]()
    assert model(np.zeros((2, 96, 96, 3), "float32")).shape == (2, shown["CLASSES"])
    assert len(model.trainable_variables) == 2

    rate = _Rate(0.1)
    optimizer = OptimizerGroups(shown["create_opt"](rate, model))
    ((step, functions),) = shown["at_step"].items()
    assert step == 500
    assert functions == [shown["unfreeze"], shown["reset_optimizer"]]
    shown["unfreeze"](model, rate)
    assert len(model.trainable_variables) > 100
    assert rate.value == pytest.approx(0.01)
    optimizer.build(model.trainable_variables)  # This fails if a variable is in no group.


def test_adapters_are_all_that_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    base.save("base.keras")
    (block,) = (block for block in read_blocks() if "enable_lora" in block)
    shown: dict[str, Any] = {"keras": keras}
    exec(block, shown)
    names = [variable.name for variable in shown["create_model"]().trainable_variables]
    assert names == ["lora_kernel_a", "lora_kernel_b"] * 2
