"""Disks that are full, and folders that cannot be written: one line, and earlier checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctl_core.errors import RunError
from tests.helpers.cases import make_hooks
from tests.helpers.fixtures import Train


def test_summaries_that_cannot_be_begun_are_one_line(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the first step with a hook, and again in what follows a failure."""
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "tb").touch()
    hooks = make_hooks(every_steps={1: lambda step, loss: None}, at_end=lambda reason: None)
    with pytest.raises(RunError, match=r"the run folder cannot be written: .*/tb is no") as one:
        train(hooks, steps=4)
    assert "\n" not in str(one.value)
    err = capfd.readouterr().err
    assert "Traceback" not in err and "[Op:" not in err, err


def test_metrics_that_cannot_be_written_end_no_training(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(make_hooks(), steps=2)
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    assert train(make_hooks(), steps=4).step == 4
    assert "metrics.jsonl" in capfd.readouterr().out
