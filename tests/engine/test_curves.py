"""``compare`` and ``plot``: runs beside each other, from the files that they leave."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from ctl_core import run_process
from ctl_core.__main__ import main
from tests.helpers.browser import browser, chromium

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
        speeds = [{"step": n, "learning_rate": rate, "seconds": 7.0 * n} for n in (10, 50)]
        speeds += [{"step": n, "examples_per_second": n, "seconds": 7.0 * n} for n in (90, 95, 100)]
        went = "".join(json.dumps(line) + "\n" for line in speeds)
        (folder / "progress.jsonl").write_text(went + '{"st\n[3]\n' * (name == "a"))
        (folder / "metrics.jsonl").write_text(text + ('{"step": 110, "sp' if name == "b" else ""))
        own = "  depth: 3\n" if name == "b" else ""
        (folder / "config.yaml").write_text(
            f"run_name: {name}\nlearning_rate: {rate}\nhparams:\n  width: 8\n{own}"
        )
        run_process.begin(folder, os.getpid())
        run_process.end(folder, "done", step=100, metrics={"accuracy": 1.0})


def test_a_table_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a", "b"]) == 0
    *lines, of_a, of_b = capsys.readouterr().out.splitlines()
    rows = [re.split(" {2,}", line) for line in lines]
    cells = {name: row for name, *row in rows}
    assert cells["time trained"] == ["11 min 40 s"] * 2 and cells["examples/s"] == ["95"] * 2
    assert cells["eval accuracy"] == ["1", "1"] and cells["train loss"] == ["0.01", "0.02"]
    assert cells["learning_rate"] == ["0.1", "0.2"] and cells["hparams.depth"] == ["-", "3"]
    assert "hparams.width" not in cells and "run_name" not in cells
    assert of_a == "a: 2 damaged lines of progress.jsonl left out"
    assert of_b == "b: 1 damaged line of metrics.jsonl left out"
    assert main(["compare", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"learning_rate": [0.1, 0.2], "hparams.depth": [None, 3]}
    assert [run["damaged_lines"] for run in found["runs"]] == [2, 1]
    assert [run["seconds"] for run in found["runs"]] == [700, 700]
    assert found["runs"][0]["metrics"]["eval loss"] is None


def test_a_line_of_blocks_for_each_metric(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falling where the loss falls, over the same steps; one that was never finite is blank."""
    assert main(["plot", "a"]) == 0
    _, train, of_nan, accuracy, rate, speed, steps = capsys.readouterr().out.splitlines()
    assert rate == "a  learning_rate        0.1 ▅▅▅▅▅      0.1"
    assert speed.split()[:3] == ["a", "examples/s", "90"] and speed.endswith("         ▁█ 100")
    assert train == "a  train loss           0.1 █▄▃▂▁▁▁▁▁▁ 0.01"
    assert of_nan.split() == ["a", "eval", "loss", "NaN", "NaN"]
    assert accuracy == "a  eval accuracy        0.5     ▁▂▄▅▇█ 1"
    assert steps == "steps 10 to 100"


