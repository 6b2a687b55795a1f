"""Disks that are full, and folders that cannot be written: one line, and earlier checkpoints."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from ctl_core.errors import RunError, SetupError
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


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log"])
def test_a_file_that_cannot_be_written_is_one_line(
    train: Train, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    train(make_hooks(), steps=2)
    run = tmp_path / "runs" / "run"
    (run / name).unlink()
    (run / name).mkdir()
    with pytest.raises(SetupError, match=f"the run folder cannot be written .*{name}"):
        train(make_hooks(), steps=4)
    assert "Traceback" not in capfd.readouterr().err


def test_metrics_that_cannot_be_written_any_more_end_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctl_core import report

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ctl_core.run_folder.storable", no_space)
    hooks = make_hooks(every_steps={3: lambda step, loss: report(step, loss=loss)})
    with pytest.raises(RunError, match="No space left on device; the checkpoints so far are kept"):
        train(hooks, steps=6, ckpt_every=2)
    assert tf.train.latest_checkpoint(str(tmp_path / "runs/run/ckpt")).endswith("ckpt-2")
