"""training_log.md: what was expected of a run, and what came of it; lines are only appended."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.project import Cli, source_of

LOG = Path("training_log.md")
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d"
STOPPED = """
import signal

every_steps = {6: lambda step: signal.raise_signal(signal.SIGINT)}


def create_eval_dataset(per_replica_batch_size):
    return data.batch(per_replica_batch_size)
"""


def test_an_entry_at_the_start_and_a_line_at_each_end(cli: Cli) -> None:
    """What the user has written between stays; the same note again is the same entry."""
    source = source_of(every_steps=STOPPED)
    assert cli(source, "--eval-every", "4", "--note", "wider\nhelps").code == 130
    text = LOG.read_text()
    assert re.fullmatch(
        "# Training log\n\n## runs/a\n\n- Expected: wider helps\n"
        r"- Settings: steps 10, batch_size 8, eval_every 4" + "\n"
        rf"- {TIME}: begins, no commit" + "\n"
        rf"- {TIME}: runs/a stopped at step 6; evaluation of step 4: loss \S+" + "\n",
        text,
    ), text
    LOG.write_text(f"{text}\nMy own words.\n")
    assert cli(None, "--note", "wider helps", "--steps", "8").code == 0
    again = LOG.read_text().removeprefix(f"{text}\nMy own words.\n")
    assert re.fullmatch(rf"- {TIME}: runs/a done at step 8; evaluation: loss \S+" + "\n", again), (
        again
    )
    before = LOG.read_text()
    assert cli(None, "--steps", "8").code == 0
    assert LOG.read_text() == before, "nothing was left to train"
    assert cli(None, "--steps", "9", "--note", "longer, too").code == 0
    assert LOG.read_text().startswith(before) and LOG.read_text().count("\n## runs/a\n") == 2


def test_no_entry_without_a_note_and_a_failure_is_a_result(cli: Cli) -> None:
    assert cli(source_of(), "--run-name", "b").code == 0
    assert not LOG.exists()
    failing = "def fail(step):\n    raise ValueError('enough')\n\n\nevery_steps = {5: fail}\n"
    assert cli(source_of(every_steps=failing), "--note", "x").code == 1
    assert LOG.read_text().endswith("runs/a failed at step 5\n")


def test_a_training_log_that_cannot_be_written_ends_no_training(cli: Cli) -> None:
    LOG.mkdir()
    outcome = cli(source_of(), "--note", "x")
    assert (outcome.code, outcome.out.count("training goes on without it")) == (0, 1)
    assert "training_log.md" in outcome.out