def test_a_metric_of_few_values_is_a_line_between_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*losses: float | None) -> list[str]:
        lines = [{"step": n, "split": "eval", "loss": x} for n, x in enumerate(losses, 1)]
        Path("runs/a/metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        Path("runs/a/progress.jsonl").unlink(missing_ok=True)
        assert main(["plot", "a"]) == 0
        return capsys.readouterr().out.splitlines()

    assert drawn(2, 1) == ["a  eval loss          2 █▇▆▅▄▃▂▁ 1", "steps 1 to 2"]
    assert drawn(2, 0, 1)[0] == "a  eval loss          2 █▇▅▃▁▂▃▅ 1"
    assert drawn(2, 0, None)[0] == "a  eval loss          2 █▇▅▃▁    NaN"
    assert drawn(3) == ["a  eval loss          3 ▅        3", "step 1"]


@pytest.mark.parametrize("width", [36, 40, 60, 80])
def test_no_line_is_longer_than_the_terminal_and_no_name_is_cut(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in a pipe, where COLUMNS says so: curves stand below their names then, tables too."""
    monkeypatch.setenv("COLUMNS", str(width))
    names = ("a", "b", "20260101-000000")
    shutil.copytree("runs/a", f"runs/{names[2]}")
    for command in (["plot", *names], ["compare", *names], ["runs"]):
        assert main(command) == 0
        out = capsys.readouterr().out
        lines = [line for line in out.splitlines() if "damaged" not in line]
        assert max(map(len, lines)) <= width, out
        assert all(re.search(rf"\b{name}\b", out) for name in names), out
        assert {"plot": "eval accuracy", "compare": " 0.01", "runs": "run"}[command[0]] in out
    assert "state" in out and ("age" in out, "accuracy 1" in out) == (width != 40, width > 36)
    name = "a-name-of-more-than-twenty-letters"
    Path("runs/b").rename(f"runs/{name}")
    for command in (["plot", name], ["compare", "a", name], ["runs"]):
        assert main(command) == 0
        assert name in capsys.readouterr().out


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


def test_names_are_no_formulas() -> None:
    with Path("runs/a/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 100, "split": "eval", r"$\frac$": 1.0}) + "\n")
    Path("runs/a/config.yaml").write_text("hparams:\n  price: '$1_$\\x$'\n")
    assert main(["plot", "a", "b", "-o", "curves.svg"]) == 0
    text = Path("curves.svg").read_text()
    assert r"<!-- $\frac$ -->" in text or r"\$\frac\$" in text


def test_a_page_of_curves_opens_in_a_browser() -> None:
    chromium()
    assert main(["plot", "a", "b", "-o", "curves.html"]) == 0
    page = Path("curves.html").resolve().as_uri()
    with browser(Path("browser"), "1200,900") as window:
        window.open(page, "a, b", "examples/s", "hparams.depth", "eval accuracy")
        window.screenshot(Path("page.png"))
    pixels = np.asarray(Image.open("page.png").convert("RGB")).reshape(-1, 3).astype(int)
    orange = (abs(pixels - (255, 127, 14)).sum(1) < 60).sum()
    assert orange > 50  # b's line


def test_values_that_are_no_numbers_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A file may have been edited or cut: the other runs are listed and drawn all the same."""
    lines = [
        '{"step": 1, "split": "eval", "loss": 2}',
        "no line",
        '{"step": true, "split": "eval", "loss": 3}',
        '{"step": 1e30, "split": "eval", "loss": 3}',
        '{"step": 2, "split": ["x"], "loss": {"x": 1}}',
        '{"step": 3, "split": "eval", "loss": 1e400, "other": "x"}',
        '{"step": 4, "split": "eval", "loss": 1}',
        '{"step": 5, "split": "eval", "loss": NaN, "error": true, "more": [1]}',
    ]
    Path("runs/a/metrics.jsonl").write_text("\n".join(lines))
    Path("runs/a/progress.jsonl").unlink()
    Path("runs/a/process.json").write_text('{"pid": "x"}')
    assert main(["plot", "a"]) == 0
    said, drawn, steps = capsys.readouterr().out.splitlines()
    assert said == "a: 3 damaged lines of metrics.jsonl left out"
    assert drawn == "a  eval loss          2 █▇▆▅ ▂▁  NaN" and steps == "steps 1 to 5"
    assert main(["plot", "a", "b", "-o", "curves.png"]) == main(["compare", "a", "b"]) == 0
    capsys.readouterr()
    assert main(["runs", "--sort", "name"]) == 0
    of_a, of_b = capsys.readouterr().out.splitlines()[1:]
    assert of_a.split()[:3] == ["a", "unknown", "5"] and of_a.endswith("loss NaN")
    assert of_b.split()[:3] == ["b", "done", "100"]


def test_what_may_not_be_read_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever is not root: here, by reading that is refused."""
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    for function, words, said in (
        ("read_text", ["plot", "a"], "runs/a/metrics.jsonl: cannot be read: Permission denied."),
        ("open", ["logs", "a"], "runs/a/train.log: cannot be read: Permission denied."),
        ("iterdir", ["runs"], "runs_dir: 'runs' cannot be read: Permission denied."),
    ):
        Path("runs/a/train.log").touch()
        with monkeypatch.context() as patch:
            patch.setattr(Path, function, mock.Mock(side_effect=refused))
            assert main([*words, "--runs-dir", "runs"]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_what_cannot_be_drawn_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs", "c").mkdir()
    Path("runs", "c", "config.yaml").write_text("steps: 3\n")
    for words, said in (
        (["plot", "c"], "runs/c: has no metrics yet"),
        (["compare", "a", "d"], "no run 'd' in runs"),
        (["plot", "a", "-o", "x.gif"], "output: expected the name of a .png, .svg, .pdf or .html"),
        (["plot", "a", "-o", "nowhere/x.png"], "output: nowhere/x.png cannot be written"),
        (["plot", "a", "--outptu", "x.png"], "did you mean '--output'?"),
        (["compare"], "compare: name the runs, such as compare a b; python -m ctl_core runs lists"),
    ):
        assert main([*words, "--runs-dir", "runs"]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err
