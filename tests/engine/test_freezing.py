"""Freezing and unfreezing layers from hooks, also across a resume."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from ctl_core.freezing import Freezing, trainable_candidates
from ctl_core.tracking import find
from tests.engine.conftest import FEATURES, Train, make_hooks, set_weights


def normed_model() -> keras.Model:
    return set_weights(
        keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(6, name="first"),
                keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()]),
                keras.layers.Dense(1, name="last"),
            ]
        )
    )


def freeze(train_model: Any) -> None:
    train_model.layers[0].trainable = False
    train_model.layers[1].trainable = False


def unfreeze(train_model: Any) -> None:
    train_model.layers[0].trainable = True
    train_model.layers[1].trainable = True


def freezing_hooks(history: dict[int, list[np.ndarray]]) -> Any:
    def note(step: int, train_model: Any) -> None:
        history[step] = train_model.get_weights()

    return make_hooks(
        create_model=normed_model,
        every_steps={1: note},
        at_step={4: freeze, 9: unfreeze},
    )


def changed(before: list[np.ndarray], after: list[np.ndarray]) -> list[bool]:
    return [not np.array_equal(b, a) for b, a in zip(before, after, strict=True)]


def test_freezing_takes_effect_on_the_very_next_step_and_until_unfrozen(train: Train) -> None:
    history: dict[int, list[np.ndarray]] = {}
    state = train(freezing_hooks(history), steps=12)
    names = [weight.path for weight in normed_model().weights]
    last = [name.startswith("last") or "/last/" in name for name in names]
    for step in range(2, 13):
        moved = changed(history[step - 1], history[step])
        # A frozen BatchNormalization runs in inference mode: its statistics stay too.
        expected = last if 4 < step <= 9 else [True] * len(names)
        assert moved == expected, step
    # Besides the one traced before training, a graph for the free model and one for the frozen.
    assert state.functions.trace_counts() == [1, 1, 1]


@pytest.mark.parametrize("cut", [4, 6, 9])
def test_resuming_in_between_changes_nothing(train: Train, cut: int) -> None:
    whole: dict[int, list[np.ndarray]] = {}
    parts: dict[int, list[np.ndarray]] = {}
    train(freezing_hooks(whole), steps=12, run_name="whole")
    train(freezing_hooks(parts), steps=cut, run_name="parts")
    train(freezing_hooks(parts), steps=12, run_name="parts")
    for step in range(1, 13):
        for one, other in zip(whole[step], parts[step], strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_layer_frozen_at_first_can_be_unfrozen_later(train: Train) -> None:
    def create_model() -> keras.Model:
        model = normed_model()
        model.layers[0].trainable = False
        return model

    def unfreeze_first(train_model: Any) -> None:
        train_model.layers[0].trainable = True

    history: dict[int, list[np.ndarray]] = {}
    hooks = make_hooks(
        create_model=create_model,
        every_steps={
            1: lambda step, train_model: history.update({step: train_model.get_weights()})
        },
        at_step={3: unfreeze_first},
    )
    train(hooks, steps=5, virtual_devices=2)
    np.testing.assert_array_equal(history[1][0], history[3][0])
    assert not np.array_equal(history[3][0], history[4][0])


def test_flags_reach_nested_layers_and_single_variables() -> None:
    model = normed_model()
    found = find({"train_model": model})
    assert {layer.name for layer in found.layers} >= {"first", "last"}
    assert set(model.layers[1].layers) <= set(found.layers)
    freezing = Freezing(found)
    inner = model.layers[1].layers[0]
    inner.trainable = False
    model.layers[2].bias.trainable = False
    flags = freezing.flags()
    free = {variable.path for variable in trainable_candidates(model)}
    assert inner.kernel.path in free and model.layers[2].bias.path in free
    assert freezing.flags() == flags, "asking for candidates must not unfreeze anything"
    model.trainable = True
    assert freezing.put_back(flags)
    assert freezing.flags() == flags
    assert not inner.trainable and not model.layers[2].bias.trainable
    assert not freezing.put_back(flags[:-1])
