"""The benchmark's peers train the same; its report says what the numbers say. Nothing is timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import engines, worker
from benchmarks.report import (
    Memory,
    Results,
    Timing,
)
from benchmarks.workloads import mlp

NAMES = ("engine", "Keras fit", "textbook loop", "floor")


def test_peers_reach_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    check_equal = worker.check_equal

    def check(weights: Any, reference: Any, what: str, tolerance: float) -> None:
        compared.append(what)
        start = mlp().create_model().get_weights()
        assert any(not np.allclose(w, s, rtol=1e-3) for w, s in zip(weights, start, strict=True))
        check_equal(weights, reference, what, tolerance)

    monkeypatch.setattr(worker, "check_equal", check)
    work = worker.shortened(mlp())
    timings = list(worker.steps(work, devices=1, every=50, rounds=1, names=NAMES))
    assert compared == [f"mlp: {name}" for name in NAMES]
    assert [timing.peer for timing in timings] == list(NAMES)
    assert all(len(timing.seconds) == 1 for timing in timings)


def test_another_update_is_found() -> None:
    weights = [np.ones((2, 3)), np.full(3, 0.1)]
    other = [weights[0], weights[1] * (1 + 1e-3)]
    worker.check_equal(weights, weights, "same")
    with pytest.raises(AssertionError, match="other"):
        worker.check_equal(other, weights, "other")


def made_up() -> Results:
    def one(peer: str, *micro: float, section: str = "mlp") -> Timing:
        return Timing(section, 1, 50, peer, [value / 1e6 for value in micro])

    timings = [
        one("engine", 200, 100, 150),
        one("Keras fit", 800, 500, 450),  # 4, 5 and 3 times as long
        one("floor", 80, 80, 80),
        one("input alone", 20, 20, 20),
        one("engine", 1000, 1000, 1000, section="cnn"),
        one("Keras fit", 900, 970, 1100, section="cnn"),
        one("textbook loop", 3000, 3000, 3000, section="cnn"),
        one("floor", 1, 1, 1, section="cnn"),  # no peer: it reads no data
    ]
    return Results(timings, Memory(steps=10_000, checkpoints=100, before=500.0, after=515.0))


def test_goals_are_compared_with_the_median_of_each_rounds_ratio() -> None:
    goals = {goal.text: (goal.measured, goal.reached) for goal in made_up().goals()}
    assert goals == {
        "mlp: Keras fit / engine": (pytest.approx(4.0), True),
        "mlp: engine / (floor + input alone)": (pytest.approx(1.5), False),
        "cnn: best peer (Keras fit) / engine": (pytest.approx(0.97), False),
        "memory after 10000 steps / before": (pytest.approx(1.03), False),
    }


@pytest.mark.slow
def test_an_engine_is_timed_beside_another() -> None:
    """Each in a process of its own, which finds its ctl_core in the folder that is named."""
    (ratio,) = engines.compare(engines.ROOT, engines.ROOT, row=0, rounds=1)
    assert ratio > 0
    with pytest.raises(SystemExit, match="ended early"):
        engines.compare(engines.ROOT, engines.ROOT / "docs", row=0, rounds=1)
