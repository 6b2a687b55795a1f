"""Each program has the weights of its plain loop, also of micro-batches, and compiled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden import engine
from tests.golden.catalogue import NAMES, SETTINGS, assert_plain, load_program

pytestmark = pytest.mark.slow

WAYS: dict[str, dict[str, Any]] = {
    "accumulated": {"virtual_devices": 2, "accumulate_steps": 2},
    "compiled": {"jit_compile": True},
}
EXCLUDED = {
    "accumulated": {name for name in NAMES if not load_program(name).accumulates},
    "compiled": {name for name in NAMES if not load_program(name).compiles},
}


@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way in WAYS for name in NAMES if name not in EXCLUDED[way]]
)
def test_weights_in_other_ways(train: engine.Train, way: str, name: str) -> None:
    program = load_program(name)
    state = train(program.hooks(), **SETTINGS | WAYS[way] | program.settings)
    assert_plain(name, program.weights(state), state.metrics)
