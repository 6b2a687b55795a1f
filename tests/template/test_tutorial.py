"""docs/tutorial.md leads to a served model if its files are written and its commands are run."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.rendering import ROOT, Render, Run
from tests.helpers.samples import find_stale_lines, read_samples

TEXT = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
# These commands are skipped, because the environment and the project exist already.
SKIPPED = ("uvx cookiecutter ", "cd ", ". .venv/")


def read_metrics(project: Path, run: str) -> list[dict[str, float]]:
    lines = (project / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["split"] == "eval"]


@pytest.mark.slow
def test_the_tutorial_leads_to_a_served_model(render: Render, run: Run, tmp_path: Path) -> None:
    project = render(tmp_path, example="blank", project_name="Shapes")
    drawn, hooks, used, more = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
    (project / "draw.py").write_text(drawn)
    (project / "callbacks.py").write_text(hooks)
    (project / "use.py").write_text(used)
    blocks = re.findall(r"(<!-- not run.*?-->\n)?^```sh\n(.*?)^```", TEXT, re.M | re.S)
    lines = [line for mark, block in blocks if not mark for line in block.splitlines()]
    commands = [line for line in lines if not line.startswith(SKIPPED)]
    assert len(commands) == 10
    (project / "more.py").write_text(f"from callbacks import *\n\n\n{more}")
    commands.append("./train.sh --callbacks more.py --run-name more --steps 4 --eval-every 0")
    done = run("bash", "-eux", "-c", "\n".join(commands), cwd=project, VENV=sys.prefix)
    first, second = read_metrics(project, "a"), read_metrics(project, "b")
    assert [line["step"] for line in first] == [100, 200, 300]
    assert first[-1]["accuracy"] > 0.95
    assert first[-1]["error"] == pytest.approx(second[-1]["error"], rel=0.01)
    message, training, prediction = read_samples(ROOT / "docs" / "tutorial.md")
    assert message.startswith("error: create_loss")  # the page on errors has the same message
    assert find_stale_lines(training, done.stdout) == []
    assert find_stale_lines(prediction, done.stdout) == []
