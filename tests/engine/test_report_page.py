"""The report of the benchmark in docs/performance.md, and its chart. Nothing is timed."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.chart import draw_chart
from benchmarks.page import DEVICES, find_chart, parse_printed, print_plainly, put_into, read_times
from benchmarks.report import COMPILED, FIT, MANY, Memory, Results, Timing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


@pytest.mark.parametrize("device", DEVICES)
def test_the_chart_shows_the_table(device: str) -> None:
    times = read_times(PAGE.read_text("utf-8"), device)
    chart = draw_chart(times)
    assert chart == find_chart(PAGE, device).read_text("utf-8"), "python -m benchmarks.page"
    bars = [bar for bar in ET.fromstring(chart).iter() if bar.get("height") == "15"]
    assert len(bars) > 15
    assert all(0 < float(bar.get("width", 0)) < 500 for bar in bars)


def test_a_report_replaces_the_one_before_with_its_chart(tmp_path: Path) -> None:
    """With cells that are empty, a goal that was missed, and text around the marks."""
    key = ("mlp", 1, 50)
    timings = [
        Timing(*key, "engine", [100e-6, 110e-6, 120e-6]),
        Timing(*key, FIT, [400e-6] * 3),
        Timing(*key, MANY, [120e-6] * 3),
        Timing("lstm", 1, 50, "engine", [900e-6] * 3),
        Timing("lstm", 1, 50, COMPILED, [200e-6] * 3),
        Timing("lstm", 1, 50, FIT, [1300e-6] * 3),
        Timing("first step", 1, 0, "engine", [2.5] * 3),
        Timing("mlp, exact", 1, 50, "engine", [200e-6] * 3),  # not compared with fit: no bar
    ]
    results = Results(timings, Memory(20, 2, 600.0, 601.0))
    page = tmp_path / "page.md"
    (tmp_path / "pictures").mkdir()
    page.write_text("before\n<!-- bench cpu -->\nold\n<!-- /bench cpu -->\nafter\n")
    put_into(page, "cpu", parse_printed(print_plainly(results, ["a note, " + "long " * 60])))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| mlp | 1 | 50 | 110 |  | 400 | 120 |" in text
    assert "| lstm | 1 | 50 | 900 | 200 | 1300 |  |" in text
    assert "| first step | 1 |  | 2.50 |  |  |  |" in text
    assert "| mlp: Keras fit / engine | ≥4.50 | 3.64 | 3.48–3.82 |" in text
    assert "Memory of a run: 600 MiB" in text
    assert re.search("^a note, long", text, re.M)
    chart = (tmp_path / "pictures" / "times-cpu.svg").read_text()
    assert "110 µs, 0.28 of fit" in chart
    assert "200 µs, 0.15 of fit" in chart
    assert "exact" not in chart
