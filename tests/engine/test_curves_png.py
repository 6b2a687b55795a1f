"""curves.png at the end of a training: there whenever that ends, and never its failure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.project import Cli, source_of

SOURCE = source_of(
    every_steps="""\
import os


def look(step, loss):
    ctl_core.report(step, loss=loss)
    if os.environ.get("FAILS_AT") == str(step):
        raise ValueError("a hook that fails")


every_steps = {1: look}
"""
)
PICTURE, LOG = Path("runs/a/curves.png"), Path("runs/a/train.log")


def drawn() -> int:
    """How many points of the picture have the colour of its curves."""
    pixels = np.asarray(Image.open(PICTURE).convert("RGB")).reshape(-1, 3)
    return int((pixels == (31, 119, 180)).all(1).sum())


def test_a_run_is_drawn_when_it_ends_also_by_a_failure(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS_AT", "7")
    assert cli(SOURCE, "--ckpt-every", "4").code == 1
    assert drawn() > 100
    PICTURE.unlink()
    monkeypatch.delenv("FAILS_AT")
    outcome = cli(None)
    assert (outcome.code, outcome.err) == (0, "") and drawn() > 100
    PICTURE.unlink()
    assert cli(None).code == 0 and not PICTURE.exists(), "nothing was left to train"


def test_nothing_is_drawn_where_that_is_switched_off_or_there_is_nothing_to_draw(cli: Cli) -> None:
    assert cli(SOURCE, "--no-curves").code == 0 and not PICTURE.exists()
    outcome = cli(source_of(), "--run-name", "b")
    assert outcome.code == 0 and not Path("runs/b/curves.png").exists()
    assert "curves" not in Path("runs/b/train.log").read_text()


def test_without_matplotlib_or_with_one_that_fails_the_run_ends_as_it_would(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr("ctl_core.curves_png.PACKAGE", "nothing_that_draws")
        outcome = cli(SOURCE)
        assert outcome.code == 0 and "curves.png" not in outcome.out + outcome.err
        assert '--editable ".[plot]"' in LOG.read_text()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "matplotlib.py").write_text("raise RuntimeError('of another Python')\n")
    monkeypatch.syspath_prepend(str(broken))
    outcome = cli(None, "--steps", "12")
    assert (outcome.code, outcome.err) == (0, "") and not PICTURE.exists()
    assert "WARNING curves.png is not drawn: RuntimeError: of another Python" in LOG.read_text()
