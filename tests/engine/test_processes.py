"""A cluster in which a hook raises ends at once, with one line, and leaves no process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.killed_project import Project

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]


def fail(folder: Path, where: str) -> tuple[Project, subprocess.CompletedProcess[str]]:
    """Trains on two workers with a hook that raises after step 3, where the condition holds."""
    project = Project(folder, steps=20, workers=2).make()
    path = folder / "callbacks.py"
    raises = f"    if step == 3 and ({where}):\n        raise ValueError('broken')\n    report("
    path.write_text(path.read_text().replace("    report(", raises))
    process = project.start("a", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=600)
    return project, subprocess.CompletedProcess([], process.returncode, out.decode(), err.decode())


@pytest.mark.parametrize("where", ["PLACE['task']['index'] == 1", "True"])
def test_a_hook_raises(tmp_path: Path, where: str) -> None:
    project, done = fail(tmp_path, where)
    assert project.processes() == []
    assert done.returncode == 1
    what = r"every_steps\[1\] \(callbacks.py:\d+\): ValueError: broken"
    logs = [(tmp_path / f"runs/a/{name}.log").read_text() for name in ("train", "worker-1")]
    if where == "True":
        assert re.fullmatch(rf"error: {what}\n", done.stderr), done.stderr
    else:
        line = rf"error: worker 1: {what} \(runs/a/worker-1.log\)\n"
        assert re.fullmatch(line, done.stderr), done.stderr
        # The chief knows only that it lost worker 1: in its log, not on the console.
        assert (
            "another process of the cluster is gone" in (tmp_path / "runs/a/train.log").read_text()
        )
        assert "is gone" not in done.stdout + done.stderr
    assert [log.count("--- ") for log in logs] == [1, 1], "started once"
