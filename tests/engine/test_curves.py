"""``compare`` and ``plot``: runs beside each other, from the files that they leave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ctl_core import run_process
from ctl_core.__main__ import main

STEPS = range(10, 110, 10)


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs: b has another rate and a setting of its own, and ended with a damaged line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, rate in (("a", 0.1), ("b", 0.2)):
        folder = Path("runs", name)
        folder.mkdir(parents=True)
        lines = [{"step": n, "split": "train", "loss": rate * 10 / n} for n in STEPS]
        for n in (50, 100):
            lines.append({"step": n, "split": "eval", "loss": None, "accuracy": n / 100})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text + ('{"step": 110, "sp' if name == "b" else ""))
        own = "  depth: 3\n" if name == "b" else ""
        (folder / "config.yaml").write_text(
            f"run_name: {name}\nlearning_rate: {rate}\nhparams:\n  width: 8\n{own}"
        )
        run_process.begin(folder, os.getpid())
        run_process.end(folder, "done", step=100, metrics={"accuracy": 1.0})


def test_a_table_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a", "b"]) == 0
    *lines, said = capsys.readouterr().out.splitlines()
    cells = {line[:20].strip(): line[20:].split() for line in lines}
    assert cells["eval accuracy"] == ["1", "1"] and cells["train loss"] == ["0.01", "0.02"]
    assert cells["learning_rate"] == ["0.1", "0.2"] and cells["hparams.depth"] == ["-", "3"]
    assert "hparams.width" not in cells and "run_name" not in cells
    assert said == "b: 1 damaged line of metrics.jsonl left out"
    assert main(["compare", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"learning_rate": [0.1, 0.2], "hparams.depth": [None, 3]}
    assert [run["damaged_lines"] for run in found["runs"]] == [0, 1]
    assert found["runs"][0]["metrics"]["eval loss"] is None


def test_a_line_of_blocks_for_each_metric(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falling where the loss falls; one that was never finite is blank."""
    assert main(["plot", "a"]) == 0
    train, of_nan, accuracy = capsys.readouterr().out.splitlines()
    assert train == "a  train loss           0.1 █▄▃▂▁▁▁▁▁▁ 0.01"
    assert of_nan.split() == ["a", "eval", "loss", "NaN", "NaN"]
    assert accuracy.split()[-3:] == ["0.5", "▁▁▁▁▁▁▁▁▁█", "1"]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf", "html"])
def test_a_file_of_curves(ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(f"curves.{ending}")
    assert main(["plot", "a", "b", "-o", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {path}"
    content = path.read_bytes()
    assert {"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF", "html": b"<table"}[ending] in content
    if ending == "html":
        assert b"hparams.depth" in content and b"http" not in content.split(b"<svg")[0]
    if ending == "png":  # both runs have been drawn, in matplotlib's first two colours
        pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
        for colour in ((31, 119, 180), (255, 127, 14)):
            assert (pixels == colour).all(1).sum() > 200


def test_a_page_of_curves_opens_in_a_browser() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    assert main(["plot", "a", "b", "-o", "curves.html"]) == 0
    page = Path("curves.html").resolve().as_uri()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"]
    command = [browser, *flags, "--screenshot=page.png", page]
    subprocess.run(command, check=True, capture_output=True, timeout=90)
    pixels = np.asarray(Image.open("page.png").convert("RGB")).reshape(-1, 3).astype(int)
    orange = (abs(pixels - (255, 127, 14)).sum(1) < 60).sum()
    assert orange > 50  # b's line


def test_what_cannot_be_drawn_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs", "c").mkdir()
    Path("runs", "c", "config.yaml").write_text("steps: 3\n")
    for words, said in (
        (["plot", "c"], "runs/c: has no metrics yet"),
        (["compare", "a", "d"], "no run 'd' in runs"),
        (["plot", "a", "-o", "x.gif"], "output: expected the name of a .png, .svg, .pdf or .html"),
        (["plot", "a", "-o", "nowhere/x.png"], "output: nowhere/x.png cannot be written"),
        (["plot", "a", "--outptu", "x.png"], "did you mean '--output'?"),
        (["compare"], "compare: the following arguments are required: RUN"),
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err
