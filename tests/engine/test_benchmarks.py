"""Tests that all trainers of the benchmark reach the same weights. Nothing is timed here."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks import worker
from benchmarks.pace import CHECKED
from benchmarks.workloads import mlp

NAMES = ("engine", "Keras fit", "textbook loop", "floor")


@pytest.mark.parametrize(
    "names", [("engine", "floor"), pytest.param(NAMES, marks=pytest.mark.slow)]
)
def test_peers_reach_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    compared: list[str] = []
    check_equal = worker.check_equal

    def check(weights: Any, reference: Any, what: str, tolerance: float) -> None:
        compared.append(what)
        start = mlp().create_model().get_weights()
        assert any(not np.allclose(w, s, rtol=1e-3) for w, s in zip(weights, start, strict=True))
        check_equal(weights, reference, what, tolerance)

    monkeypatch.setattr(worker, "check_equal", check)
    work = dataclasses.replace(mlp(), segment=CHECKED)
    timings = list(worker.steps(work, devices=1, every=50, rounds=1, names=names))
    assert compared == [f"mlp: {name}" for name in names]
    assert [timing.peer for timing in timings] == list(names)
    assert all(len(timing.seconds) == 1 for timing in timings)
