"""A cluster in which a hook raises ends at once, with one line, and leaves no process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.killed import Project

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]


@pytest.mark.parametrize("where", ["PLACE['task']['index'] == 1", "True"])
def test_a_hook_raises(tmp_path: Path, where: str) -> None:
    """After step 3, on one of two workers or on both."""
    project = Project(tmp_path, steps=20, workers=2).make()
    path = tmp_path / "callbacks.py"
    raises = f"    if step == 3 and ({where}):\n        raise ValueError('broken')\n    report("
    path.write_text(path.read_text().replace("    report(", raises))
    process = project.start("a", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = (stream.decode() for stream in process.communicate(timeout=600))
    assert project.processes() == [] and process.returncode == 1
    what = r"every_steps\[1\] \(callbacks.py:\d+\): ValueError: broken"
    if where == "True":
        assert re.fullmatch(rf"error: {what}\n", err), err
    else:
        line = r"error: worker 1 ended with exit code 1.* \(see runs/a\)\n"
        assert re.fullmatch(line, err) and "is gone" not in out, err
        assert re.search(rf"error: {what}\n", (tmp_path / "runs/a/worker-1.log").read_text())
    log = (tmp_path / "runs/a/train.log").read_text()
    assert log.count("training, to step 20") == 1, "started once"
